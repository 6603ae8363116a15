"""Short attention as plain products: the same values and gradients, and only where it is meant."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_compile.codegen.attention import attention_by_products
from comera_compile.planning.attention_plan import LONGEST_SHORT, AttentionPlan, pays_off
from comera_compile.planning.uses import PLAN
from tests.packed_modules import Capture, linear

Attention = Callable[..., Tensor]
SDPA = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)


def heads(tokens: int = 7, *, dtype: torch.dtype = torch.float64, width: int = 8) -> Tensor:
    """``[batch, heads, tokens, width]``."""
    return torch.randn(2, 3, tokens, width, dtype=dtype)


def results(function: Attention, *inputs: Tensor) -> list[Tensor]:
    """Value, and the gradient of each input under a loss that weighs every entry differently."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def assert_same(function: Attention, reference: Attention, *inputs: Tensor) -> None:
    """Float64 to 1e-12: a forgotten scale or a shifted mask cannot hide in it."""
    for ours, right in zip(results(function, *inputs), results(reference, *inputs), strict=True):
        assert ours.shape == right.shape
        # The gradient of a query with a single key is zero.
        assert (ours - right).norm() <= 1e-12 * right.norm().clamp_min(1.0)


def rewritten(function: Attention, *inputs: Tensor) -> Capture:
    """The compiled graph after all passes, its results checked against eager."""
    capture = Capture()
    call = torch.compile(function, backend=capture)
    assert_same(call, function, *inputs)
    return capture


def is_rewritten(function: Attention, *inputs: Tensor, dynamic: bool = False) -> bool:
    """Whether the one attention of a function becomes products; inputs of any dtype, run once."""
    capture = Capture()
    torch.compile(function, backend=capture, dynamic=dynamic)(*inputs)
    products, kept = capture.count(attention_by_products), capture.count(*SDPA)
    assert products + kept == 1
    return bool(products)


# -- the generated function -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients(causal: bool, scale: float | None) -> None:
    # Against torch's own attention, each input with its gradient.
    assert_same(
        lambda q, k, v: attention_by_products(q, k, v, causal, scale),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale),
        *(heads() for _ in range(3)),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [1, 4, 11])
def test_other_numbers_of_keys(causal: bool, keys: int) -> None:
    # Cross-attention; torch aligns the causal mask at the top left whatever the lengths.
    assert_same(
        lambda q, k, v: attention_by_products(q, k, v, causal, None),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        heads(),
        heads(keys),
        heads(keys),
    )


def test_a_causal_row_does_not_see_later_tokens() -> None:
    # Changing the last token leaves all earlier outputs as they are, bit by bit.
    q, k, v = (heads() for _ in range(3))
    before = attention_by_products(q, k, v, True, None)
    k[..., -1, :], v[..., -1, :] = 100.0, 100.0
    after = attention_by_products(q, k, v, True, None)
    assert torch.equal(before[..., :-1, :], after[..., :-1, :])
    assert not torch.equal(before[..., -1, :], after[..., -1, :])


def test_large_scores_do_not_overflow() -> None:
    # The softmax subtracts the largest score first; queries are scaled before the product.
    q, k, v = heads() * 1e3, heads() * 1e3, heads()
    output = attention_by_products(q, k, v, True, None)
    assert output.isfinite().all() and output.abs().max() <= v.abs().max() + 1e-9


# -- the pass ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_graph_holds_products_instead(causal: bool, scale: float | None) -> None:
    # The plan has what the call said; nothing of the blocked kernel is left.
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    capture = rewritten(attend, *(heads() for _ in range(3)))
    (node,) = (n for n in capture.nodes if n.target is attention_by_products)
    assert node.meta[PLAN] == AttentionPlan(causal, scale) and node.args[3:] == (causal, scale)
    assert capture.count(*SDPA) == 0


def test_positional_arguments() -> None:
    # torch's order: mask, dropout, causal.
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, None, 0.0, True)

    assert rewritten(attend, *(heads() for _ in range(3))).count(attention_by_products) == 1


def test_one_tensor_as_query_key_and_value() -> None:
    # One node in three places: its gradient is the sum of the three.
    capture = rewritten(lambda x: F.scaled_dot_product_attention(x, x, x), heads())
    assert capture.count(attention_by_products) == 1


def test_two_in_a_row() -> None:
    # The output of one is the query of the next.
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(first, k, first)

    assert rewritten(attend, *(heads() for _ in range(3))).count(attention_by_products) == 2


def test_with_packed_projections_around() -> None:
    # The usual block: each of both kinds of plan takes the result of the other.
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.out = linear(24, 72), linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            # something in between, so that it does not run from bond to bond
            q, k, v = (t.tanh().unflatten(-1, (3, 8)).transpose(1, 2) for t in self.project(x).chunk(3, dim=-1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2))

    capture = Capture()
    block, x = Block(), torch.randn(2, 5, 24, dtype=torch.float64)
    assert_same(torch.compile(block, backend=capture), block, x)
    assert capture.count(attention_by_products) == 1 and capture.markers == 0


def test_inside_a_checkpoint() -> None:
    # Bodies of higher-order ops are rewritten as well.
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)

    assert rewritten(attend, *(heads() for _ in range(3))).count(attention_by_products) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_exact_dtypes(dtype: torch.dtype) -> None:
    assert is_rewritten(lambda q: F.scaled_dot_product_attention(q, q, q), heads(dtype=dtype))


# -- left alone -------------------------------------------------------------------------------------------------------


def test_a_mask_is_left_alone() -> None:
    # Boolean and additive.
    q, allowed = heads(), torch.ones(7, 7, dtype=torch.bool).tril()
    for mask in (allowed, torch.zeros(7, 7, dtype=torch.float64)):
        assert not is_rewritten(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), q, mask)


def test_dropout_is_left_alone() -> None:
    assert not is_rewritten(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1), heads())
    assert is_rewritten(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.0), heads())


def test_grouped_queries_are_left_alone() -> None:
    def attend(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    assert not is_rewritten(attend, torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8))


def test_long_sequences_are_left_alone() -> None:
    # On either side; the scores of a longer one leave the cache.
    long, short = (heads(n, dtype=torch.float32) for n in (LONGEST_SHORT + 1, LONGEST_SHORT))
    attend: Attention = lambda q, k: F.scaled_dot_product_attention(q, k, k)  # noqa: E731
    assert is_rewritten(attend, short, short)
    assert not is_rewritten(attend, long, short) and not is_rewritten(attend, short, long)


def test_half_precision_is_left_alone() -> None:
    # torch's kernel keeps the scores in float32; products would round them.
    for dtype in (torch.bfloat16, torch.float16):
        assert not is_rewritten(lambda q: F.scaled_dot_product_attention(q, q, q), heads(dtype=dtype))


def test_autocast_is_left_alone() -> None:
    # Inputs are float32, but what runs is bfloat16.
    def attend(q: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(q, q, q)

    assert not is_rewritten(attend, heads(dtype=torch.float32))
    outside: Attention = lambda q: F.scaled_dot_product_attention(q, q, q)  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_rewritten(outside, heads(dtype=torch.float32))


def test_dynamic_lengths_are_left_alone() -> None:
    # A length that may grow must not be decided on once. A dynamic batch alone is no reason.
    attend: Attention = lambda q: F.scaled_dot_product_attention(q, q, q)  # noqa: E731
    assert not is_rewritten(attend, heads(), dynamic=True)
    batches = heads()
    torch._dynamo.maybe_mark_dynamic(batches, 0)
    assert is_rewritten(attend, batches)


def test_three_dimensions_are_left_alone() -> None:
    # Heads folded into the batch: rare, and torch takes another route.
    q = torch.randn(6, 7, 8, dtype=torch.float64)
    assert not is_rewritten(lambda q: F.scaled_dot_product_attention(q, q, q), q)


def test_where_it_pays_off() -> None:
    # Measured on CPUs only; a GPU has its own fused kernels. Empty and symbolic lengths: no.
    assert pays_off(1, LONGEST_SHORT, "cpu") and not pays_off(1, LONGEST_SHORT + 1, "cpu")
    assert not pays_off(8, 8, "cuda") and not pays_off(0, 8, "cpu") and not pays_off(8, object(), "cpu")


def test_the_default_scale_is_that_of_the_paper() -> None:
    # One query, two keys: softmax of q.k over the root of the width, by hand.
    q, v = torch.tensor([[[[2.0, 0, 0, 0]]]]), torch.tensor([[[[1.0], [0.0]]]])
    k = torch.tensor([[[[3.0, 0, 0, 0], [1.0, 0, 0, 0]]]])
    weight = 1 / (1 + math.exp((2 - 6) / 2))
    assert torch.allclose(attention_by_products(q, k, v, False, None), torch.tensor(weight))


BROADCAST = {
    "keys and values for all heads": ((2, 4, 9, 8), (2, 1, 9, 8), (2, 1, 9, 8)),
    "one query for the batch": ((1, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)),
    "heads against batch": ((1, 6, 5, 8), (6, 1, 5, 8), (6, 1, 5, 8)),
    "values of no width": ((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 0)),
}


@pytest.mark.parametrize("sizes", BROADCAST.values(), ids=BROADCAST.keys())
def test_broadcast_inputs_are_left_to_torch(sizes: tuple[tuple[int, ...], ...]) -> None:
    # Flattened to one batch axis they would not fit each other or, worse, fit wrongly: (1, 6) against (6, 1).
    inputs = [torch.randn(size, dtype=torch.float64) for size in sizes]
    assert not is_rewritten(F.scaled_dot_product_attention, *inputs)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_turn_the_order_of_the_scores_are_left_to_torch(scale: float) -> None:
    assert not is_rewritten(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale), *[heads()] * 3)

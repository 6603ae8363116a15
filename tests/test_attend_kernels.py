"""Attention between bonds in C++: values and gradients against float64, masks, threads, what is written and refused."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comera_compile.codegen.apply_attend import Attend
from comera_compile.codegen.cpu import attend_kernels as kernels

# Largest error relative to the largest entry.
BARS = {torch.float64: 1e-11, torch.float32: 2e-6}
ROOT = Path(__file__).resolve().parents[1]
TOKENS = ((1, 1), (7, 7), (33, 33), (128, 128), (130, 130), (1, 130), (33, 7), (7, 128), (130, 33))
HEADS = ((1, 1), (4, 4), (4, 2), (3, 1))
DIMS, BONDS, MASKS = (1, 5, 32, 64, 128), (1, 3, 8, 30, 32), ("none", "all", "keys", "pairs", "full")


class Case(NamedTuple):
    """Sizes of one call. ``bonds``: of q, k, v and the result."""

    batch: int = 2
    tokens: tuple[int, int] = (50, 50)
    heads: tuple[int, int] = (4, 2)
    dim: int = 8
    bonds: tuple[int, int, int, int] = (8, 3, 5, 9)
    mask: str = "none"
    bias: bool = True
    causal: bool = False
    scale: float = 0.4

    def settings(self) -> kernels.Settings:
        return (*self.heads, self.causal, self.scale)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[Any], Tensor]:
    """The eleven operands, of which q and k come out of size one, and a gradient of the result."""
    (queries, keys), (heads, kv_heads), bonds = case.tokens, case.heads, case.bonds
    rows = [torch.randn(case.batch, n, b, dtype=dtype) for n, b in zip((queries, keys, keys), bonds, strict=False)]
    halves: list[Any] = []
    for bond, count in zip(bonds, (heads, kv_heads, kv_heads), strict=False):
        half = torch.randn(bond, count * case.dim, dtype=dtype) / math.sqrt(bond)
        halves += [half, torch.randn(count * case.dim, dtype=dtype) / 2 if case.bias else None]
    first = torch.randn(bonds[3], heads * case.dim, dtype=dtype)
    grad = torch.randn(case.batch, queries, bonds[3], dtype=dtype)
    return [*rows, *halves, first, draw_mask(case, dtype)], grad


def draw_mask(case: Case, dtype: torch.dtype) -> Tensor | None:
    """Numbers and -inf, which may fill whole rows."""
    batch, heads, (queries, keys) = case.batch, case.heads[0], case.tokens
    shapes = {"all": (1, 1, queries, keys), "keys": (batch, 1, 1, keys), "pairs": (queries, keys)}
    shape = shapes.get(case.mask, (batch, heads, queries, keys))
    closed = torch.rand(shape) < 0.3
    return None if case.mask == "none" else torch.randn(shape, dtype=dtype).masked_fill(closed, -math.inf)


def run(operands: list[Any], grad: Tensor, settings: kernels.Settings) -> list[Tensor]:
    """The result, then the gradients of all operands that are there but the mask."""
    given: Any = tuple(operands)
    made = kernels.backward(grad, given, settings)
    assert [m is None for m in made] == [o is None for o in operands[:-1]]
    return [kernels.attend(given, settings), *(m for m in made if m is not None)]


def reference(operands: list[Any], settings: kernels.Settings, factors: Tensor | None = None) -> Tensor:
    """By products and softmax; ``factors``, ``[batch, heads, queries, keys]``, is what dropout does to the weights."""
    hq, hk, hv, second_q, bias_q, second_k, bias_k, second_v, bias_v, first, mask = operands
    heads, kv_heads, causal, scale = settings

    def split(h: Tensor, half: Tensor, bias: Tensor | None, count: int) -> Tensor:
        wide = h @ half if bias is None else h @ half + bias
        return wide.unflatten(-1, (count, -1)).transpose(1, 2).repeat_interleave(heads // count, dim=1)

    q, k, v = (
        split(hq, second_q, bias_q, heads),
        split(hk, second_k, bias_k, kv_heads),
        split(hv, second_v, bias_v, kv_heads),
    )
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    scores = scores if mask is None else scores + mask
    # a row of -inf would be NaN: torch's function gives zeros for it
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(dim=-1).masked_fill(empty, 0)
    mixed = (weights if factors is None else weights * factors) @ v
    return mixed.transpose(1, 2).flatten(2) @ first.t()


def by_torch(operands: list[Any], grad: Tensor, settings: kernels.Settings, dtype: torch.dtype) -> list[Tensor]:
    """The same as :func:`run` by autograd in ``dtype``."""
    given = [None if o is None else o.detach().to(dtype, copy=True) for o in operands]
    leaves = [o.requires_grad_() for o in given[:-1] if o is not None]
    y = reference(given, settings)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]


def truth(operands: list[Any], grad: Tensor, settings: kernels.Settings) -> list[Tensor]:
    return by_torch(operands, grad, settings, torch.float64)


def added_up(operands: list[Any], grad: Tensor, settings: kernels.Settings) -> list[float]:
    """For each gradient, the largest sum of magnitudes if it is a plain sum over rows, as of a bias; 0 for others."""
    apart = list(operands)
    for rows, bias in ((0, 4), (1, 6), (2, 8)):
        if operands[bias] is not None:
            apart[bias] = operands[bias].expand(*operands[rows].shape[:2], -1)
    there = [k for k, o in enumerate(operands[:-1]) if o is not None]
    sums = zip(there, truth(apart, grad, settings)[1:], strict=True)
    return [0.0, *(g.abs().sum((0, 1)).max().item() if k in (4, 6, 8) else 0.0 for k, g in sums)]


def assert_right(ours: list[Tensor], drawn: tuple[list[Any], Tensor], case: Case) -> None:
    dtype, right = drawn[1].dtype, truth(*drawn, case.settings())
    other = by_torch(*drawn, case.settings(), dtype)
    largest = [r.abs().max().item() if r.numel() else 0.0 for r in right]
    # What cancels to nearly nothing has no digits: the gradient of k's bias is zero, as it moves all scores of a query
    # alike. So a sum over rows is held to the sum of the magnitudes, which is what rounding is relative to.
    bars = [BARS[dtype] * max(most, max(largest) / 100) for most in largest]
    sums = added_up(*drawn, case.settings())
    bars = [max(bar, BARS[dtype] * total) for bar, total in zip(bars, sums, strict=True)]
    for a, b, c, bar in zip(ours, right, other, bars, strict=True):
        assert a.shape == b.shape and a.dtype == dtype
        if a.numel():
            error, loss = (a.double() - b).abs().max().item(), (c.double() - b).abs().max().item()
            # some sums lose more in torch's own products, which add in a shorter chain
            assert error <= max(bar, 4 * loss), (case, list(b.shape), error, loss, bar)


def check(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    drawn = draw(case, dtype)
    ours = run(*drawn, case.settings())
    assert_right(ours, drawn, case)
    return ours


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_values_and_gradients(batch: int, dtype: torch.dtype) -> None:
    # sizes in all combinations of tokens and heads; the rest drawn, each value many times
    pick = random.Random(batch)
    for tokens, heads in itertools.product(TOKENS, HEADS):
        bonds = tuple(pick.choice(BONDS) for _ in range(4))
        dim, mask, bias = pick.choice(DIMS), pick.choice(MASKS), pick.random() < 0.5
        case = Case(batch, tokens, heads, dim, bonds, mask, bias, pick.random() < 0.5, pick.uniform(0.2, 1) / dim**0.5)  # type: ignore[arg-type]
        check(case, dtype)


@pytest.mark.parametrize("dim", [1, 64, 200, 256])
def test_many_tokens(dim: int) -> None:
    # more keys than a product sums in registers at once
    for causal in (False, True):
        check(Case(1, (300, 530), (2, 1), dim, (8, 8, 16, 8), scale=dim**-0.5, causal=causal), torch.float32)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_any_number_of_threads(count: int) -> None:
    torch.set_num_threads(count)
    # fewer and more heads than threads, a batch that threads share unevenly, nothing to share
    for batch, heads in ((1, (12, 12)), (1, (1, 1)), (3, (4, 2)), (5, (3, 1)), (2, (3, 3)), (0, (4, 2))):
        case = Case(batch, (60, 55), heads, mask="keys")
        operands, grad = draw(case)
        results = [run(operands, grad, case.settings()) for _ in range(2)]
        assert_right(results[0], (operands, grad), case)
        # sums are put together in one order, whichever thread comes first
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_with_fewer_threads_than_asked_for() -> None:
    # OpenMP may give fewer: what the others were to do must be done all the same.
    script = (
        "import torch; from tests import test_attend_kernels as t; torch.set_num_threads(4); t.check(t.Case(batch=3))"
    )
    for limit in ("1", "3"):
        environment = os.environ | {"OMP_THREAD_LIMIT": limit, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_rows_without_keys_are_what_torch_makes_them() -> None:
    case = Case(1, (20, 24), (2, 2), 8, (5, 5, 5, 16), scale=0.3)
    operands, grad = draw(case)
    mask = torch.zeros(1, 1, 20, 24, dtype=torch.float64)
    mask[0, 0, 3] = mask[0, 0, 10:, :5] = -math.inf
    operands[9], operands[10] = torch.eye(16, dtype=torch.float64), mask
    result, *gradients = run(operands, grad, case.settings())
    q, k, v = (h @ half + bias for h, half, bias in zip(operands[:3], operands[3:9:2], operands[4:9:2], strict=True))
    heads = [t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v)]
    right = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3).transpose(1, 2).flatten(2)
    torch.testing.assert_close(result, right, rtol=1e-12, atol=1e-12)
    assert (result[0, 3] == 0).all()
    assert (gradients[0][0, 3] == 0).all() and all(g.isfinite().all() for g in gradients)


def test_a_padding_mask_is_a_shorter_sequence() -> None:
    case = Case(1, (30, 30), bonds=(8, 8, 8, 8))
    operands, grad = draw(case)
    masked = [
        *operands[:10],
        torch.zeros(1, 1, 1, 30, dtype=torch.float64).index_fill(3, torch.arange(20, 30), -math.inf),
    ]
    ours, short = (
        run(masked, grad, case.settings()),
        [operands[0], operands[1][:, :20], operands[2][:, :20], *operands[3:]],
    )
    right = run(short, grad, case.settings())
    for k in (2, 3):  # gradients of the bonds of k and v
        assert (ours[k][:, 20:] == 0).all()
        ours[k] = ours[k][:, :20]
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_strided_expanded_and_misaligned_inputs() -> None:
    case = Case(2, (20, 30), mask="full")
    operands, grad = draw(case)
    right = run(operands, grad, case.settings())
    odd = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (*operands, grad)]
    strided = [torch.stack([t, t], dim=-1)[..., 0] for t in (*operands, grad)]
    transposed = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in (*operands, grad)]
    for given in (odd, strided, transposed):
        assert all(torch.equal(a, b) for a, b in zip(run(given[:-1], given[-1], case.settings()), right, strict=True))
    flat = [*operands[:3], operands[3][:1].expand_as(operands[3]), *operands[4:10], operands[10][:, :1]]
    ones = torch.ones((), dtype=torch.float64).expand_as(grad)
    assert_right(run(flat, ones, case.settings()), (flat, ones), case)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("place", range(3))
def test_numbers_that_are_none_go_where_they_would_in_torch(place: int, wrong: float) -> None:
    case = Case(2, (20, 20), (2, 1))
    operands, grad = draw(case)
    operands[place][1, 4, 2] = wrong
    for ours, right in zip(run(operands, grad, case.settings()), truth(operands, grad, case.settings()), strict=True):
        assert torch.equal(ours.isfinite(), right.isfinite())
    grad[0, 3, 1] = wrong
    operands, _ = draw(case)
    for ours, right in zip(run(operands, grad, case.settings()), truth(operands, grad, case.settings()), strict=True):
        assert torch.equal(ours.isfinite(), right.isfinite())


def test_nothing_outside_of_the_results_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    # Results lie inside larger blocks with a known value around them.
    bands: list[Tensor] = []

    def banded(like: Tensor) -> Tensor:
        bands.append(torch.full((like.numel() + 64,), 7.0, dtype=like.dtype))
        return bands[-1][32 : 32 + like.numel()].view(like.shape)

    for name in ("_new_result", "_new_gradients"):
        real = getattr(kernels, name)

        def made(operands: Any, real: Any = real) -> Any:
            plain = real(operands)
            return banded(plain) if isinstance(plain, Tensor) else tuple(banded(p) for p in plain)

        monkeypatch.setattr(kernels, name, made)
    for count, dim, bias in itertools.product((1, 3), (3, 8), (True, False)):
        torch.set_num_threads(count)
        check(Case(3, (50, 35), dim=dim, bias=bias), torch.float32)
    assert bands and all((b[:32] == 7).all() and (b[-32:] == 7).all() for b in bands)


def test_memory_does_not_grow_as_queries_times_keys() -> None:
    # One block of 3000 x 3000 floats would be 36 MB.
    script = (
        "import resource, torch; from tests import test_attend_kernels as t; torch.set_num_threads(1)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "case = t.Case(1, (3000, 3000), (1, 1)); operands, grad = t.draw(case, torch.float32)\n"
        "t.run(*t.draw(t.Case(), torch.float32), t.Case().settings()); before = peak()\n"
        "t.run(operands, grad, case.settings()); print((peak() - before) / 1024)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 8


def test_operators_describe_themselves_rightly() -> None:
    for mask, bias in (("none", True), ("keys", False)):
        case = Case(2, (5, 7), dim=4, mask=mask, bias=bias)
        operands, grad = draw(case, torch.float32)
        checks = ("test_schema", "test_faketensor")
        arguments = (*operands, *case.settings())
        torch.library.opcheck(torch.ops.comera.attend.default, arguments, test_utils=checks)
        torch.library.opcheck(torch.ops.comera.attend_backward.default, (grad, *arguments), test_utils=checks)


def test_what_does_not_fit_is_refused() -> None:
    case = Case()
    operands, grad = draw(case)
    for place in range(11):
        wrong = [*operands[:10], torch.zeros(50, 50, dtype=torch.float64)]
        wrong[place] = wrong[place][..., :-1]
        with pytest.raises((ValueError, RuntimeError), match=r"attend: expected|divide|expanded size"):
            kernels.attend(tuple(wrong), case.settings())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="heads"):
        kernels.attend(tuple(operands), (4, 3, False, 1.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one dtype"):
        kernels.attend((operands[0].float(), *operands[1:]), case.settings())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradient"):
        kernels.backward(grad[:, 1:], tuple(operands), case.settings())  # type: ignore[arg-type]


def test_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    h = torch.zeros(1, 1, 1)
    assert kernels.available(h, 1) and kernels.available(h.double(), 256)
    assert not kernels.available(h.bfloat16(), 64) and not kernels.available(h, 257)
    assert not kernels.available(h.to("meta"), 64)
    monkeypatch.setattr(kernels, "_library", lambda dtype: None)
    assert not kernels.available(h, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal: bool) -> None:
    case = Case(2, (3, 4), (2, 1), 2, (2, 1, 3, 2), "pairs", causal=causal)
    operands, _ = draw(case)
    operands[10] = operands[10].nan_to_num(neginf=-2.0)
    leaves = [o.requires_grad_() for o in operands[:10]]
    torch.autograd.gradcheck(lambda *given: Attend.apply(case.settings(), 0.0, None, *given), (*leaves, operands[10]))


def test_traced_with_sizes_that_change() -> None:
    case = Case(dim=4)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(
        lambda *given: Attend.apply(case.settings(), 0.0, None, *given),
        backend="aot_eager",
        dynamic=True,
        fullgraph=True,
    )
    for batch, tokens in ((2, (50, 41)), (3, (20, 31)), (5, (9, 64))):
        operands, grad = draw(case._replace(batch=batch, tokens=tokens))
        wanted = [k for k in range(10) if k != 5]  # one half is not trained
        leaves = [operands[k].requires_grad_() for k in wanted]
        y = compiled(*operands)
        ours = [y.detach(), *torch.autograd.grad(y, leaves, grad)]
        right = run([o if o is None else o.detach() for o in operands], grad, case.settings())
        for a, b in zip(ours, [right[0], *(right[1 + k] for k in wanted)], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_functions_are_declared_with_the_types_they_have() -> None:
    # A number given where a pointer is meant would be read as an address.
    library = kernels._library(torch.float64)
    assert library is not None
    for name, tensors in (("attend", 2), ("attend_backward", 3)):
        declared = getattr(library, name).argtypes
        assert declared == [ctypes.c_void_p, *[ctypes.c_double] * 2, *[ctypes.c_void_p] * tensors, ctypes.c_int64]

"""One pairwise step: its matrix form, its copies, its adjoints, and ``contract`` against ``torch.einsum``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor as Value
from torch.utils._python_dispatch import TorchDispatchMode

from comera_compile.codegen.contract import contract
from comera_compile.planning.step import Step, Tensor, gradient

Near = Callable[..., None]
SIZES = {"b": 2, "c": 3, "m": 4, "u": 2, "n": 5, "v": 3, "k": 3, "l": 2, "t": 6}


def step(out: str, left: str, right: str) -> Step:
    """A step from axis letters."""
    return Step(Tensor("out", tuple(out)), Tensor("left", tuple(left)), Tensor("right", tuple(right)))


def values(made: Step, sizes: dict[str, int]) -> tuple[Value, Value]:
    left, right = (torch.randn([sizes[a] for a in t.axes], dtype=torch.float64) for t in (made.left, made.right))
    return left, right


def einsum(made: Step, left: Value, right: Value) -> Value:
    """The truth: torch's own contraction of the same axes."""
    given = (made.left.axes, made.right.axes, made.out.axes)
    names = {a: chr(ord("a") + k) for k, a in enumerate(dict.fromkeys(itertools.chain(*given)))}
    a, b, out = ("".join(names[x] for x in axes) for axes in given)
    return torch.einsum(f"{a},{b}->{out}", left, right)


def every_order(batch: str, rows: str, cols: str, summed: str) -> Iterator[Step]:
    """Every axis order of all three tensors."""
    groups = (batch + rows + cols, batch + rows + summed, batch + summed + cols)
    for out, left, right in itertools.product(*(itertools.permutations(g) for g in groups)):
        yield step("".join(out), "".join(left), "".join(right))


def random_steps(count: int) -> Iterator[tuple[Step, dict[str, int]]]:
    """Up to two axes a group, any order, sizes 0 to 3."""
    draw = random.Random(0)
    for _ in range(count):
        batch, rows, cols, summed = (
            "".join(draw.sample(letters, draw.randint(0, 2))) for letters in ("bc", "mt", "nv", "kl")
        )
        out, left, right = (list(g) for g in (batch + rows + cols, batch + rows + summed, batch + summed + cols))
        for axes in (out, left, right):
            draw.shuffle(axes)
        yield step("".join(out), "".join(left), "".join(right)), {a: draw.choice((0, 1, 1, 2, 3, 3)) for a in SIZES}


class Copies(TorchDispatchMode):
    """Counts the elements that operations copy into another order."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            self.numel += result.numel()
        return result


def copies_made(made: Step, sizes: dict[str, int]) -> int:
    left, right = values(made, sizes)
    with Copies() as copies:
        contract(made, left, right, sizes)
    return copies.numel


def contracted(made: Step, left: Value, right: Value, sizes: dict[str, int]) -> Value:
    """The contraction in the shape of the result's axes; ``contract`` itself promises their order only."""
    return contract(made, left, right, sizes).reshape([sizes[a] for a in made.out.axes])


@pytest.mark.parametrize("groups", ["b,m,n,k", ",m,n,k", "b,m,,k", ",,n,k", ",m,n,", "b,m,n,", ",,,k", "b,t,n,k"])
def test_contract_is_einsum_in_every_axis_order(groups: str, assert_near: Near) -> None:
    for made in every_order(*groups.split(",")):
        left, right = values(made, SIZES)
        assert_near(contracted(made, left, right, SIZES), einsum(made, left, right))


def test_contract_is_einsum_for_groups_of_axes_and_sizes_down_to_zero(assert_near: Near) -> None:
    seen = set()
    for made, sizes in random_steps(600):
        left, right = values(made, sizes)
        actual = contract(made, left, right, sizes)
        expected = einsum(made, left, right)
        assert_near(actual.reshape(expected.shape), expected)
        assert actual.is_contiguous()  # the next step reads the elements in the order of the axes
        seen |= {("swapped", made.swapped), ("copies", bool(made.copied)), ("empty", actual.numel() == 0)}
    assert len(seen) == 6  # each case on both sides


def test_operands_may_be_strided(assert_near: Near) -> None:
    # A slice of the packed vector or a cropped half is not contiguous.
    made = step("mn", "mk", "kn")
    left, right = torch.randn(4, 6, dtype=torch.float64)[:, ::2], torch.randn(5, 3, dtype=torch.float64).T
    assert_near(contract(made, left, right, SIZES), left @ right)


def test_right_operand_first_is_a_swapped_product_without_copies() -> None:
    made = step("nm", "mk", "kn")
    assert made.swapped and made.product_axes == ("n", "m")
    assert made.matmul_sizes(SIZES) == (1, 5, 4, 3)  # as computed: n rows, m columns
    assert made.copied == () and copies_made(made, SIZES) == 0
    assert not step("mn", "mk", "kn").swapped


def test_transposed_operands_are_read_in_place() -> None:
    for left, right in itertools.product(("mk", "km"), ("kn", "nk")):
        assert step("mn", left, right).copied == ()
    assert step("bmn", "bkm", "bnk").copied == ()  # a leading batch axis changes nothing


def test_the_operand_that_holds_the_rows_is_not_copied() -> None:
    # Both list the summed axes, in different orders: the core is turned, not the rows x width activation.
    assert [t.name for t in step("tm", "tkl", "lkm").copied] == ["right"]
    assert [t.name for t in step("mt", "lkm", "tkl").copied] == ["left"]


@pytest.mark.parametrize("groups", [",mu,n,k", ",m,n,kl", ",mt,n,kl", ",m,nv,k"])
def test_copies_predicted_are_copies_made(groups: str) -> None:
    counts = set()
    for made in every_order(*groups.split(",")):
        assert made.copied_numel(SIZES) == copies_made(made, SIZES), str(made)
        counts.add(made.copied_numel(SIZES))
    assert len(counts) > 3  # none, an operand, the result, several of them


def test_copies_are_never_more_than_predicted() -> None:
    # With a batch axis in the middle or axes of size one, torch finds a view where the prediction has a copy.
    for made, sizes in random_steps(400):
        assert copies_made(made, sizes) <= made.copied_numel(sizes), str(made)


def test_leading_batch_axes_cost_no_copies() -> None:
    for made in every_order("", "m", "n", "k"):
        stacked = step(*("b" + "".join(t.axes) for t in (made.out, made.left, made.right)))
        assert stacked.copied_numel(SIZES) == copies_made(stacked, SIZES) == 2 * made.copied_numel(SIZES)


def test_adjoints_are_the_gradients(assert_near: Near) -> None:
    for made, sizes in random_steps(200):
        left, right = (v.requires_grad_() for v in values(made, sizes))
        grad = torch.randn([sizes[a] for a in made.out.axes], dtype=torch.float64)
        expected = torch.autograd.grad(einsum(made, left, right), (left, right), grad)
        to_left, to_right = made.adjoints()
        assert (to_left.out, to_right.out) == (gradient(made.left), gradient(made.right))
        assert_near(contracted(to_left, grad, right.detach(), sizes), expected[0])
        assert_near(contracted(to_right, left.detach(), grad, sizes), expected[1])


def test_counts_by_hand() -> None:
    made = step("btmn", "btmk", "kbn")
    assert made.flops(SIZES) == 2 * (2 * 6 * 4) * 3 * 5
    assert made.matmul_sizes(SIZES) == (2, 6 * 4, 5, 3)
    # The batch axis of the right operand lies in the middle: 3 * 2 * 5 elements are turned.
    assert made.copied_numel(SIZES) == 30
    assert made.left.numel(SIZES) == 2 * 6 * 4 * 3
    assert str(made) == "out[b,t,m,n] = left[b,t,m,k] . right[k,b,n]"

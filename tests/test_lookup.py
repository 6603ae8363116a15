"""Looking up rows of a tensor-train-matrix table against indexing the rebuilt table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comera_compile.codegen.lookup import ttm_lookup, ttm_lookup_backward
from comera_compile.planning import lookup_plan
from comera_compile.planning.lookup_plan import LookupPlan
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.packing import to_dense
from comera_compile.tt.shape import TTShape

Near = Callable[..., None]
SHAPES = {
    "order 1": TTShape("ttm", 5, 4, (5,), (4,), (1, 1), 1.5),
    "order 2": TTShape("ttm", 6, 8, (3, 2), (2, 4), (1, 5, 1), 0.9),
    "order 3, padded, zero row": TTShape("ttm", 17, 11, (3, 2, 3), (2, 3, 2), (1, 3, 4, 1), 1.1, 16),
    "order 4": TTShape("ttm", 36, 24, (3, 2, 3, 2), (2, 3, 2, 2), (1, 3, 5, 2, 1), 0.7),
    "order 4, zero row in the middle": TTShape("ttm", 31, 7, (2, 4, 2, 2), (2, 1, 2, 2), (1, 2, 4, 2, 1), 1.3, 12),
    "rank 1": choose_shape(30, 12, format="ttm", rank=1, zero_row=0),
    "full ranks": choose_shape(24, 12, format="ttm", rank=10**6).with_scale(0.8),
}
# Whether halves are gathered or taken from a table of all: by the numbers, always the one, always the other.
BRANCHES = {"as planned": lookup_plan.GATHER_COST, "gather": 0, "table": 10**9}


@pytest.fixture(params=list(BRANCHES.values()), ids=list(BRANCHES))
def branch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_plan, "GATHER_COST", request.param)


def ids_of(shape: TTShape) -> dict[str, Tensor]:
    """Ids of every kind; the padding row and the last row are among them."""
    some = torch.randint(shape.rows, (2, 5))
    some[0, 0], some[1, 1] = max(shape.zero_row, 0), shape.rows - 1
    return {
        "one": torch.tensor(shape.rows - 1),
        "vector with duplicates": torch.tensor([1, 1, 0, shape.rows - 1, 1]),
        "batch": some,
        "every row twice": torch.arange(shape.rows).repeat(2),
        "padding only": torch.full((3,), max(shape.zero_row, 0)),
        "int32": some.int(),
    }


@pytest.mark.usefixtures("branch")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_rows_and_gradients_are_those_of_the_rebuilt_table(shape: TTShape) -> None:
    packed = torch.randn(shape.numel, dtype=torch.float64, requires_grad=True)
    for kind, ids in ids_of(shape).items():
        rows, expected = ttm_lookup(packed, ids, shape.encode()), to_dense(packed, shape)[ids.long()]
        assert rows.shape == (*ids.shape, shape.cols) and rows.is_contiguous()
        torch.testing.assert_close(rows, expected, rtol=1e-12, atol=1e-12, msg=kind)
        grad = torch.randn_like(rows)
        ours, right = (torch.autograd.grad(r, packed, grad)[0] for r in (rows, expected))
        assert (ours - right).norm() <= 1e-10 * right.norm(), kind


@pytest.mark.usefixtures("branch")
def test_the_padding_row_is_zero_and_learns_nothing() -> None:
    for name in ("order 3, padded, zero row", "order 4, zero row in the middle", "rank 1"):
        shape = SHAPES[name]
        packed = torch.randn(shape.numel, requires_grad=True)
        rows = ttm_lookup(packed, torch.full((4,), shape.zero_row), shape.encode())
        assert rows.abs().max() == 0
        (gradient,) = torch.autograd.grad(rows.sum(), packed)
        assert gradient.abs().max() == 0


@pytest.mark.parametrize("size", [(0,), (2, 0), (0, 3)])
def test_no_ids(size: tuple[int, ...]) -> None:
    for shape in SHAPES.values():
        packed = torch.randn(shape.numel, requires_grad=True)
        rows = ttm_lookup(packed, torch.empty(size, dtype=torch.int64), shape.encode())
        assert rows.shape == (*size, shape.cols)
        (gradient,) = torch.autograd.grad(rows.sum(), packed)
        assert gradient.shape == packed.shape and gradient.abs().max() == 0


@pytest.mark.parametrize(("ids", "named"), [([0, 17], 17), ([-1, 3], -1), ([5, 10**9], 10**9), ([-1, 17], -1)])
def test_ids_out_of_range_are_refused_by_their_number(ids: list[int], named: int) -> None:
    # 17 lies within the padded 18 rows: it would read a row that does not exist.
    shape = SHAPES["order 3, padded, zero row"]
    with pytest.raises(IndexError, match=rf"0 to 16, got {named}$"):
        ttm_lookup(torch.randn(shape.numel), torch.tensor(ids), shape.encode())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, assert_near: Near) -> None:
    shape = SHAPES["order 4"]
    packed = torch.randn(shape.numel).to(dtype).requires_grad_()
    twin = packed.detach().double().requires_grad_()
    ids = torch.randint(36, (40,))
    rows, expected = ttm_lookup(packed, ids, shape.encode()), to_dense(twin, shape)[ids]
    assert_near(rows.detach(), expected.detach())
    grad = torch.randn_like(rows)
    ours, right = torch.autograd.grad(rows, packed, grad)[0], torch.autograd.grad(expected, twin, grad.double())[0]
    assert_near(ours, right, 2)


@pytest.mark.usefixtures("branch")
def test_gradcheck() -> None:
    # Finite differences: the gradient is written by hand.
    for name in ("order 2", "order 4, zero row in the middle"):
        shape = SHAPES[name]
        packed = torch.randn(shape.numel, dtype=torch.float64, requires_grad=True)
        ids = torch.tensor([[3, 1, 3], [12 % shape.rows, 0, 5]])
        assert torch.autograd.gradcheck(lambda p, i=ids, s=shape: ttm_lookup(p, i, s.encode()), packed)


@pytest.mark.parametrize("name", ["order 1", "order 3, padded, zero row", "order 4"])
def test_ops_keep_the_rules_of_custom_ops(name: str) -> None:
    # Schema, fake tensors against real ones, autograd registration, AOT dispatch with symbolic sizes.
    shape = SHAPES[name]
    packed = torch.randn(shape.numel, requires_grad=True)
    for ids in (torch.tensor([[1, 1, 3], [0, 2, 4]]), torch.tensor(2), torch.empty(0, dtype=torch.int64)):
        torch.library.opcheck(ttm_lookup, (packed, ids, shape.encode()))
        grad = torch.randn(*ids.shape, shape.cols)
        torch.library.opcheck(ttm_lookup_backward, (packed.detach(), ids, grad, shape.encode()))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Callable[[TTShape, Tensor], list[int]]:
    """Number of matrices of every batched product of a lookup and its backward."""
    seen: list[int] = []
    bmm = torch.bmm

    def counted(a: Tensor, b: Tensor) -> Tensor:
        seen.append(a.shape[0])
        return bmm(a, b)

    def run(shape: TTShape, ids: Tensor) -> list[int]:
        seen.clear()
        packed = torch.randn(shape.numel, requires_grad=True)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "bmm", counted)
            ttm_lookup(packed, ids, shape.encode()).sum().backward()
        return list(seen)

    return run


def test_duplicates_are_computed_once(batches: Callable[[TTShape, Tensor], list[int]]) -> None:
    shape = choose_shape(4096, 64, format="ttm", rank=8, order=4)
    ids = torch.tensor([7, 4000, 7, 7, 123, 4000])
    once = batches(shape, ids.unique())
    assert batches(shape, ids) == batches(shape, ids.repeat(500)) == once
    # Three ids: one joining product of three forward and two backward; inside the halves never more than three.
    assert max(once) == 3 and once.count(3) >= 3


def test_ids_that_share_half_their_digits_share_that_half(batches: Callable[[TTShape, Tensor], list[int]]) -> None:
    shape = choose_shape(4096, 64, format="ttm", rank=8, order=4)
    below = math.prod(shape.row_modes[LookupPlan(shape).split :])
    one_left_half = 3 * below + torch.arange(6)
    assert 1 in batches(shape, one_left_half) and max(batches(shape, one_left_half)) == 6
    one_right_half = 3 + below * torch.arange(6)
    assert 1 in batches(shape, one_right_half)


def test_many_ids_of_a_small_half_come_from_its_table() -> None:
    plan = LookupPlan(choose_shape(4096, 64, format="ttm", rank=8, order=4))
    sizes = [plan.shape.row_modes[: plan.split], plan.shape.row_modes[plan.split :]]
    for half, modes in enumerate(sizes):
        assert plan.uses_table(math.prod(modes), half) and not plan.uses_table(1, half)
    # A half of one core is its own table: nothing to merge, so only its slices are taken.
    assert not LookupPlan(SHAPES["order 2"]).uses_table(3, 0)


def test_the_cut_balances_the_halves() -> None:
    for shape in SHAPES.values():
        plan = LookupPlan(shape)
        order = len(shape.row_modes)
        assert plan.split == 1 or 1 <= plan.split < order
        largest = [max(plan.table_sizes(k)) for k in range(1, order)]
        assert order == 1 or max(plan.table_sizes(plan.split)) == min(largest)
    # CoMERA's vocabulary table: two cores a half, 16*20 and 10*10 rows by 4*4 and 8*6 columns at rank 32.
    plan = LookupPlan(TTShape("ttm", 30522, 768, (16, 20, 10, 10), (4, 4, 8, 6), (1, 32, 32, 32, 1)))
    assert plan.split == 2 and plan.table_sizes(2) == (320 * 16 * 32, 100 * 48 * 32)
    assert plan.flops(10) == 2 * 10 * 768 * 32


def test_plans_survive_their_text() -> None:
    plans = [LookupPlan(shape) for shape in SHAPES.values()]
    assert [LookupPlan.decode(p.encode()) for p in plans] == plans
    assert len({p.encode() for p in plans}) == len(plans)
    assert all(a.shape != b.shape for a, b in itertools.combinations(plans, 2))

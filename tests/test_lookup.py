"""Looking up rows of a tensor-train-matrix table against indexing the rebuilt table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comera_compile.codegen import lookup_groups
from comera_compile.codegen.cpu import lookup_kernels
from comera_compile.codegen.lookup import ttm_lookup
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
# How the pairs of a join are grouped: by the numbers, always by prefix, always by digit; in groups of one width or of
# many.
BRANCHES = {
    "as planned": (None, lookup_groups.EVEN),
    "by prefix": (False, lookup_groups.EVEN),
    "by digit": (True, lookup_groups.EVEN),
    "by prefix, many widths": (False, 0),
    "by digit, many widths": (True, 0),
    "by digit, one width": (True, 1e9),
    "by prefix, one width": (False, 1e9),
}


@pytest.fixture(params=list(BRANCHES.values()), ids=list(BRANCHES))
def branch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    by_digit, even = request.param
    monkeypatch.setattr(lookup_kernels, "applies", lambda *_: False)  # torch's own operators
    monkeypatch.setattr(lookup_groups, "EVEN", even)
    if by_digit is not None:
        monkeypatch.setattr(LookupPlan, "groups_by_digit", lambda *_, **__: by_digit)


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
    # Schema, fake tensors against real ones, AOT dispatch with symbolic sizes.
    shape = SHAPES[name]
    packed = torch.randn(shape.numel)
    for ids in (torch.tensor([[1, 1, 3], [0, 2, 4]]), torch.tensor(2), torch.empty(0, dtype=torch.int64)):
        torch.library.opcheck(torch.ops.comera.ttm_lookup.default, (packed, ids, shape.encode()))
        grad = torch.randn(*ids.shape, shape.cols)
        torch.library.opcheck(torch.ops.comera.ttm_lookup_backward.default, (packed, ids, grad, shape.encode()))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Callable[[TTShape, Tensor], list[tuple[int, ...]]]:
    """Batch, rows, terms and columns of every batched product of a lookup and its backward."""
    seen: list[tuple[int, ...]] = []
    bmm = torch.bmm

    def noted(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        seen.append((*a.shape, b.shape[2]))
        return bmm(a, b) if out is None else bmm(a, b, out=out)

    def run(shape: TTShape, ids: Tensor) -> list[tuple[int, ...]]:
        seen.clear()
        packed = torch.randn(shape.numel, requires_grad=True)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "bmm", noted)
            patch.setattr(lookup_kernels, "applies", lambda *_: False)  # torch's own operators
            ttm_lookup(packed, ids, shape.encode()).sum().backward()
        return list(seen)

    return run


Products = Callable[[TTShape, Tensor], list[tuple[int, ...]]]


def work(products: list[tuple[int, ...]]) -> int:
    return sum(math.prod(size) for size in products)


def test_duplicates_are_computed_once(products: Products) -> None:
    shape = choose_shape(4096, 64, format="ttm", rank=8, order=4)
    ids = torch.tensor([7, 4000, 7, 7, 123, 4000])
    assert products(shape, ids) == products(shape, ids.repeat(500)) == products(shape, ids.unique())


@pytest.mark.parametrize("by_digit", [True, False])
def test_ids_that_share_their_first_digits_share_their_work(
    by_digit: bool, products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LookupPlan, "groups_by_digit", lambda *_, **__: by_digit)
    shape = choose_shape(4096, 64, format="ttm", rank=8, order=4)
    last = shape.row_modes[-1]
    (r2, _, e2, r3), (_, _, e3, r4), (_, _, e4, _) = shape.core_shapes[1:]
    e1 = shape.col_modes[0]
    first_two, three, all_four = e1 * r2 * e2 * r3, e1 * e2 * r3 * e3 * r4, e1 * e2 * e3 * r4 * e4
    # One prefix of three digits, `last` ids: the first joins once, the last one `last` times; forward, the same again
    # for the backward but the last, and two gradients of each.
    ids = 5 * last + torch.arange(last)
    assert work(products(shape, ids)) == 4 * (first_two + three) + 3 * last * all_four


def test_pairs_of_one_digit_or_prefix_are_one_product(products: Products) -> None:
    # 64 x 64 pairs, all there: as many products as there are digits, not as there are ids.
    shape = TTShape("ttm", 64 * 64, 16, (64, 64), (4, 4), (1, 8, 1))
    assert {size[0] for size in products(shape, torch.arange(64 * 64))} == {64}


def test_groups_are_padded_little() -> None:
    # Whatever the sizes of the groups: every member has a slot of its own in a group of its key, and at most half as
    # many slots again as there are members are nobody's (widths 1, 2, 3, 4, 6, 8, 12, ...).
    for counts in ([1] * 9, [5, 0, 7, 6], [1, 1, 1, 100], [1, 2, 3, 4, 5, 9, 17, 33], [3]):
        keys = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        keys = keys[torch.randperm(keys.numel())]
        groups = lookup_groups.group(keys, len(counts))
        assert torch.equal(groups.member[groups.slot], torch.arange(keys.numel()))
        assert groups.member.numel() <= 1.5 * keys.numel()
        key_of_slot = torch.cat(
            [groups.keys[b.groups].repeat_interleave(b.width) for b in groups.buckets]
        )  # groups follow each other, each as wide as its bucket says
        assert torch.equal(key_of_slot[groups.slot], keys)
        assert sorted(groups.keys.tolist()) == [k for k, count in enumerate(counts) if count]


def test_products_in_either_orientation_are_the_product() -> None:
    # a few columns, no multiple of 16, and deep ones take other ways
    for rows, terms, columns in ((96, 30, 8), (96, 100, 30), (5, 7, 64), (64, 3, 32), (13, 2, 13)):
        a, b = torch.randn(3, rows, terms).double(), torch.randn(3, terms, columns).double()
        out = torch.empty(3, rows, columns).double()
        lookup_groups.product_into(out, a, b)
        torch.testing.assert_close(lookup_groups.product(a, b), a @ b)
        torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_of_equal_position_are_added(dtype: torch.dtype, assert_near: Near) -> None:
    rows, position = torch.randn(50, 3).to(dtype), torch.randint(1, 6, (50,))
    expected = torch.zeros(7, 3, dtype=torch.float64).index_add_(0, position, rows.double())
    total = lookup_groups.sum_rows(rows, position, 7)
    assert_near(total, expected)
    assert total[0].abs().max() == total[6].abs().max() == 0  # nobody's position


def test_the_grouping_follows_what_is_moved() -> None:
    # A language model's table: values of the first prefixes are small, slices of the middle core large; behind it the
    # other way round. A recommender's slices of few columns: many tiny products would cost more than what they save.
    words = LookupPlan(TTShape("ttm", 30522, 768, (30, 32, 32), (12, 8, 8), (1, 30, 30, 1)))
    assert words.groups_by_digit(1, pairs=522, prefixes=30) and not words.groups_by_digit(2, pairs=1588, prefixes=522)
    items = LookupPlan(TTShape("ttm", 10**6, 32, (100, 100, 100), (4, 2, 4), (1, 32, 32, 1)))
    assert items.groups_by_digit(1, pairs=950, prefixes=100) and items.groups_by_digit(2, pairs=2124, prefixes=950)


def test_plans_survive_their_text() -> None:
    plans = [LookupPlan(shape) for shape in SHAPES.values()]
    assert [LookupPlan.decode(p.encode()) for p in plans] == plans
    assert len({p.encode() for p in plans}) == len(plans)
    assert all(a.shape != b.shape for a, b in itertools.combinations(plans, 2))

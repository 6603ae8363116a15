"""The C++ lookup against the rebuilt table in float64, and the conditions under which it runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from comera_compile.codegen.cpu import lookup_kernels
from comera_compile.codegen.lookup import ttm_lookup, ttm_lookup_backward
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.packing import to_dense
from comera_compile.tt.shape import TTShape

SHAPES = {
    "order 1": TTShape("ttm", 5, 4, (5,), (4,), (1, 1), 1.5),
    "order 2, whole vectors": TTShape("ttm", 35, 48, (5, 7), (3, 16), (1, 8, 1), 0.9),
    "order 2, odd, zero row": TTShape("ttm", 29, 17, (5, 6), (3, 7), (1, 5, 1), 1.2, 11),
    "order 3, a word table": TTShape("ttm", 300, 96, (5, 8, 8), (3, 4, 8), (1, 30, 30, 1), 0.4),
    "order 3, an item table": TTShape("ttm", 990, 32, (10, 10, 10), (4, 2, 4), (1, 32, 32, 1), 0.4, 0),
    "order 3, rank 1, padded": TTShape("ttm", 100, 50, (4, 5, 6), (3, 5, 4), (1, 1, 1, 1), 1.1),
    "order 3, uneven ranks": TTShape("ttm", 60, 30, (3, 4, 5), (2, 3, 5), (1, 5, 12, 1), 0.7, 59),
    "order 3, three vectors last": TTShape("ttm", 190, 96, (8, 6, 4), (2, 2, 24), (1, 16, 30, 1), 0.4, 7),
    "order 3, wide last": TTShape("ttm", 60, 156, (3, 4, 5), (2, 3, 26), (1, 12, 16, 1), 0.7),
    "order 4": TTShape("ttm", 250, 100, (3, 4, 5, 5), (3, 2, 4, 5), (1, 8, 16, 12, 1), 0.5, 100),
    "order 5": choose_shape(300, 72, format="ttm", rank=5, order=5),
}
DTYPES = {torch.float32: 2e-6, torch.float64: 1e-14}  # greatest error allowed, relative to the largest entry

pytestmark = pytest.mark.skipif(
    not lookup_kernels.applies(torch.empty(1), torch.empty(1, dtype=torch.int64), SHAPES["order 4"]),
    reason="no C++ compiler",
)


def ids_of(rows: int) -> dict[str, Tensor]:
    """Ids of every kind, by what is special about them."""
    skewed = (torch.rand(500).pow(3) * rows).long()
    return {
        "one": torch.tensor(rows - 1),
        "two": torch.tensor([rows - 1, 0]),
        "skewed, with duplicates": skewed,
        "sorted": skewed.sort().values,
        "int32": skewed[:60].int().view(3, 20),
        "every row, shuffled": torch.randperm(rows),
        "all equal": torch.full((70,), rows // 2),
        "not contiguous": torch.randint(rows, (10, 6)).t(),
    }


@pytest.fixture(params=[1, 2, 3, 8])
def team(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def error(got: Tensor, right: Tensor) -> float:
    return float((got.detach().double() - right).abs().max() / right.abs().max().clamp(min=1e-300))


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_and_gradients_are_those_of_the_rebuilt_table(shape: TTShape, dtype: torch.dtype) -> None:
    packed = torch.randn(shape.numel, dtype=dtype)
    twin = packed.double().requires_grad_()
    for kind, ids in ids_of(shape.rows).items():
        rows, right = ttm_lookup(packed, ids, shape.encode()), to_dense(twin, shape)[ids.long()]
        assert rows.shape == (*ids.shape, shape.cols) and rows.is_contiguous()
        assert error(rows, right.detach()) <= DTYPES[dtype], kind
        grad = torch.randn_like(rows)
        (right_grad,) = torch.autograd.grad(right, twin, grad.double())
        assert error(ttm_lookup_backward(packed, ids, grad, shape.encode()), right_grad) <= DTYPES[dtype], kind


@pytest.fixture
def always_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads even where there is little work, so that small shapes are cut at any prefix."""
    monkeypatch.setattr(lookup_kernels, "LEAST_WORK", 1)


@pytest.mark.usefixtures("team", "always_parallel")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_cuts_between_threads_change_nothing(shape: TTShape) -> None:
    # Threads begin in the middle of a digit, or have nothing to do at all.
    packed = torch.randn(shape.numel)
    twin = packed.double().requires_grad_()
    for kind, ids in ids_of(shape.rows).items():
        rows, right = ttm_lookup(packed, ids, shape.encode()), to_dense(twin, shape)[ids.long()]
        assert error(rows, right.detach()) <= 2e-6, kind
        grad = torch.randn_like(rows)
        (right_grad,) = torch.autograd.grad(right, twin, grad.double())
        assert error(ttm_lookup_backward(packed, ids, grad, shape.encode()), right_grad) <= 2e-6, kind


@pytest.mark.usefixtures("team", "always_parallel")
def test_the_same_bits_twice() -> None:
    for name in ("order 2, odd, zero row", "order 3, a word table", "order 4"):
        shape = SHAPES[name]
        packed, ids = torch.randn(shape.numel), torch.randint(shape.rows, (900,))
        grad = torch.randn(900, shape.cols)
        first, *others = (
            (ttm_lookup(packed, ids, shape.encode()), ttm_lookup_backward(packed, ids, grad, shape.encode()))
            for _ in range(4)
        )
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.usefixtures("team", "always_parallel")
@pytest.mark.parametrize("shape", list(SHAPES.values())[1:], ids=list(SHAPES)[1:])
def test_nothing_is_written_outside_the_outputs(shape: TTShape) -> None:
    # Outputs inside larger buffers of a value that no result has; every element inside is written.
    band, mark = 64, -12345.0
    for ids in ids_of(shape.rows).values():
        packed = torch.full((shape.numel + 2 * band,), float("nan"))  # nothing outside is read either
        packed[band:-band] = torch.randn(shape.numel)
        held = packed[band:-band]
        for name, size in (("ttm_lookup", ids.numel() * shape.cols), ("ttm_lookup_backward", shape.numel)):
            buffer = torch.full((size + 2 * band,), mark)
            grad = [] if name == "ttm_lookup" else [torch.randn(ids.numel(), shape.cols)]
            assert lookup_kernels._call(name, held, ids, shape, *grad, buffer[band:-band])
            outside, inside = torch.cat([buffer[:band], buffer[-band:]]), buffer[band:-band]
            assert (outside == mark).all() and (inside != mark).all() and inside.isfinite().all()


def test_ids_out_of_range_are_refused_before_anything_is_written() -> None:
    shape = SHAPES["order 3, uneven ranks"]
    packed, rows = torch.randn(shape.numel), torch.full((3, shape.cols), 7.0)
    for ids, named in (([0, 60, 1], 60), ([5, 1, -1], -1), ([2**40, 0, -(2**40)], -(2**40))):
        with pytest.raises(IndexError, match=rf"expected 0 to 59, got {named}$"):
            lookup_kernels._call("ttm_lookup", packed, torch.tensor(ids), shape, rows)
        assert (rows == 7).all()


def test_a_backward_is_that_of_the_ids_it_is_given() -> None:
    # What a lookup found out about its ids is kept for its backward: not taken for other ids, lengths, types or tables.
    shape, other = SHAPES["order 3, an item table"], TTShape("ttm", 990, 32, (11, 9, 10), (4, 2, 4), (1, 32, 32, 1))
    packed, ids = torch.randn(shape.numel), torch.arange(100, 160)
    twin = torch.randn(other.numel)
    for change in (lambda i: i, lambda i: i.add_(1), lambda i: i.int(), lambda i: i[:-1]):
        for table, cores in ((shape, packed), (other, twin)):
            ttm_lookup(packed, ids, shape.encode())
            asked = change(ids)
            grad = torch.randn(asked.numel(), 32)
            dense = cores.double().requires_grad_()
            (right,) = torch.autograd.grad(to_dense(dense, table)[asked.long()], dense, grad.double())
            assert error(ttm_lookup_backward(cores, asked, grad, table.encode()), right) <= 2e-6


def test_backwards_of_many_tables_in_any_order() -> None:
    # More lookups than are kept, each backward twice: with what was kept, and without.
    shape = SHAPES["order 3, uneven ranks"]
    packed, batches = torch.randn(shape.numel), [torch.randint(60, (50,)) for _ in range(12)]
    grads = [torch.randn(50, 30) for _ in batches]
    alone = [ttm_lookup_backward(packed, i, g, shape.encode()) for i, g in zip(batches, grads, strict=True)]
    for ids in batches:
        ttm_lookup(packed, ids, shape.encode())
    for _ in range(2):
        for k in torch.randperm(12).tolist():
            assert torch.equal(ttm_lookup_backward(packed, batches[k], grads[k], shape.encode()), alone[k])


def test_strange_layouts_of_the_tensors_are_taken() -> None:
    shape = SHAPES["order 3, a word table"]
    packed = torch.randn(shape.numel, 2)[:, 0]
    ids = torch.randint(300, (40,))
    for grad in (torch.ones(()).expand(40, 96), torch.randn(96, 40).t()):
        ours = ttm_lookup_backward(packed, ids, grad, shape.encode())
        assert torch.equal(ours, ttm_lookup_backward(packed.clone(), ids, grad.contiguous(), shape.encode()))
    assert torch.equal(ttm_lookup(packed, ids, shape.encode()), ttm_lookup(packed.clone(), ids, shape.encode()))


def test_not_a_number_stays_in_its_rows() -> None:
    # Padding of ranks and vectors is zero: what one slice holds never reaches rows of other digits.
    shape = SHAPES["order 3, uneven ranks"]
    packed = torch.randn(shape.numel)
    packed[: shape.core_sizes[0]].view(shape.core_shapes[0])[0, 1] = float("nan")
    rows = ttm_lookup(packed, torch.arange(shape.rows), shape.encode())
    bad = rows.isnan().any(1)
    assert torch.equal(bad, (torch.arange(60) // 20 == 1) & (torch.arange(60) != shape.zero_row))


@pytest.mark.parametrize("name", ["order 2, odd, zero row", "order 3, an item table", "order 4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_keep_the_rules_of_custom_ops(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    packed = torch.randn(shape.numel, dtype=dtype)
    for ids in (torch.tensor([[1, 1, 3], [0, 2, 4]]), torch.tensor(2), torch.tensor([3, 3], dtype=torch.int32)):
        torch.library.opcheck(torch.ops.comera.ttm_lookup.default, (packed, ids, shape.encode()))
        grad = torch.randn(*ids.shape, shape.cols, dtype=dtype)
        torch.library.opcheck(torch.ops.comera.ttm_lookup_backward.default, (packed, ids, grad, shape.encode()))


def test_gradcheck() -> None:
    shape = SHAPES["order 4"]
    packed = torch.randn(shape.numel, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([3, 100, 3, 249])
    assert torch.autograd.gradcheck(lambda p: ttm_lookup(p, ids, shape.encode()), packed, fast_mode=True)


def test_where_there_is_a_kernel() -> None:
    shape, ids, packed = SHAPES["order 4"], torch.tensor([1]), torch.empty(1)
    assert lookup_kernels.applies(packed, ids, shape) and lookup_kernels.applies(packed.double(), ids.int(), shape)
    assert not lookup_kernels.applies(packed.half(), ids, shape)
    assert not lookup_kernels.applies(packed, ids.short(), shape)
    assert not lookup_kernels.applies(packed, ids, SHAPES["order 1"])
    assert not lookup_kernels.applies(packed.to("meta"), ids, shape)


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["order 3, a word table"]
    packed, ids, grad = torch.randn(shape.numel), torch.randint(300, (50,)), torch.randn(50, 96)
    ours = ttm_lookup(packed, ids, shape.encode()), ttm_lookup_backward(packed, ids, grad, shape.encode())
    lookup_kernels._library_for.cache_clear()
    monkeypatch.setattr(lookup_kernels, "_library", lambda *_: None)
    try:
        assert not lookup_kernels.applies(packed, ids, shape)
        theirs = ttm_lookup(packed, ids, shape.encode()), ttm_lookup_backward(packed, ids, grad, shape.encode())
    finally:
        lookup_kernels._library_for.cache_clear()
    assert all(error(a, b.double()) <= 2e-6 for a, b in zip(ours, theirs, strict=True))


def test_too_much_memory_for_the_sums_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each thread sums the gradients of all values of prefixes: not when that is more than the limit.
    shape = SHAPES["order 4"]
    packed, ids, grad = torch.randn(shape.numel), torch.arange(250), torch.randn(250, 100)
    right = ttm_lookup_backward(packed, ids, grad, shape.encode())
    monkeypatch.setattr(lookup_kernels, "MOST_SUMS", 10)
    assert lookup_kernels.gradient(packed, ids, grad, shape) is None
    assert error(ttm_lookup_backward(packed, ids, grad, shape.encode()), right.double()) <= 2e-6


def test_random_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_kernels, "LEAST_WORK", 1)
    draw = torch.Generator().manual_seed(0)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    for _, order in itertools.product(range(12), (2, 3, 4)):
        rows, columns = ([pick(1, 6) for _ in range(order)] for _ in range(2))
        columns[-1] = pick(1, 20)
        ranks = [1, *(pick(1, 34) for _ in range(order - 1)), 1]
        count, width = pick(1, math.prod(rows)), pick(1, math.prod(columns))
        shape = TTShape("ttm", count, width, tuple(rows), tuple(columns), tuple(ranks), 0.5, pick(-1, count - 1))
        packed, ids = torch.randn(shape.numel), torch.randint(count, (pick(1, 400),))
        twin = packed.double().requires_grad_()
        made, right = lookup_kernels.lookup(packed, ids, shape), to_dense(twin, shape)[ids]
        grad = torch.randn(right.shape)
        (right_grad,) = torch.autograd.grad(right, twin, grad.double())
        ours = lookup_kernels.gradient(packed, ids, grad, shape)
        assert made is not None and error(made, right.detach()) <= 2e-6, shape
        assert ours is not None and error(ours, right_grad) <= 2e-6, shape

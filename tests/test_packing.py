"""The dense matrix against nested loops, packing both ways, gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from comera_compile.errors import ShapeError
from comera_compile.tt.packing import cores_of, halves, pack, to_dense, unpack
from comera_compile.tt.shape import TTShape

SHAPES = {
    "tt, order 1": TTShape("tt", 4, 6, (4,), (6,), (1, 3, 1), 0.5),
    "tt, order 2": TTShape("tt", 6, 10, (3, 2), (2, 5), (1, 2, 3, 4, 1), 1.5),
    "tt, order 3, padded, zero row": TTShape("tt", 11, 13, (3, 2, 2), (2, 2, 4), (1, 3, 4, 5, 3, 2, 1), 0.7, 3),
    "tt, uneven orders": TTShape("tt", 8, 6, (2, 2, 2), (6,), (1, 2, 3, 4, 1), 1.0),
    "ttm, order 1": TTShape("ttm", 5, 4, (5,), (4,), (1, 1), 2.0, 0),
    "ttm, order 2": TTShape("ttm", 6, 8, (3, 2), (2, 4), (1, 5, 1), 0.9),
    "ttm, order 3, padded, zero row": TTShape("ttm", 17, 11, (3, 2, 3), (2, 3, 2), (1, 3, 4, 1), 1.1, 16),
    "ttm, order 4": TTShape("ttm", 16, 24, (2, 2, 2, 2), (2, 3, 2, 2), (1, 2, 3, 2, 1), 1.0),
}


def digits(index: int, modes: tuple[int, ...]) -> list[int]:
    """Row-major digits, most significant first."""
    return [index // math.prod(modes[k + 1 :]) % mode for k, mode in enumerate(modes)]


def entry(cores: list[list], shape: TTShape, i: int, j: int) -> float:  # type: ignore[type-arg]
    """One dense entry as a sum over all values of all inner ranks: shares nothing with the code under test."""
    rows, cols = digits(i, shape.row_modes), digits(j, shape.col_modes)
    total = 0.0
    for inner in itertools.product(*(range(r) for r in shape.ranks[1:-1])):
        path = (0, *inner, 0)
        term = 1.0
        for k, core in enumerate(cores):
            left, right = path[k], path[k + 1]
            if shape.format == "tt":
                term *= core[left][(rows + cols)[k]][right]
            else:
                term *= core[left][rows[k]][cols[k]][right]
        total += term
    return total


def by_loops(packed: Tensor, shape: TTShape) -> Tensor:
    cores, start = [], 0
    for size in shape.core_shapes:
        cores.append((shape.scale * packed[start : start + math.prod(size)]).reshape(size).tolist())
        start += math.prod(size)
    dense = [[entry(cores, shape, i, j) for j in range(shape.cols)] for i in range(shape.rows)]
    if shape.zero_row >= 0:
        dense[shape.zero_row] = [0.0] * shape.cols
    return torch.tensor(dense, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dense_is_what_loops_give(shape: TTShape, assert_near: Callable[..., None]) -> None:
    packed = torch.randn(shape.numel, dtype=torch.float64)
    expected = by_loops(packed, shape)
    assert_near(to_dense(packed, shape), expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        dense = to_dense(packed.to(dtype), shape)
        assert dense.dtype == dtype
        assert_near(dense, by_loops(packed.to(dtype).double(), shape))


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=[pytest.mark.slow] * (n == "ttm, order 4"), id=n) for n, s in SHAPES.items()]
)
def test_gradients_are_right(shape: TTShape) -> None:
    # Finite differences of the whole map, zero row, padding and scale included.
    packed = torch.randn(shape.numel, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: to_dense(p, shape), (packed,))


@pytest.mark.parametrize("shape", [s for s in SHAPES.values() if s.zero_row >= 0], ids=lambda shape: shape.format)
def test_zero_row_is_zero_even_when_cores_are_not_finite(shape: TTShape) -> None:
    packed = torch.randn(shape.numel)
    assert to_dense(packed, shape)[shape.zero_row].abs().max() == 0
    first = unpack(packed, shape)[0]
    first[:] = math.inf  # a row core: a mask by multiplication would give NaN
    assert to_dense(packed, shape)[shape.zero_row].abs().max() == 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_pack_inverts_cores_of(shape: TTShape, assert_near: Callable[..., None]) -> None:
    packed = torch.randn(shape.numel, dtype=torch.float64)
    assert_near(pack(cores_of(packed, shape), shape), packed)


def test_unpacked_cores_are_views_in_order() -> None:
    shape = SHAPES["tt, order 2"]
    packed = torch.arange(shape.numel, dtype=torch.float32)
    stored = unpack(packed, shape)
    assert [tuple(core.shape) for core in stored] == [(1, 3, 2), (2, 2, 3), (3, 2, 4), (4, 5, 1)]
    stored[1][0, 0, 0] = -1.0
    assert packed[6] == -1.0  # the first core holds entries 0 to 5
    # Scaled cores are 1.5 times the stored ones, the first entry of the third core being number 6 + 12.
    assert cores_of(packed, shape)[2][0, 0, 0] == 1.5 * 18


def test_halves_give_the_matrix_at_the_bond(assert_near: Callable[..., None]) -> None:
    shape = SHAPES["tt, order 3, padded, zero row"]
    packed = torch.randn(shape.numel, dtype=torch.float64)
    left, right = halves(cores_of(packed, shape), shape)
    assert left.shape == (11, 5) and right.shape == (5, 13)
    expected = by_loops(packed, shape)
    actual = left @ right
    actual[shape.zero_row] = 0
    assert_near(actual, expected)


def test_scale_multiplies_every_core(assert_near: Callable[..., None]) -> None:
    shape = SHAPES["tt, order 2"]
    packed = torch.randn(shape.numel, dtype=torch.float64)
    # Four cores: doubling the scale multiplies the matrix by 2 ** 4.
    assert_near(to_dense(packed, shape.with_scale(3.0)), 16 * to_dense(packed, shape))


def test_functional_transforms_and_fake_tensors(assert_near: Callable[..., None]) -> None:
    shape = SHAPES["ttm, order 3, padded, zero row"]
    packed = torch.randn(2, shape.numel, dtype=torch.float64)
    together = torch.vmap(lambda p: to_dense(p, shape))(packed)
    assert_near(together[1], to_dense(packed[1], shape))
    # The sum of the matrix is multilinear: its gradient along the cores is (number of cores) times its value.
    gradient = torch.func.grad(lambda p: to_dense(p, shape).sum())(packed[0])
    assert_near((gradient * packed[0]).sum(), 3 * to_dense(packed[0], shape).sum())
    with FakeTensorMode():
        assert to_dense(torch.empty(shape.numel), shape).shape == (17, 11)


def test_sizes_that_do_not_fit_are_refused() -> None:
    shape = SHAPES["tt, order 2"]
    with pytest.raises(ShapeError, match=r"\(62,\), got \(61,\)"):
        unpack(torch.zeros(61), shape)
    with pytest.raises(ShapeError, match="got"):
        unpack(torch.zeros(62, 1), shape)
    cores = cores_of(torch.zeros(62), shape)
    with pytest.raises(ShapeError, match="cores of sizes"):
        pack([*cores[:3], cores[3].transpose(0, 2)], shape)
    with pytest.raises(ShapeError, match="cores of sizes"):
        pack(cores[:3], shape)

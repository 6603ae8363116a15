"""Cores of the same weight in another gauge: brought back, without changing the weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comera_compile.tt.align import align
from comera_compile.tt.encode import encode
from comera_compile.tt.packing import cores_of, pack, to_dense
from comera_compile.tt.shape import TTShape

Near = Callable[..., None]
SHAPES = {
    "tt": TTShape("tt", 32, 48, (4, 8), (6, 8), (1, 4, 9, 5, 1), 0.7),
    "tt, order 1": TTShape("tt", 32, 48, (32,), (48,), (1, 6, 1), 1.3),
    "ttm, padded": TTShape("ttm", 30, 47, (4, 8), (6, 8), (1, 7, 1), 1.0),
    "one core": TTShape("ttm", 5, 4, (5,), (4,), (1, 1), 2.0),
}


def random_packed(shape: TTShape) -> Tensor:
    return torch.randn(shape.numel, dtype=torch.float64)


def another_gauge(packed: Tensor, shape: TTShape) -> Tensor:
    """The same weight with a random well-conditioned matrix and its inverse put in at every bond."""
    cores = cores_of(packed, shape)
    for k in range(len(cores) - 1):
        rank = cores[k].shape[-1]
        matrix = torch.linalg.qr(torch.randn(rank, rank, dtype=torch.float64)).Q * torch.rand(rank).add(0.5).double()
        cores[k] = cores[k] @ matrix
        flat = cores[k + 1].reshape(rank, -1)
        cores[k + 1] = torch.linalg.solve(matrix, flat).reshape(cores[k + 1].shape)
    return pack(cores, shape)


@pytest.mark.parametrize("name", list(SHAPES))
def test_another_gauge_is_undone(name: str, assert_near: Near) -> None:
    # Cores of one weight in any gauge come back as the reference's own.
    shape = SHAPES[name]
    reference = random_packed(shape)
    other = another_gauge(reference, shape)
    assert_near(to_dense(other, shape), to_dense(reference, shape), 10)
    aligned = align(other, reference, shape)
    assert aligned is not None
    assert_near(aligned, reference, 1e6)  # the ridge of 1e-8 shows


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_weight_is_not_changed(name: str, assert_near: Near) -> None:
    # Whatever the reference, what is put in at a bond is taken out again.
    shape = SHAPES[name]
    packed, reference = random_packed(shape), random_packed(shape)
    aligned = align(packed, reference, shape)
    if aligned is not None:
        assert_near(to_dense(aligned, shape), to_dense(packed, shape), 1e5)


def test_the_mean_of_aligned_cores_is_the_mean_of_the_weights() -> None:
    # The purpose: two decompositions of nearly equal weights, averaged core by core.
    shape = SHAPES["ttm, padded"]
    first = random_packed(shape)
    second = another_gauge(first + 0.01 * random_packed(shape), shape)
    aligned = align(second, first, shape)
    assert aligned is not None
    a, b = to_dense(first, shape), to_dense(second, shape)
    error = (to_dense((first + aligned) / 2, shape) - (a + b) / 2).norm() / (a - b).norm()
    naive = (to_dense((first + second) / 2, shape) - (a + b) / 2).norm() / (a - b).norm()
    assert error < 0.02 < 1 < naive


def test_a_weight_of_lower_rank_than_its_cores(assert_near: Near) -> None:
    # Directions that carry nothing have no gauge; they must not blow up.
    shape = SHAPES["tt"]
    low = torch.randn(32, 2, dtype=torch.float64) @ torch.randn(2, 48, dtype=torch.float64)
    one, two = (encode(w, shape, init="svd", max_error=1.0) for w in (low, low * 1.001))
    assert one.packed is not None and two.packed is not None
    packed = two.packed * (two.shape.scale / one.shape.scale)
    aligned = align(packed, one.packed, one.shape)
    assert aligned is not None and aligned.abs().max() < 10 * packed.abs().max()
    assert_near(to_dense(aligned, one.shape), to_dense(packed, one.shape), 1e4)


def test_weights_with_nothing_in_common() -> None:
    # A zero reference has no gauge to come to: None says so.
    shape = SHAPES["tt"]
    assert align(random_packed(shape), torch.zeros(shape.numel, dtype=torch.float64), shape) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    # Solved in float64, whatever the cores are stored in.
    shape = SHAPES["tt"]
    reference = random_packed(shape).to(dtype)
    aligned = align(reference, reference, shape)
    assert aligned is not None and aligned.dtype == dtype

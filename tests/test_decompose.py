"""TT-SVD: exact recovery, best errors, tolerances, padding, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from comera_compile.errors import ShapeError, WeightError
from comera_compile.tt.decompose import decompose, leading_left
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.initialize import draw_packed
from comera_compile.tt.packing import pack, to_dense
from comera_compile.tt.shape import TTShape


def drawn(shape: TTShape) -> Tensor:
    """A float64 weight that has exactly the ranks of a shape."""
    return to_dense(draw_packed(shape, 0.02, seed=3, dtype=torch.float64, device="cpu"), shape)


def distance(weight: Tensor, cores: list[Tensor], shape: TTShape) -> float:
    dense = to_dense(pack([core.double() for core in cores], shape), shape)
    return float((dense - weight.double()).norm() / weight.double().norm())


def decaying(rows: int, cols: int) -> Tensor:
    """Structured, of full rank."""
    return torch.randn(rows, cols, dtype=torch.float64) * torch.arange(1, cols + 1) ** -0.8


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(
    "shape",
    [
        choose_shape(192, 128, format="tt", rank=9),
        choose_shape(128, 192, format="tt", rank=[3, 7, 4, 6, 2]),
        choose_shape(96, 64, format="tt", rank=8, order=2),
        choose_shape(192, 128, format="ttm", rank=9),
        choose_shape(256, 96, format="ttm", rank=[6, 10, 5], order=4),
        choose_shape(64, 48, format="ttm", rank=4, order=1),
    ],
    ids=lambda shape: f"{shape.format}-{shape.ranks}",
)
def test_a_tensor_train_is_recovered(shape: TTShape, dtype: torch.dtype, bar: float) -> None:
    weight = drawn(shape).to(dtype)
    found = decompose(weight, shape)
    assert found.shape == shape
    assert all(core.dtype == dtype for core in found.cores)
    assert distance(weight, found.cores, shape) <= bar
    assert found.relative_error <= bar


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_cast_up(dtype: torch.dtype) -> None:
    shape = choose_shape(64, 64, format="tt", rank=10**6)
    weight = torch.randn(64, 64).to(dtype)
    found = decompose(weight, shape)
    # At full ranks nothing but float32 rounding is lost: the weight's own dtype would lose 1e-3 and more.
    assert found.cores[0].dtype == torch.float32
    assert found.relative_error <= 1e-6


def test_error_is_the_best_at_the_bond_when_only_it_cuts() -> None:
    # All other ranks at their largest: the error is that of the best matrix of rank 6 (Eckart and Young).
    shape = choose_shape(64, 64, format="tt", rank=[4, 16, 6, 16, 4])
    weight = decaying(64, 64)
    values = torch.linalg.svdvals(weight)
    found = decompose(weight, shape)
    best = float(values[6:].norm() / values.norm())
    assert shape.bond == 6 and abs(found.relative_error - best) <= 1e-10


def test_reported_error_is_the_measured_one_and_near_best() -> None:
    shape = choose_shape(96, 64, format="ttm", rank=12)
    weight = decaying(96, 64)
    found = decompose(weight, shape)
    assert abs(distance(weight, found.cores, shape) - found.relative_error) <= 1e-12
    # At most sqrt(bonds) times the error that either unfolding alone enforces (Oseledets 2011, corollary 2.4).
    tensor = weight.reshape(*shape.row_modes, *shape.col_modes).permute(0, 3, 1, 4, 2, 5)
    lower = 0.0
    for k in (1, 2):
        values = torch.linalg.svdvals(tensor.reshape(math.prod(shape.modes[:k]), -1))
        lower = max(lower, float(values[12:].norm() / values.norm()))
    assert lower <= found.relative_error <= math.sqrt(2) * lower


def test_cores_share_one_rms() -> None:
    found = decompose(decaying(96, 64), choose_shape(96, 64, format="tt", rank=8))
    rms = torch.stack([core.square().mean().sqrt() for core in found.cores])
    assert (rms / rms[0] - 1).abs().max() <= 1e-9


@pytest.mark.parametrize("tolerance", [0.5, 0.1, 0.01, 1e-6])
def test_tolerance_is_kept_by_small_ranks(tolerance: float) -> None:
    caps = choose_shape(64, 64, format="tt", rank=10**6)
    weight = decaying(64, 64)
    found = decompose(weight, caps, tolerance=tolerance)
    assert found.relative_error <= tolerance
    assert found.shape.numel <= caps.numel
    # No bond could be one smaller: the unfolding there alone would exceed what its share of the budget allows.
    values = torch.linalg.svdvals(weight)
    enough = next(r for r in range(1, 65) if float(values[r:].norm() / values.norm()) <= tolerance)
    assert enough <= found.shape.bond <= enough + 12
    if tolerance == 0.5:
        assert found.shape.numel < caps.numel / 4


def test_tolerance_finds_the_true_ranks_and_respects_caps() -> None:
    true = choose_shape(192, 128, format="tt", rank=[3, 7, 4, 6, 2])
    caps = choose_shape(192, 128, format="tt", rank=20)
    weight = drawn(true)
    assert decompose(weight, caps, tolerance=1e-6).shape.ranks == true.ranks
    tight = choose_shape(192, 128, format="tt", rank=3)
    capped = decompose(weight, tight, tolerance=1e-6)
    assert capped.shape.ranks == tight.ranks and capped.relative_error > 0.1


def test_surplus_ranks_are_kept_and_can_learn() -> None:
    true = choose_shape(96, 64, format="tt", rank=2)
    asked = choose_shape(96, 64, format="tt", rank=8)
    weight = drawn(true)
    found = decompose(weight, asked)
    assert found.shape == asked and found.relative_error <= 1e-12
    packed = pack(found.cores, asked).requires_grad_()
    # Move towards another matrix: every core must get a gradient, also across the rank that was not needed.
    (to_dense(packed, asked) * torch.randn(96, 64, dtype=torch.float64)).sum().backward()
    assert packed.grad is not None
    right = packed.grad.split(list(asked.core_sizes))[3].reshape(asked.core_shapes[3])
    assert right[4:].abs().max() > 1e-3 * right.abs().max()


@pytest.mark.parametrize(
    "shape",
    [
        choose_shape(127, 64, format="tt", rank=6),  # a prime: 128 rows stand for it
        choose_shape(64, 127, format="tt", rank=6),
        choose_shape(1018, 48, format="ttm", rank=8),
        choose_shape(128, 64, format="tt", rank=6, zero_row=5),
        choose_shape(1018, 48, format="ttm", rank=8, zero_row=1017),
    ],
    ids=lambda shape: f"{shape.format}-{shape.rows}x{shape.cols}-{shape.zero_row}",
)
def test_hidden_entries_do_not_spoil_a_tensor_train(shape: TTShape) -> None:
    # With zeros where padding hides entries, these weights lose between 0.1 and 10 %.
    weight = drawn(shape)
    found = decompose(weight, shape)
    assert found.relative_error <= 2e-3
    assert distance(weight, found.cores, found.shape) == pytest.approx(found.relative_error, abs=1e-12)


def test_a_zero_row_that_is_not_zero_shows_in_the_error() -> None:
    shape = choose_shape(64, 64, format="tt", rank=10**6, zero_row=3)
    weight = torch.randn(64, 64)
    found = decompose(weight, shape)
    lost = float(weight[3].norm() / weight.norm())
    assert abs(found.relative_error - lost) <= 1e-5


def test_zero_weight() -> None:
    shape = choose_shape(64, 64, format="tt", rank=4)
    found = decompose(torch.zeros(64, 64), shape)
    assert found.relative_error == 0.0 and found.shape == shape
    assert to_dense(pack(found.cores, shape), shape).abs().max() == 0
    assert all(bool(torch.isfinite(core).all()) for core in found.cores)


def test_subspace_iteration_is_exact_on_low_rank_and_near_best_elsewhere() -> None:
    low = torch.randn(700, 20, dtype=torch.float64) @ torch.randn(20, 900, dtype=torch.float64)
    left, _, beyond = leading_left(low, 20)
    assert float((low - left @ (left.T @ low)).norm() / low.norm()) <= 1e-12
    assert beyond <= 1e-20 * float(low.norm()) ** 2
    slow = decaying(700, 900)
    left, values, beyond = leading_left(slow, 20)
    exact = torch.linalg.svdvals(slow)
    assert (values / exact[:20] - 1).abs().max() <= 1e-3
    assert math.sqrt(beyond) <= 1.001 * float(exact[20:].norm())


def test_same_weight_same_cores() -> None:
    # The sketch has its own seed: the global random state neither matters nor moves. The middle unfolding, 1024 x 1024
    # at rank 20, is large enough to be sketched.
    shape = choose_shape(1024, 1024, format="tt", rank=[16, 128, 20, 128, 16], modes=((16, 8, 8), (8, 8, 16)))
    weight = decaying(1024, 1024)
    state = torch.get_rng_state()
    first = decompose(weight, shape)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    second = decompose(weight, shape)
    assert all(torch.equal(a, b) for a, b in zip(first.cores, second.cores, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    shape = choose_shape(64, 64, format="tt", rank=4)
    weight = torch.randn(64, 64)
    weight[7, 9] = bad
    with pytest.raises(WeightError, match="NaN or infinity"):
        decompose(weight, shape)


def test_what_does_not_fit_is_refused() -> None:
    shape = choose_shape(64, 48, format="tt", rank=4)
    with pytest.raises(WeightError, match="64 x 48 expected"):
        decompose(torch.randn(48, 64), shape)
    with pytest.raises(ShapeError, match="at most 4"):
        decompose(torch.randn(64, 48), replace(shape, ranks=(1, 5, 4, 4, 4, 4, 1)))

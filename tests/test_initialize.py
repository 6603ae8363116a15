"""Drawn cores: variance of the weight, seeds, zero weights; the stored scale and what Adam makes of it."""

from __future__ import annotations

import math

import pytest
import torch

from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.initialize import core_rms, draw_packed, step_share, stored_scale
from comera_compile.tt.packing import cores_of, to_dense
from comera_compile.tt.shape import TTShape

SHAPES = [
    choose_shape(96, 64, format="tt", rank=8),
    choose_shape(96, 64, format="tt", rank=[3, 9, 5, 7, 2]),
    choose_shape(64, 64, format="tt", rank=16, order=2),
    choose_shape(120, 64, format="ttm", rank=8, zero_row=0),
    choose_shape(128, 81, format="ttm", rank=[2, 9, 4], order=4),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.format}-{shape.ranks}")
@pytest.mark.parametrize("std", [0.02, 1.0])
def test_variance_of_the_weight(shape: TTShape, std: float) -> None:
    shape = shape.with_scale(1.7)  # must not matter
    squares = []
    for seed in range(300):
        dense = to_dense(draw_packed(shape, std, seed=seed, dtype=torch.float64, device="cpu"), shape)
        squares.append(dense.square().sum() / ((shape.rows - (shape.zero_row >= 0)) * shape.cols) / std**2)
    ratio = torch.stack(squares)
    # Draws are independent, entries of one draw are not: four standard errors over the draws.
    assert abs(float(ratio.mean()) - 1) <= 4 * float(ratio.std()) / math.sqrt(len(ratio))
    assert float(ratio.std()) / math.sqrt(len(ratio)) <= 0.05


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.format}-{shape.ranks}")
def test_all_cores_share_one_size(shape: TTShape) -> None:
    shape = shape.with_scale(0.3)
    cores = [
        cores_of(draw_packed(shape, 0.02, seed=seed, dtype=torch.float64, device="cpu"), shape) for seed in range(40)
    ]
    expected = core_rms(shape, 0.02)
    for k in range(len(shape.core_shapes)):
        values = torch.cat([drawn[k].flatten() for drawn in cores])
        # Standard error of a root mean square of n normal numbers: 1 / sqrt(2 n).
        assert abs(float(values.square().mean().sqrt()) / expected - 1) <= 4 / math.sqrt(2 * values.numel())


def test_seed_decides_and_nothing_else() -> None:
    shape = SHAPES[0]
    state = torch.get_rng_state()
    first = draw_packed(shape, 0.02, seed=5, dtype=torch.float32, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # defaults of the user must not reach the draw
            again = draw_packed(shape, 0.02, seed=5, dtype=torch.float32, device="cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(first, again)
    assert not torch.equal(first, draw_packed(shape, 0.02, seed=6, dtype=torch.float32, device="cpu"))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        other = draw_packed(shape, 0.02, seed=5, dtype=dtype, device="cpu")
        assert other.dtype == dtype and torch.allclose(other.float(), first, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.format}-{shape.ranks}")
def test_zero_weight_can_learn(shape: TTShape) -> None:
    packed = draw_packed(shape, 0.0, seed=0, dtype=torch.float64, device="cpu").requires_grad_()
    dense = to_dense(packed, shape)
    assert dense.abs().max() == 0
    (dense * torch.randn_like(dense)).sum().backward()
    assert packed.grad is not None
    last = shape.core_sizes[-1]
    # The gradient reaches the zero core, all of it; the others stand still until it has moved.
    assert packed.grad[-last:].abs().min() > 0 and packed.grad[:-last].abs().max() == 0


def test_scale_makes_adam_move_the_weight_as_fast_as_a_dense_one() -> None:
    # A first Adam step moves every stored entry by lr in the sign of its gradient; for a random gradient of the weight
    # the motion of the weight must be about lr an entry. The rank-many terms do not agree in sign, hence the wide bars.
    shape = choose_shape(768, 768, format="tt", rank=32)
    std, lr = 0.02, 1e-4
    shape = shape.with_scale(stored_scale(core_rms(shape, std), std, 6))
    packed = draw_packed(shape, std, seed=1, dtype=torch.float64, device="cpu")
    torch.manual_seed(0)
    moved = packed + lr * torch.sign(torch.randn_like(packed))
    motion = (to_dense(moved, shape) - to_dense(packed, shape)).square().mean().sqrt()
    assert 0.6 * lr <= float(motion) <= 1.6 * lr


def test_stored_scale_by_hand() -> None:
    assert step_share(4) == 2.0
    # 0.1 / (2 * 0.05) = 1; halved by a damping of 2; four times as small a weight gives four times the scale.
    assert stored_scale(0.1, 0.05, 4) == 1.0
    assert stored_scale(0.1, 0.05, 4, damping=2.0) == 0.5
    assert stored_scale(0.1, 0.0125, 4) == 4.0
    assert stored_scale(0.1, 0.0, 4) == 1.0


def test_stored_scale_has_a_grid() -> None:
    found = {stored_scale(0.14, 0.02 * (1 + k / 1000), 6) for k in range(-20, 21)}
    assert len(found) == 1  # layers within 2 % share one constant
    for size in (0.01, 0.07, 0.3, 0.9):
        scale = stored_scale(size, 0.02, 6)
        assert math.log2(scale) * 4 == pytest.approx(round(math.log2(scale) * 4), abs=1e-9)
        assert abs(math.log2(scale * math.sqrt(6) * 0.02 / size)) <= 1 / 8 + 1e-9

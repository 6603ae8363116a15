"""Does a weight look untrained? Its leading singular values beside those of independent random entries.

A freshly initialised weight (normal, uniform, truncated normal, Xavier, Kaiming) has independent entries of one
variance, so its singular values follow the law of Marchenko and Pastur whatever the law of the entries. Training lifts
the leading ones; an orthogonal or identity start flattens them. Both show in the energy that a few leading directions
keep; a small learned update shows in the largest singular value alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_MAX_SIDE = 4096  # longer sides are sampled at equal distances: an embedding table has far more rows than it takes
_MAX_RANK = 128
_OVERSAMPLE = 8
_POWER_STEPS = 2
_SIMULATED_ENTRIES = 2**20  # small matrices fluctuate: as many are simulated as have this many entries, at most 16


@dataclass(frozen=True)
class Spectrum:
    """Leading singular values of a weight and of random matrices of its shape.

    Attributes:
        rank: number of leading directions looked at: the asked one, at most a quarter of the short side and 128.
        kept: share of the squared Frobenius norm in them (a sketch: slightly low, for both sides alike).
        kept_if_random: the same of independent normal entries.
        top: largest singular value over the Frobenius norm.
        top_if_random: the same of independent normal entries.
        random: whether the weight cannot be told from independent entries.
    """

    rank: int
    kept: float
    kept_if_random: float
    top: float
    top_if_random: float
    random: bool


def energy_kept(weight: Tensor, rank: int) -> float:
    """Share of the squared Frobenius norm in the top ``rank`` singular values, from a sketch of fixed seed.

    Args:
        weight: ``(rows, cols)``, any float dtype; sides above 4096 are sampled.
        rank: number of singular values, at least 1.

    Returns:
        Between 0 and 1, slightly below the truth where the spectrum is flat; 1.0 for a zero weight.
    """
    return _leading(_sample(weight), rank)[0]


def looks_random(weight: Tensor, rank: int) -> Spectrum:
    """Compare the leading singular values of a weight with those of independent entries of one variance.

    Random means: both the energy kept and the largest singular value are within a margin of the simulated ones. The
    margins cover what untrained weights of the same shape fluctuate by. A zero weight counts as random.

    Measured at rank 32 on shapes from 64 x 64 to 4096 x 1024: none of 2,100 normal, uniform, truncated normal and
    Xavier weights was called structured; the largest deviations were 51 % (energy) and 74 % (largest value) of the
    margins. Called structured at 768 wide: one added direction of 0.8 times
    the largest singular value of the noise, column scales falling like ``k ** -0.1`` (``k ** -0.05`` is not seen),
    row scales spread by 20 % (10 % is on the edge), orthogonal and identity weights (they keep a third of the energy).

    Args:
        weight: ``(rows, cols)``, any float dtype, finite.
        rank: the rank the weight would get.
    """
    sampled = _sample(weight)
    rows, cols = sampled.shape
    looked_at = max(1, min(rank, min(rows, cols) // 4, _MAX_RANK))
    kept, top = _leading(sampled, looked_at)
    expected_kept, expected_top = _simulated(rows, cols, looked_at)
    if top == 0:
        return Spectrum(looked_at, 1.0, expected_kept, 0.0, expected_top, True)
    margin_kept, margin_top = _margins(min(rows, cols))
    random = abs(kept / expected_kept - 1) <= margin_kept and abs(top / expected_top - 1) <= margin_top
    return Spectrum(looked_at, kept, expected_kept, top, expected_top, random)


def _margins(short: int) -> tuple[float, float]:
    """Relative margins of the energy kept and of the largest singular value for a given short side."""
    return 0.02 + 5 / short, 0.025 + 6 / short


def _sample(weight: Tensor) -> Tensor:
    """At most 4096 rows and columns at equal distances, in float32, scaled so that no square over- or underflows."""
    rows, cols = (_spread(size, weight.device) for size in weight.shape)
    sampled = weight.detach()
    if rows is not None:
        sampled = sampled.index_select(0, rows)
    if cols is not None:
        sampled = sampled.index_select(1, cols)
    largest = sampled.abs().amax()
    return (sampled / torch.where(largest > 0, largest, 1)).to(torch.float32)


def _spread(size: int, device: torch.device) -> Tensor | None:
    """Indices of the sample of a side, or None for all of it."""
    if size <= _MAX_SIDE:
        return None
    return torch.arange(_MAX_SIDE, device=device) * size // _MAX_SIDE


def _leading(matrix: Tensor, rank: int) -> tuple[float, float]:
    """Energy kept by the top ``rank`` singular values, and the largest one over the Frobenius norm."""
    total = float(torch.linalg.vector_norm(matrix)) ** 2
    if total == 0:
        return 1.0, 0.0
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T  # the same values, and bases as short as they can be: most of the time is in their QR
    width = min(rank + _OVERSAMPLE, *matrix.shape)
    basis = torch.linalg.qr(matrix @ _sketch(matrix.shape[1], width).to(matrix.device)).Q
    for _ in range(_POWER_STEPS):
        basis = torch.linalg.qr(matrix @ (matrix.T @ basis)).Q
    small = basis.T @ matrix
    squares = torch.linalg.eigvalsh(small @ small.T).flip(0)
    return min(1.0, float(squares[:rank].sum()) / total), math.sqrt(float(squares[0]) / total)


@lru_cache(maxsize=16)
def _sketch(rows: int, cols: int) -> Tensor:
    """Always the same directions for a size, so that equal weights get equal decisions."""
    return _normal(rows, cols, torch.Generator(device="cpu").manual_seed(0))


@lru_cache(maxsize=256)
def _simulated(rows: int, cols: int, rank: int) -> tuple[float, float]:
    """Mean of :func:`_leading` over normal matrices; on the CPU, with its own random state."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    draws = max(1, min(16, _SIMULATED_ENTRIES // (rows * cols)))
    found = [_leading(_normal(rows, cols, generator), rank) for _ in range(draws)]
    return sum(kept for kept, _ in found) / draws, sum(top for _, top in found) / draws


def _normal(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Independent normal entries; device and dtype are said because the defaults belong to the user."""
    return torch.randn(rows, cols, generator=generator, device="cpu", dtype=torch.float32)

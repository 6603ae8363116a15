"""From a dense weight to tensor-train cores: TT-SVD (Oseledets 2011), truncated unfolding by unfolding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comera_compile.errors import ShapeError, WeightError
from comera_compile.tt.packing import pack, to_dense
from comera_compile.tt.shape import TTShape

_EXACT_BELOW = 512  # unfoldings with a short side up to this get a full SVD in well under a second
_OVERSAMPLE = 16
_POWER_STEPS = 4
_FILL_SWEEPS = 16
_OVERSHOOT = 1.5  # over-relaxation: hidden entries settle linearly, this about squares the rate
BEYOND_MENDING = 0.5  # hidden zeros spoil a weight of these ranks by far less than this
_WORTH_A_SWEEP = 0.9  # a sweep that leaves more than this of the error is the last


@dataclass(frozen=True)
class Decomposition:
    """Cores of a dense weight.

    Attributes:
        cores: the (unscaled) cores in ``shape.core_shapes``, all of equal root mean square.
        shape: the asked shape, with smaller ranks if a tolerance allowed them.
        relative_error: Frobenius norm of ``weight - to_dense`` over that of the weight, measured, not estimated.
    """

    cores: list[Tensor]
    shape: TTShape
    relative_error: float


def decompose(weight: Tensor, shape: TTShape, *, tolerance: float | None = None) -> Decomposition:
    """TT-SVD of a dense weight.

    From the first mode on, each unfolding is replaced by its projection on its leading left singular vectors, which
    become the core; the rest is carried to the right. The errors of the steps are orthogonal, so their squares add up,
    and the total is at most ``sqrt(number of bonds)`` times the best possible one at these ranks.

    Entries that never show (padded rows and columns, the zero row) start as zeros and are then replaced by what the
    cores make of them, as long as that helps: zeros there would spoil a weight that does have these ranks, such as one
    that was in tensor-train form before.

    Args:
        weight: ``(shape.rows, shape.cols)``. Computed in float64, without gradient.
        shape: modes and ranks.
        tolerance: largest relative Frobenius error. Given, each rank is the smallest for which the error stays within
            it, at most the rank of ``shape``; what one bond leaves unused is passed on to the next. None: exactly the
            ranks of ``shape``, even where the weight needs less (the surplus is orthonormal on the left and zero on
            the right: it can learn).

    Returns:
        Cores in float64 for a float64 weight, else in float32.

    Raises:
        WeightError: the weight holds NaN or infinity, or its size is not that of ``shape``.
        ShapeError: a rank of ``shape`` exceeds what its place can hold.
    """
    if tuple(weight.shape) != (shape.rows, shape.cols):
        raise WeightError(f"a weight of {shape.rows} x {shape.cols} expected, got {tuple(weight.shape)}")
    exact = weight.detach().to(torch.float64)
    norm = float(torch.linalg.vector_norm(exact))
    if not math.isfinite(norm):
        raise WeightError("a finite weight expected, got NaN or infinity in it")
    filled, cores = _fit(exact, shape)
    if tolerance is not None:
        cores = _truncate(_to_tensor(filled, shape), shape.ranks, (tolerance * norm) ** 2)
    cores, shape = _balance(cores, shape)
    if weight.dtype != torch.float64:
        cores = [core.to(torch.float32) for core in cores]
    error = float(torch.linalg.vector_norm(exact - _dense(cores, shape))) / norm if norm > 0 else 0.0
    return Decomposition(cores, shape, error)


def _fit(weight: Tensor, shape: TTShape) -> tuple[Tensor, list[Tensor]]:
    """The weight padded to the mode products, its hidden entries filled to suit the ranks, and its cores."""
    filled = _pad(weight, shape)
    cores = _truncate(_to_tensor(filled, shape), shape.ranks)
    if not has_hidden(shape):
        return filled, cores
    rows, cols = filled.shape
    whole, hidden = replace(shape, rows=rows, cols=cols, zero_row=-1), _hidden(filled, shape)
    change = _dense(cores, whole) - filled
    error = float(torch.linalg.vector_norm(change[~hidden]))
    if error > BEYOND_MENDING * float(torch.linalg.vector_norm(filled)):
        return filled, cores
    for _ in range(_FILL_SWEEPS):
        attempt = filled + torch.where(hidden, _OVERSHOOT * change, 0)
        attempt_cores = _truncate(_to_tensor(attempt, shape), shape.ranks)
        change = _dense(attempt_cores, whole) - attempt
        before, error = error, float(torch.linalg.vector_norm(change[~hidden]))
        if error < before:
            filled, cores = attempt, attempt_cores
        if error > _WORTH_A_SWEEP * before:
            break
    return filled, cores


def has_hidden(shape: TTShape) -> bool:
    """Whether some entries of the tensor train never show in the dense weight."""
    return shape.padded or shape.zero_row >= 0


def unfolding(weight: Tensor, shape: TTShape, place: int) -> Tensor:
    """The zero-padded weight as the matrix whose rank is rank number ``place`` of ``shape``."""
    return _to_tensor(_pad(weight, shape), shape).reshape(math.prod(shape.modes[:place]), -1)


def _pad(weight: Tensor, shape: TTShape) -> Tensor:
    """The weight with zero rows and columns up to the mode products."""
    rows, cols = math.prod(shape.row_modes), math.prod(shape.col_modes)
    return torch.nn.functional.pad(weight, (0, cols - shape.cols, 0, rows - shape.rows))


def _hidden(filled: Tensor, shape: TTShape) -> Tensor:
    """Which entries never show: padded rows and columns, and the zero row."""
    hidden = torch.ones_like(filled, dtype=torch.bool)
    hidden[: shape.rows, : shape.cols] = False
    if shape.zero_row >= 0:
        hidden[shape.zero_row] = True
    return hidden


def _to_tensor(weight: Tensor, shape: TTShape) -> Tensor:
    """A weight of the full mode products as a tensor of one axis a core."""
    if shape.format == "tt":
        return weight.reshape(shape.modes)
    order = len(shape.row_modes)
    pairs = [axis for k in range(order) for axis in (k, order + k)]
    return weight.reshape(*shape.row_modes, *shape.col_modes).permute(pairs).reshape(shape.modes)


def _truncate(tensor: Tensor, ranks: Sequence[int], allowed: float | None = None) -> list[Tensor]:
    """Three-axis cores of a tensor at ``ranks``, or at smaller ones within the squared error ``allowed``."""
    cores: list[Tensor] = []
    modes, carried, rank = tensor.shape, tensor, 1
    for k, mode in enumerate(modes[:-1]):
        unfolding = carried.reshape(rank * mode, -1)
        largest, asked = min(unfolding.shape), ranks[k + 1]
        if asked > largest and allowed is None:
            raise ShapeError(f"rank {k + 1} of {tuple(ranks)} must be at most {largest} for modes {tuple(modes)}")
        basis, values, beyond = leading_left(unfolding, min(asked, largest))
        if allowed is not None:
            kept, lost = _smallest_rank(values, beyond, allowed / (len(modes) - 1 - k))
            basis, allowed = basis[:, :kept], max(0.0, allowed - lost)
        carried = basis.T @ unfolding
        cores.append(basis.reshape(rank, mode, -1))
        rank = basis.shape[1]
    return [*cores, carried.reshape(rank, modes[-1], 1)]


def _smallest_rank(values: Tensor, beyond: float, allowed: float) -> tuple[int, float]:
    """The smallest number of leading singular values that leaves at most ``allowed`` squared, and what it leaves.

    ``beyond`` is what already lies outside ``values``. Summed from the small end: a large total minus the leading
    values would lose small tolerances to rounding.
    """
    tails = values.square().flip(0).cumsum(0).flip(0).tolist()
    lost = [tail + beyond for tail in tails[1:]] + [beyond]
    kept = next((k for k, rest in enumerate(lost, start=1) if rest <= allowed), len(lost))
    return kept, lost[kept - 1]


def leading_left(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Leading left singular vectors ``(rows, rank)``, their singular values, and the squared sum of all others.

    Exact, but for large matrices of which few vectors are wanted: those get subspace iteration from a fixed sketch,
    which is exact to rounding where the rank suffices and within about 0.1 % of the best error elsewhere.
    """
    short = min(matrix.shape)
    if short > _EXACT_BELOW and rank + _OVERSAMPLE <= short // 4:
        return _iterate(matrix, rank)
    if matrix.shape[1] > 2 * matrix.shape[0]:
        matrix = torch.linalg.qr(matrix.T, mode="r").R.T  # a wide matrix has the left vectors of its small factor
    left, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    beyond = float(values[rank:].square().sum())
    return left[:, :rank], values[:rank], beyond


def _iterate(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Randomized subspace iteration (Halko, Martinsson, Tropp 2011, algorithm 4.4) with a fixed seed."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    sketch = torch.randn(matrix.shape[1], rank + _OVERSAMPLE, generator=generator, dtype=matrix.dtype, device="cpu")
    basis = torch.linalg.qr(matrix @ sketch.to(matrix.device)).Q
    for _ in range(_POWER_STEPS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    small = basis.T @ matrix
    rotation, values, _ = torch.linalg.svd(torch.linalg.qr(small.T, mode="r").R.T, full_matrices=False)
    left = basis @ rotation[:, :rank]
    residual = matrix - left @ (left.T @ matrix)
    beyond = float(torch.linalg.vector_norm(residual)) ** 2
    return left, values[:rank], beyond


def _balance(cores: Sequence[Tensor], shape: TTShape) -> tuple[list[Tensor], TTShape]:
    """The same product with one root mean square for all cores (the gauge leaves that free), in the sizes of a shape.

    The cores of a zero weight stay as they are: orthonormal, but for the last, which is zero.
    """
    shape = replace(shape, ranks=(1, *(core.shape[-1] for core in cores)))
    rms = [float(torch.linalg.vector_norm(core)) / math.sqrt(core.numel()) for core in cores]
    common = math.exp(sum(math.log(r) for r in rms) / len(rms)) if min(rms) > 0 else 0.0
    factors = [common / r if common > 0 else 1.0 for r in rms]
    sizes = shape.core_shapes
    return [(core * factor).reshape(size) for core, factor, size in zip(cores, factors, sizes, strict=True)], shape


def _dense(cores: Sequence[Tensor], shape: TTShape) -> Tensor:
    """What cores of any number of axes stand for, in float64."""
    shape = shape.with_scale(1.0)
    sized = [core.reshape(size).to(torch.float64) for core, size in zip(cores, shape.core_shapes, strict=True)]
    return to_dense(pack(sized, shape), shape)

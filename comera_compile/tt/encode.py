"""What becomes of a dense weight: drawn cores, its own cores, or nothing. A trained weight is never thrown away."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from comera_compile.errors import WeightError
from comera_compile.tt.decompose import BEYOND_MENDING, decompose, has_hidden, unfolding
from comera_compile.tt.initialize import core_rms, draw_packed, stored_scale
from comera_compile.tt.packing import pack
from comera_compile.tt.shape import TTShape
from comera_compile.tt.spectrum import Spectrum, energy_kept, looks_random

Init = Literal["auto", "svd", "random"]

_SEED_BYTES = 16384
_SKETCH_FLOOR = 1e-3  # smallest error that a float32 sketch can tell from none
_SMALLEST_SQUARED = 1e-15  # entries whose squares float32 still holds with room to spare


@dataclass(frozen=True)
class Encoded:
    """The decision about one weight.

    Attributes:
        packed: ``(shape.numel,)`` stored cores in the dtype and on the device of the weight; None: leave it dense.
        shape: final ranks, scale and zero row. The zero row is dropped (-1) where the weight's row is not zero.
        method: how the cores came about, or would have.
        kept: energy that the leading directions of the weight keep (see :class:`Spectrum`).
        kept_if_random: what they would keep of an untrained weight.
        relative_error: of the decomposition; 0 for drawn cores, which stand for a weight without content. For a
            weight left dense without a decomposition, the estimate that ruled it out.
        reason: one line for the report.
    """

    packed: Tensor | None
    shape: TTShape
    method: Literal["drawn", "svd"]
    kept: float
    kept_if_random: float
    relative_error: float
    reason: str


def encode(
    weight: Tensor,
    shape: TTShape,
    *,
    init: Init,
    max_error: float,
    tolerance: float | None = None,
    name: str = "weight",
    trained: str = "",
) -> Encoded:
    """Decide what becomes of a dense weight, and do it.

    The result depends on the weight and the arguments only, not on the process, the device or any random state.

    Args:
        weight: ``(shape.rows, shape.cols)``, any float dtype.
        shape: modes and the ranks asked.
        init: ``"auto"``: an untrained weight (see :func:`looks_random`) gets drawn cores of its own root mean square; a
            structured one is decomposed, and stays dense if that loses more than ``max_error``. ``"svd"``: always
            decomposed, whatever is lost. ``"random"``: always drawn.
        max_error: largest relative Frobenius error that ``"auto"`` accepts.
        tolerance: decompose at the smallest ranks within this relative error; the ranks of ``shape`` are caps.
        name: of the weight, for errors.
        trained: why ``"auto"`` is to take the weight for trained whatever its spectrum says: the first steps of
            training leave no trace there. Empty: the spectrum decides.

    Raises:
        WeightError: the weight holds NaN or infinity, or its size is not that of ``shape``.
    """
    # The first forward of a compiled model may run under autocast: the decision must not.
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        _check(weight, shape, name)
        return _decide(weight.detach(), shape, init, max_error, tolerance, trained)


def _decide(
    weight: Tensor, shape: TTShape, init: Init, max_error: float, tolerance: float | None, trained: str
) -> Encoded:
    if shape.zero_row >= 0 and bool(weight[shape.zero_row].any()):
        shape = replace(shape, zero_row=-1)
    std = _rms(weight, shape)
    spectrum = looks_random(weight, _matrix_rank(shape))
    if init == "random" or std == 0 or (init == "auto" and spectrum.random and not trained):
        return _draw(weight, shape, std, spectrum)
    if init == "auto":
        estimate = _estimate_error(weight, shape)
        # The sketch sees a little less energy than there is, and hidden entries can still be filled to suit.
        surely_worse = max(2 * max_error + _SKETCH_FLOOR, BEYOND_MENDING if has_hidden(shape) else 0.0)
        if estimate > surely_worse:
            # of one unfolding: those of the others come on top
            return _leave_dense(shape, spectrum, f"error at least {estimate:.2g}", estimate, max_error, trained)
    found = _decompose(weight, shape, std, spectrum, tolerance)
    if init == "auto" and found.relative_error > max_error:
        error = found.relative_error
        return _leave_dense(found.shape, spectrum, f"error {error:.2g}", error, max_error, trained)
    return found


def _check(weight: Tensor, shape: TTShape, name: str) -> None:
    if tuple(weight.shape) != (shape.rows, shape.cols):
        raise WeightError(f"{name}: {shape.rows} x {shape.cols} expected, got {tuple(weight.shape)}")
    if not weight.is_floating_point():
        raise WeightError(f"{name}: a floating-point weight expected, got {weight.dtype}; exclude it")
    low, high = torch.aminmax(weight)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise WeightError(f"{name} holds NaN or infinity; mend the weight, or exclude it to leave it as it is")


def _rms(weight: Tensor, shape: TTShape) -> float:
    """Root mean square of the entries outside the zero row: the standard deviation of a weight of mean zero.

    Row by row, then to six digits, so that the number of threads cannot show in drawn cores.
    """
    rows = shape.rows - (shape.zero_row >= 0)
    count = max(1, rows) * shape.cols
    dtype = torch.promote_types(weight.dtype, torch.float32)
    rms = _norm(torch.linalg.vector_norm(weight, dim=1, dtype=dtype)) / math.sqrt(count)
    if not _SMALLEST_SQUARED < rms < 1 / _SMALLEST_SQUARED:  # squares of such entries leave float32
        rms = _norm(weight) / math.sqrt(count)
    return float(f"{rms:.6g}")


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _matrix_rank(shape: TTShape) -> int:
    """Number of leading directions of the dense matrix worth looking at: exactly the cap of its rank for ``tt``."""
    return shape.bond if shape.format == "tt" else max(shape.ranks)


def _estimate_error(weight: Tensor, shape: TTShape) -> float:
    """What the middle rank alone loses, from a sketch: spares most trained weights a decomposition that is refused."""
    place = len(shape.row_modes) if shape.format == "tt" else len(shape.row_modes) // 2
    middle = unfolding(weight, shape, place)
    return math.sqrt(max(0.0, 1 - energy_kept(middle, shape.ranks[place])))


def _draw(weight: Tensor, shape: TTShape, std: float, spectrum: Spectrum) -> Encoded:
    """Fresh cores for a weight of standard deviation ``std``."""
    shape = shape.with_scale(stored_scale(core_rms(shape, std), std, len(shape.core_shapes)))
    packed = draw_packed(shape, std, seed=_seed(weight, shape), dtype=weight.dtype, device=weight.device)
    state = "untrained" if spectrum.random else "redrawn as asked"
    reason = f"{state}: {_energy(spectrum)}; cores drawn for standard deviation {std:.3g}"
    return Encoded(packed, shape, "drawn", spectrum.kept, spectrum.kept_if_random, 0.0, reason)


def _decompose(weight: Tensor, shape: TTShape, std: float, spectrum: Spectrum, tolerance: float | None) -> Encoded:
    """Cores of the weight itself."""
    found = decompose(weight, shape, tolerance=tolerance)
    size = float(torch.linalg.vector_norm(found.cores[0])) / math.sqrt(found.cores[0].numel())
    shape = found.shape.with_scale(stored_scale(size, std, len(found.cores)))
    packed = pack(found.cores, shape).to(weight.dtype)
    reason = f"decomposed with error {found.relative_error:.2g}: {_energy(spectrum)}"
    return Encoded(packed, shape, "svd", spectrum.kept, spectrum.kept_if_random, found.relative_error, reason)


def _leave_dense(
    shape: TTShape, spectrum: Spectrum, said: str, error: float, max_error: float, trained: str
) -> Encoded:
    why = trained if spectrum.random and trained else "structured"
    reason = f"{why}: {_energy(spectrum)}, {said} > max_error {max_error:g}"
    return Encoded(None, shape, "svd", spectrum.kept, spectrum.kept_if_random, error, reason)


def _energy(spectrum: Spectrum) -> str:
    ours, theirs = f"{spectrum.kept:.0%}", f"{spectrum.kept_if_random:.0%}"
    text = f"rank {spectrum.rank} keeps {ours} of its energy as a matrix (an untrained weight: {theirs})"
    return text.replace("%", " %")


def _seed(weight: Tensor, shape: TTShape) -> int:
    """From the weight's content and the asked shape, so that equal weights get equal cores in every process."""
    rows = -(-_SEED_BYTES // (weight.shape[1] * weight.element_size()))
    content = weight[:rows].reshape(-1).view(torch.uint8)[:_SEED_BYTES]
    return zlib.crc32(shape.encode().encode(), zlib.crc32(bytes(content.tolist())))

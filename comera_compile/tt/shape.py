"""What the packed vector of one tensor-train weight means: modes, ranks, scale and dense shape.

Two formats. ``tt`` is the tensor train of a matrix of CoMERA (arXiv 2405.14377, section 3): the row modes, then the
column modes, one core a mode, so the middle rank (the *bond*) caps the rank of the matrix. ``ttm`` is its tensor-train
matrix for embeddings: each core carries one row mode and one column mode.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from comera_compile.errors import ShapeError

Format = Literal["tt", "ttm"]
LAYOUT_VERSION = 1
_FORMATS: tuple[Format, ...] = ("tt", "ttm")


@dataclass(frozen=True)
class TTShape:
    """Shape of one tensor-train weight.

    Args:
        format: ``"tt"`` (linear weights) or ``"ttm"`` (embedding tables).
        rows: rows of the dense weight, e.g. ``out_features`` of ``nn.Linear``, ``num_embeddings`` of ``nn.Embedding``.
        cols: columns of the dense weight.
        row_modes: factors of the rows, most significant first; their product may exceed ``rows`` (zero padding).
        col_modes: factors of the columns, likewise.
        ranks: all ranks including both boundary ones. ``tt``: one more than the number of modes; ``ttm``: one more
            than the number of row modes.
        scale: each core is ``scale`` times what is stored (see ``tt.initialize.stored_scale``).
        zero_row: row of the dense weight that is always zero (``padding_idx``), or -1.

    Raises:
        ShapeError: modes, ranks and dense shape do not fit each other.
    """

    format: Format
    rows: int
    cols: int
    row_modes: tuple[int, ...]
    col_modes: tuple[int, ...]
    ranks: tuple[int, ...]
    scale: float = 1.0
    zero_row: int = -1

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ShapeError(f"format must be one of {_FORMATS}, got {self.format!r}")
        for name, size, modes in (("row", self.rows, self.row_modes), ("col", self.cols, self.col_modes)):
            if not modes or any(m < 1 for m in modes) or math.prod(modes) < size:
                raise ShapeError(f"{name}_modes {modes} must be positive with a product of at least {size}")
        if self.format == "ttm" and len(self.row_modes) != len(self.col_modes):
            raise ShapeError(f"ttm needs as many row modes as col modes, got {self.row_modes} and {self.col_modes}")
        expected = len(self.row_modes) + 1 + (len(self.col_modes) if self.format == "tt" else 0)
        if len(self.ranks) != expected:
            both = f"{self.row_modes}, {self.col_modes}"
            raise ShapeError(f"ranks {self.ranks} must have length {expected} for modes {both}")
        if self.ranks[0] != 1 or self.ranks[-1] != 1 or any(r < 1 for r in self.ranks):
            raise ShapeError(f"ranks {self.ranks} must be positive and begin and end with 1")

    @property
    def modes(self) -> tuple[int, ...]:
        """Mode size of each core: ``tt`` row modes then column modes, ``ttm`` their pairwise products."""
        if self.format == "tt":
            return self.row_modes + self.col_modes
        return tuple(v * e for v, e in zip(self.row_modes, self.col_modes, strict=True))

    @property
    def bond(self) -> int:
        """The rank between row and column cores of a ``tt`` weight: an upper bound of the matrix rank."""
        return self.ranks[len(self.row_modes)]

    @cached_property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """``(r_left, mode, r_right)`` of each core; ``(r_left, row_mode, col_mode, r_right)`` for ``ttm``."""
        pairs = zip(self.ranks[:-1], self.ranks[1:], strict=True)
        if self.format == "tt":
            return tuple((a, m, b) for (a, b), m in zip(pairs, self.modes, strict=True))
        factors = zip(self.row_modes, self.col_modes, strict=True)
        return tuple((a, v, e, b) for (a, b), (v, e) in zip(pairs, factors, strict=True))

    @cached_property
    def core_sizes(self) -> tuple[int, ...]:
        """Number of elements of each core, in the order in which they are packed."""
        return tuple(math.prod(shape) for shape in self.core_shapes)

    @property
    def numel(self) -> int:
        """Length of the packed vector."""
        return sum(self.core_sizes)

    @property
    def dense_numel(self) -> int:
        """Elements of the dense weight."""
        return self.rows * self.cols

    @property
    def padded(self) -> bool:
        """Whether the modes stand for more rows or columns than the dense weight has."""
        return math.prod(self.row_modes) != self.rows or math.prod(self.col_modes) != self.cols

    def with_scale(self, scale: float) -> TTShape:
        """The same shape with another stored scale."""
        return replace(self, scale=scale)

    def encode(self) -> str:
        """One line of text that says everything: the argument of the marker op and what a traced graph shows."""
        words = ["x".join(map(str, part)) for part in (self.row_modes, self.col_modes, self.ranks)]
        return f"{self.format} {self.rows}x{self.cols} {' '.join(words)} {self.scale!r} {self.zero_row}"

    @staticmethod
    def decode(text: str) -> TTShape:
        """Inverse of :meth:`encode`."""
        form, size, *parts, scale, zero_row = text.split(" ")
        rows, cols = (int(n) for n in size.split("x"))
        row_modes, col_modes, ranks = (tuple(int(n) for n in part.split("x")) for part in parts)
        if form not in _FORMATS:
            raise ShapeError(f"format must be one of {_FORMATS}, got {form!r}")
        return TTShape(form, rows, cols, row_modes, col_modes, ranks, float(scale), int(zero_row))

    def to_tensor(self) -> torch.Tensor:
        """The layout as one int64 vector, which a checkpoint keeps beside the packed weight."""
        scale_bits = struct.unpack("<q", struct.pack("<d", self.scale))[0]
        head = [LAYOUT_VERSION, _FORMATS.index(self.format), self.rows, self.cols, scale_bits, self.zero_row]
        counts = [len(self.row_modes), len(self.col_modes)]
        return torch.tensor([*head, *counts, *self.row_modes, *self.col_modes, *self.ranks], dtype=torch.int64)

    @staticmethod
    def from_tensor(layout: torch.Tensor) -> TTShape:
        """Inverse of :meth:`to_tensor`.

        Raises:
            ShapeError: the layout was written by a newer version or is damaged.
        """
        values = [int(v) for v in layout.tolist()]
        if len(values) < 8 or values[0] != LAYOUT_VERSION:
            raise ShapeError(f"layout version {LAYOUT_VERSION} expected, got {values[:1]}; update comera-compile")
        form, rows, cols, scale_bits, zero_row, n_rows, n_cols = values[1:8]
        modes, ranks = values[8 : 8 + n_rows + n_cols], values[8 + n_rows + n_cols :]
        scale = struct.unpack("<d", struct.pack("<q", scale_bits))[0]
        if form not in range(len(_FORMATS)):
            raise ShapeError(f"unknown tensor-train format number {form} in a checkpoint layout")
        return TTShape(
            _FORMATS[form], rows, cols, tuple(modes[:n_rows]), tuple(modes[n_rows:]), tuple(ranks), scale, zero_row
        )

"""One embedding table: its sizes, the ids it is asked for, and the least work of a training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from benchmarks.floor import FLOAT, ROW_PASSES, WEIGHT_PASSES, Work
from benchmarks.six_encoders import ZIPF_EXPONENT
from comera_compile.tt.factorize import choose_modes, choose_shape
from comera_compile.tt.shape import TTShape
from comera_compile.tt.table_modes import pair_modes

Distribution = Literal["zipf", "shuffled", "uniform"]
DENSE, SPARSE, OURS = "dense_adamw", "sparse_adam", "comera"
NAIVES = ("naive_tt_eager", "naive_tt_compiled")
TUNED = ("tuned_tt_eager", "tuned_tt_compiled")
ROTATION = 8  # batches of ids that a run goes round
GRADIENTS = 4  # gradients of the rows that go round with them


@dataclass(frozen=True)
class Table:
    """A table, the rank of its cores, and the ids of one step.

    Args:
        rows, width: sizes of the dense table.
        rank: of the cores.
        count: ids in one step.
        distribution: ``"zipf"``: P(id) ~ 1 / (id + 1) ** 1.05, ids sorted by frequency; ``"shuffled"``: the same with
            ids exchanged at random once; ``"uniform"``.
    """

    rows: int
    width: int
    rank: int
    count: int
    distribution: Distribution

    @cached_property
    def shape(self) -> TTShape:
        """What the backend chooses for the table."""
        return choose_shape(self.rows, self.width, format="ttm", rank=self.rank)

    @cached_property
    def balanced_shape(self) -> TTShape:
        """Near-equal modes, as tensor-train packages choose them: about as many parameters, more work a row."""
        modes = pair_modes(choose_modes(self.rows, 3), choose_modes(self.width, 3))
        return choose_shape(self.rows, self.width, format="ttm", rank=self.rank, modes=modes)

    def ids(self) -> list[Tensor]:
        """A rotation of ``(count,)`` int64 ids."""
        generator = torch.Generator().manual_seed(0)
        size = (ROTATION, self.count)
        if self.distribution == "uniform":
            return list(torch.randint(self.rows, size, generator=generator).unbind())
        weights = torch.arange(1, self.rows + 1, dtype=torch.float32).pow(-ZIPF_EXPONENT)
        ids = torch.multinomial(weights, math.prod(size), replacement=True, generator=generator).view(size)
        if self.distribution == "shuffled":
            ids = torch.randperm(self.rows, generator=generator)[ids]
        return list(ids.unbind())

    def gradients(self) -> list[Tensor]:
        """A rotation of ``(count, width)`` gradients of the looked-up rows."""
        generator = torch.Generator().manual_seed(1)
        return list(torch.randn(GRADIENTS, self.count, self.width, generator=generator).unbind())

    def work(self, variant: str, batches: Sequence[Tensor]) -> Work | None:
        """Least work of one step (mean over the batches), or None where it is not known.

        Everybody writes the rows and reads their gradients. AdamW passes over every parameter, SparseAdam over the rows
        that occur; a tensor train multiplies each distinct prefix of cores once and takes two gradients of it.
        """
        both = 2 * self.count * self.width
        if variant == DENSE:
            return Work(0, FLOAT * (both + ROW_PASSES * self.rows * self.width))
        if variant == SPARSE:
            unique = sum(ids.unique().numel() for ids in batches) / len(batches)
            return Work(0, FLOAT * (both + ROW_PASSES * unique * self.width))
        if variant == OURS:
            flops = sum(lookup_flops(self.shape, ids) for ids in batches) / len(batches)
            return Work(3 * flops, FLOAT * (both + WEIGHT_PASSES * self.shape.numel))
        return None


def lookup_flops(shape: TTShape, ids: Tensor) -> int:
    """Operations of a forward lookup from the first core on, every distinct prefix of digits computed once."""
    total = 0
    for k in range(1, len(shape.row_modes)):
        below = math.prod(shape.row_modes[k + 1 :])
        distinct = (ids // below).unique().numel()
        left, _, columns, right = shape.core_shapes[k]
        total += 2 * distinct * math.prod(shape.col_modes[:k]) * left * columns * right
    return total


def sharing(table: Table, batches: Sequence[Tensor]) -> dict[str, float]:
    """Mean numbers of distinct ids, and of distinct prefixes without the last digit, of a batch."""
    last = table.shape.row_modes[-1]
    return {
        "unique": sum(ids.unique().numel() for ids in batches) / len(batches),
        "prefixes": sum((ids // last).unique().numel() for ids in batches) / len(batches),
    }


TABLES: dict[str, Table] = {
    "lm": Table(30522, 768, 30, 4096, "zipf"),
    "lm_shuffled": Table(30522, 768, 30, 4096, "shuffled"),
    "table": Table(1_000_000, 32, 32, 4096, "zipf"),
    "table_shuffled": Table(1_000_000, 32, 32, 4096, "shuffled"),
    "table_uniform": Table(1_000_000, 32, 32, 4096, "uniform"),
}

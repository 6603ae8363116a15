"""What the step cannot be faster than: its arithmetic at this machine's GEMM rate, its bytes at its bandwidth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.peers import GALORE_RANK
from benchmarks.plain_tt import MIN_ELEMENTS
from benchmarks.six_encoders import Sizes
from benchmarks.training import BASELINE, Setting
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.shape import TTShape

FLOAT = 4  # bytes
GEMM_SIZE = 2048
STREAM_NUMEL = 2**25
REPEATS = 12
WEIGHT_PASSES = 10  # read twice, gradient written; AdamW reads weight, gradient, two moments and writes three of them
ROW_PASSES = 8  # of an embedding table: a step reads some rows only
ATTENTION_PASSES = 3.5  # a forward is two products, the backward five, since scores are recomputed


@dataclass(frozen=True)
class Machine:
    """Rates measured in this process, with its threads."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Work:
    """Least work of one training step: linears, merges and attention; pointwise operations are left out."""

    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """The larger of arithmetic and traffic: a lower bound, as if both overlapped fully."""
        return max(self.flops / machine.flops, self.bytes / machine.bytes)


def measure_machine() -> Machine:
    """Best rates of a few repetitions: a square float32 product, and an addition in place that no cache holds.

    The addition reads what it writes, as an optimizer does; a copy would hide the reading of the lines it overwrites.
    """
    a, b, out = (torch.randn(GEMM_SIZE, GEMM_SIZE) for _ in range(3))
    source, target = torch.randn(STREAM_NUMEL), torch.randn(STREAM_NUMEL)
    flops = 2 * GEMM_SIZE**3 / _best(lambda: torch.mm(a, b, out=out))
    return Machine(flops, 3 * FLOAT * STREAM_NUMEL / _best(lambda: target.add_(source)))


def best_of(*machines: Machine) -> Machine:
    """The higher rates: a lower one means that something else was running."""
    return Machine(max(m.flops for m in machines), max(m.bytes for m in machines))


def _best(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def work(variant: str, setting: Setting, parameters: int) -> Work | None:
    """Least work of a variant's step, or None where the order of its contractions is not ours to know.

    Args:
        variant: a key of ``training.VARIANTS``.
        setting: sizes, batch and rank.
        parameters: trainable elements of the variant.
    """
    if variant == "tensorly":
        return None
    dense = variant in (BASELINE, "galore")
    sizes, rows = setting.sizes, setting.batch * setting.sizes.sequence
    flops = ATTENTION_PASSES * sizes.encoders * 4 * rows * sizes.sequence * sizes.width
    for out, inner in linears(sizes):
        flops += 6 * rows * out * inner if dense else _tt_flops(out, inner, rows, setting.rank)
        flops += 4 * GALORE_RANK * out * inner if variant == "galore" else 0
    activations = sum(rows * (2 * out + 3 * inner) for out, inner in linears(sizes))
    table = sizes.vocabulary * sizes.width if dense else 0
    weights = WEIGHT_PASSES * (parameters - table) + ROW_PASSES * table
    return Work(flops, FLOAT * (activations + weights))


def linears(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """``(outputs, inputs)`` of every linear that sees all rows; the head sees one row a sequence."""
    for _ in range(sizes.encoders):
        yield from [(sizes.width, sizes.width)] * 4
        yield from [(sizes.hidden, sizes.width), (sizes.width, sizes.hidden)]


def _tt_flops(out: int, inner: int, rows: int, rank: int) -> float:
    """Two skinny products and the merges, each with its two gradients."""
    if out * inner < MIN_ELEMENTS:
        return 6 * rows * out * inner
    shape = choose_shape(out, inner, format="tt", rank=rank)
    return 6 * rows * shape.bond * (out + inner) + 3 * merge_flops(shape)


def merge_flops(shape: TTShape) -> int:
    """Multiplications and additions that merge the cores of a ``tt`` weight into its two halves."""
    split, ranks = len(shape.row_modes), shape.ranks
    total = 0
    for k in range(1, split):  # rows: prefix product times the next core
        total += 2 * math.prod(shape.row_modes[:k]) * ranks[k] * shape.row_modes[k] * ranks[k + 1]
    for k in range(1, len(shape.col_modes)):  # columns: the next core times the suffix product
        left = len(shape.core_shapes) - 1 - k
        total += 2 * ranks[left] * shape.modes[left] * ranks[left + 1] * math.prod(shape.modes[left + 1 :])
    return total

"""Where the elements of a merged tensor lie: in scratch, in the operand it becomes, along a group of its axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.step import Axes, Sizes, Tensor


def is_made(plan: LinearPlan, merged: Tensor) -> bool:
    """Whether a result of the merge part is made there, and no core as it is."""
    return merged not in plan.merge.inputs


def is_direct(plan: LinearPlan, k: int) -> bool:
    """Whether an operand has its elements in the order of the merged tensor, none cropped, none added."""
    runs = runs_of(plan, k)
    numel = plan.merge.outputs[k].numel(plan.core_sizes)
    return len(runs.inside) == 1 and runs.length == numel == plan.operands[k].numel(plan.operand_sizes)


@dataclass(frozen=True)
class Runs:
    """Elements that a merged tensor and its operand share: runs of ``length`` at these offsets in each."""

    inside: tuple[int, ...]
    outside: tuple[int, ...]
    length: int

    @property
    def numel(self) -> int:
        """How many there are."""
        return len(self.inside) * self.length


@lru_cache(maxsize=1024)
def runs_of(plan: LinearPlan, k: int) -> Runs:
    """A whole half is handed over as a matrix (bond, size), W as (rows, columns), anything else as it is."""
    merged, operand = plan.merge.outputs[k], plan.operands[k]
    if len(operand.axes) != 2 or operand.axes == merged.axes:
        return Runs((0,), (0,), merged.numel(plan.core_sizes))
    first = "r" if operand.axes[0] == "r" else "m"
    steps = strides(merged.axes, plan.core_sizes)
    groups = [tuple(a for a in merged.axes if (a[0] == first) is wanted) for wanted in (True, False)]
    rows, cols = (offsets_of(axes, steps, plan.core_sizes) for axes in groups)
    height, width = (plan.operand_sizes[a] for a in operand.axes)
    rows, cols = rows[:height], cols[:width]
    if cols == list(range(len(cols))):
        if len(cols) == width and rows == [i * width for i in range(len(rows))]:
            return Runs((0,), (0,), len(rows) * width)
        return Runs(tuple(rows), tuple(i * width for i in range(len(rows))), len(cols))
    inside = tuple(r + c for r in rows for c in cols)
    return Runs(inside, tuple(i * width + j for i in range(len(rows)) for j in range(len(cols))), 1)


def strides(axes: Axes, sizes: Sizes) -> dict[str, int]:
    """How far apart neighbours along each axis lie."""
    steps, step = {}, 1
    for axis in reversed(axes):
        steps[axis], step = step, step * sizes[axis]
    return steps


def offsets_of(axes: Axes, steps: Mapping[str, int], sizes: Sizes) -> list[int]:
    """Offset of every index of a group of axes, the last one running fastest."""
    ranges = [range(0, sizes[a] * steps[a], steps[a]) for a in axes]
    return [sum(parts) for parts in itertools.product(*ranges)]


def run_length(offsets: Sequence[int]) -> int:
    """The largest number of neighbours that always lie side by side."""
    breaks = [k for k in range(1, len(offsets)) if offsets[k] != offsets[k - 1] + 1]
    return math.gcd(len(offsets), *breaks)

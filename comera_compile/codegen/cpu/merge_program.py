"""The merge part of a plan as numbers that ``merge.cpp`` runs: which product reads and writes what, where.

Buffers are numbered: 0 is scratch (the scaled cores first, then every inner result), 1 to n are the plan's operands
(or, in the backward, their gradients), n + 1 is the gradient of the packed vectors. Elements are found through strides
where an axis group has one, else through tables of offsets; so no tensor is ever permuted in memory on its own.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.step import Axes, Sizes, Step, Tensor

SCRATCH = 0
PRODUCT, COPY, ZERO = range(3)
TASK_ROWS = 48  # kRows of merge.cpp


@dataclass(frozen=True)
class MergeProgram:
    """What the library is given for one plan and direction.

    Args:
        words: the instructions, behind five sizes (see ``run`` in merge.cpp).
        tables: offsets that instructions point to.
        scratch: elements of buffer 0 for each layer.
        steps: elements of each buffer for one layer: how far apart its layers are.
        operands: shape of each operand of one layer.
    """

    words: array[int]
    tables: array[int]
    scratch: int
    steps: array[int]
    operands: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def forward_program(plan_text: str) -> MergeProgram:
    """Cores to operands."""
    plan = LinearPlan.decode(plan_text)
    writer = _Writer(plan)
    direct = {o.name: k + 1 for k, o in enumerate(plan.merge.outputs) if _is_direct(plan, k) and _is_made(plan, o)}
    for step in plan.merge.steps:
        writer.hold(step.out, buffer=direct.get(step.out.name, SCRATCH))
        writer.product(step)
    for k, merged in enumerate(plan.merge.outputs):
        if merged.name not in direct:
            writer.hand_over(merged, k)
    return writer.program()


@lru_cache(maxsize=256)
def backward_program(plan_text: str) -> MergeProgram:
    """Cores and gradients of the operands to gradients of the packed vectors; inner results are made again."""
    plan = LinearPlan.decode(plan_text)
    writer, gradients = _Writer(plan), len(plan.operands) + 1
    names = plan.merge.input_names
    backward = plan.merge.backward(names)
    for step in _needed(plan.merge.steps, backward):
        writer.hold(step.out)
        writer.product(step)
    for k, merged in enumerate(plan.merge.outputs):
        writer.take_gradient(merged, k, into=gradients)
    offsets = dict(zip(names, itertools.accumulate([0, *plan.shape.core_sizes]), strict=False))
    for step in backward:
        name = step.out.name.removeprefix("d")
        if name in offsets:
            writer.hold(step.out, buffer=gradients, offset=offsets[name])
        else:
            writer.hold(step.out)
        writer.product(step)
    return writer.program()


def _needed(steps: Sequence[Step], readers: Iterable[Step]) -> list[Step]:
    """The steps whose results are read by ``readers`` or by one that is needed."""
    wanted = {t.name for s in readers for t in (s.left, s.right)}
    needed: list[Step] = []
    for step in reversed(steps):
        if step.out.name in wanted:
            needed.append(step)
            wanted |= {step.left.name, step.right.name}
    return needed[::-1]


def _is_made(plan: LinearPlan, merged: Tensor) -> bool:
    return merged not in plan.merge.inputs


def _is_direct(plan: LinearPlan, k: int) -> bool:
    """Whether an operand has its elements in the order of the merged tensor, none cropped, none added."""
    runs = _runs(plan, k)
    numel = plan.merge.outputs[k].numel(plan.core_sizes)
    return len(runs.inside) == 1 and runs.length == numel == plan.operands[k].numel(plan.operand_sizes)


@dataclass(frozen=True)
class _Runs:
    """Elements that a merged tensor and its operand share: runs of ``length`` at these offsets in each."""

    inside: tuple[int, ...]
    outside: tuple[int, ...]
    length: int

    @property
    def numel(self) -> int:
        return len(self.inside) * self.length


@lru_cache(maxsize=1024)
def _runs(plan: LinearPlan, k: int) -> _Runs:
    """A whole half is handed over as a matrix (bond, size), W as (rows, columns), anything else as it is."""
    merged, operand = plan.merge.outputs[k], plan.operands[k]
    if len(operand.axes) != 2 or operand.axes == merged.axes:
        return _Runs((0,), (0,), merged.numel(plan.core_sizes))
    first = "r" if operand.axes[0] == "r" else "m"
    steps = _strides(merged.axes, plan.core_sizes)
    groups = [tuple(a for a in merged.axes if (a[0] == first) is wanted) for wanted in (True, False)]
    rows, cols = (_offsets(axes, steps, plan.core_sizes) for axes in groups)
    height, width = (plan.operand_sizes[a] for a in operand.axes)
    rows, cols = rows[:height], cols[:width]
    if cols == list(range(len(cols))):
        if len(cols) == width and rows == [i * width for i in range(len(rows))]:
            return _Runs((0,), (0,), len(rows) * width)
        return _Runs(tuple(rows), tuple(i * width for i in range(len(rows))), len(cols))
    inside = tuple(r + c for r in rows for c in cols)
    return _Runs(inside, tuple(i * width + j for i in range(len(rows)) for j in range(len(cols))), 1)


def _strides(axes: Axes, sizes: Sizes) -> dict[str, int]:
    steps, step = {}, 1
    for axis in reversed(axes):
        steps[axis], step = step, step * sizes[axis]
    return steps


def _offsets(axes: Axes, steps: Mapping[str, int], sizes: Sizes) -> list[int]:
    """Offset of every index of a group of axes, the last one running fastest."""
    ranges = [range(0, sizes[a] * steps[a], steps[a]) for a in axes]
    return [sum(parts) for parts in itertools.product(*ranges)]


@dataclass
class _Writer:
    plan: LinearPlan
    words: list[int] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    count: int = 0
    scratch: int = 0
    room: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("left", "right", "out"), 1))
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for core in self.plan.merge.inputs:
            self.hold(core)

    def hold(self, tensor: Tensor, buffer: int = SCRATCH, offset: int = 0) -> None:
        """Say where a tensor lies: in scratch behind what is there, unless a buffer is named."""
        if buffer == SCRATCH:
            offset, self.scratch = self.scratch, self.scratch + tensor.numel(self.plan.core_sizes)
        self.places[tensor.name] = (buffer, offset)

    def product(self, step: Step) -> None:
        """One contraction. The operand that has the last axis of the result gives its columns."""
        sizes = self.plan.core_sizes
        left, right = step.left, step.right
        if step.out.axes and step.out.axes[-1] in left.axes:
            left, right = right, left
        # Each group of axes in the order of the larger of its two tensors, which then need not be rearranged.
        rows, cols = (self._shared(self._larger(t, step.out), t, step.out) for t in (left, right))
        summed = self._shared(self._larger(left, right), left, right)
        m, n, k = (_count(axes, sizes) for axes in (rows, cols, summed))
        places = [(left, rows, summed), (right, summed, cols), (step.out, rows, cols)]
        self._write(PRODUCT, [m, n, k, *(w for t, a, b in places for w in self._place(t, a, b))])
        for key, room in (("left", min(m, TASK_ROWS) * k), ("right", k * n), ("out", min(m, TASK_ROWS) * n)):
            self.room[key] = max(self.room[key], room)

    def _larger(self, one: Tensor, other: Tensor) -> Tensor:
        return max(other, one, key=lambda tensor: tensor.numel(self.plan.core_sizes))

    @staticmethod
    def _shared(order: Tensor, one: Tensor, other: Tensor) -> Axes:
        return tuple(a for a in order.axes if a in one.axes and a in other.axes)

    def hand_over(self, merged: Tensor, k: int) -> None:
        """Copy a merged tensor to its operand: cropped, padded with zeros, bond first."""
        runs, numel = _runs(self.plan, k), self.plan.operands[k].numel(self.plan.operand_sizes)
        if runs.numel < numel:
            self._write(ZERO, [k + 1, 0, numel])
        self._copy(self.places[merged.name], runs.inside, (k + 1, 0), runs.outside, runs.length)

    def take_gradient(self, merged: Tensor, k: int, into: int) -> None:
        """The gradient of an operand as that of the merged tensor, zero where elements were cropped."""
        gradient, runs = Tensor(f"d{merged.name}", merged.axes), _runs(self.plan, k)
        numel = merged.numel(self.plan.core_sizes)
        if _is_made(self.plan, merged):
            if _is_direct(self.plan, k):
                self.hold(gradient, buffer=k + 1)
                return
            self.hold(gradient)
        else:  # a core that was handed over as it is: its gradient is there already
            start = sum(self.plan.shape.core_sizes[: self.plan.merge.inputs.index(merged)])
            self.hold(gradient, buffer=into, offset=start)
        if runs.numel < numel:
            self._write(ZERO, [*self.places[gradient.name], numel])
        self._copy((k + 1, 0), runs.outside, self.places[gradient.name], runs.inside, runs.length)

    def _copy(
        self, source: tuple[int, int], rows: Sequence[int], target: tuple[int, int], to: Sequence[int], length: int
    ) -> None:
        tables = [self._table([offset + r for r in run]) for (_, offset), run in ((source, rows), (target, to))]
        self._write(COPY, [source[0], target[0], len(rows), length, *tables])

    def _place(self, tensor: Tensor, rows: Axes, cols: Axes) -> list[int]:
        """Buffer, offset, length of runs of columns, and the offsets of both groups: two strides where that is all."""
        steps, sizes = _strides(tensor.axes, self.plan.core_sizes), self.plan.core_sizes
        pair = [_offsets(axes, steps, sizes) for axes in (rows, cols)]
        strides = [offsets[1] if len(offsets) > 1 else 0 for offsets in pair]
        even = all(offsets == [i * s for i in range(len(offsets))] for offsets, s in zip(pair, strides, strict=True))
        return [
            *self.places[tensor.name],
            _run_length(pair[1]),
            int(even),
            *(strides if even else map(self._table, pair)),
        ]

    def _table(self, offsets: Sequence[int]) -> int:
        self.tables += offsets
        return len(self.tables) - len(offsets)

    def _write(self, kind: int, words: list[int]) -> None:
        self.count += 1
        self.words += [kind, len(words) + 2, *words]

    def program(self) -> MergeProgram:
        """What was written."""
        size = sum(self.plan.shape.core_sizes)
        head = [self.count, self.room["left"], self.room["right"], self.room["out"], size]
        shapes = tuple(tuple(self.plan.operand_sizes[a] for a in o.axes) for o in self.plan.operands)
        steps = array("q", [self.scratch, *(math.prod(s) for s in shapes), size])
        return MergeProgram(array("q", head + self.words), array("q", self.tables), self.scratch, steps, shapes)


def _run_length(offsets: Sequence[int]) -> int:
    """The largest number of neighbours that always lie side by side."""
    breaks = [k for k in range(1, len(offsets)) if offsets[k] != offsets[k - 1] + 1]
    return math.gcd(len(offsets), *breaks)


def _count(axes: Axes, sizes: Sizes) -> int:
    return math.prod(sizes[a] for a in axes)

"""The merge part of a plan as numbers that ``merge.cpp`` runs: which product reads and writes what, where.

Buffers are numbered: 0 is scratch (the scaled cores first, then every inner result), 1 to n are the plan's operands
(or, in the backward, their gradients), n + 1 is the gradient of the packed vectors. Elements are found through strides
where an axis group has one, else through tables of offsets; so no tensor is ever permuted in memory on its own.

Instructions that have no tensor in common, as those of the two halves, are parts of their own: threads share them.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import networkx as nx

from comera_compile.codegen.cpu.merge_layout import is_direct, is_made, offsets_of, run_length, runs_of, strides
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.step import Axes, Sizes, Step, Tensor

SCRATCH = 0
PRODUCT, COPY, ZERO, SCALE, SCALE_GRADIENT = range(5)
TASK_ROWS = 48  # kRows of merge.cpp
Place = tuple[int, int]  # buffer, offset


@dataclass(frozen=True)
class MergeProgram:
    """What the library is given for one plan and direction.

    Args:
        words: the instructions, behind five sizes and where each part begins (see ``run`` in merge.cpp).
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
    direct = {o.name: k + 1 for k, o in enumerate(plan.merge.outputs) if is_direct(plan, k) and is_made(plan, o)}
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
    writer.scale_gradients()
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


@dataclass
class _Writer:
    plan: LinearPlan
    tables: list[int] = field(default_factory=list)
    instructions: list[tuple[str, list[int]]] = field(default_factory=list)
    related: nx.Graph = field(default_factory=nx.Graph)
    scratch: int = 0
    room: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("left", "right", "out"), 1))
    places: dict[str, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for core in self.plan.merge.inputs:
            self.hold(core)
            self._write(core, SCALE, self._span(core))

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
        self.related.add_edges_from((_value(t), _value(step.out)) for t in (left, right))
        self._write(step.out, PRODUCT, [m, n, k, *(w for t, a, b in places for w in self._place(t, a, b))])
        for key, room in (("left", min(m, TASK_ROWS) * k), ("right", k * n), ("out", min(m, TASK_ROWS) * n)):
            self.room[key] = max(self.room[key], room)

    def _larger(self, one: Tensor, other: Tensor) -> Tensor:
        return max(other, one, key=lambda tensor: tensor.numel(self.plan.core_sizes))

    @staticmethod
    def _shared(order: Tensor, one: Tensor, other: Tensor) -> Axes:
        return tuple(a for a in order.axes if a in one.axes and a in other.axes)

    def hand_over(self, merged: Tensor, k: int) -> None:
        """Copy a merged tensor to its operand: cropped, padded with zeros, bond first."""
        runs, numel = runs_of(self.plan, k), self.plan.operands[k].numel(self.plan.operand_sizes)
        if runs.numel < numel:
            self._write(merged, ZERO, [k + 1, 0, numel])
        self._copy(merged, self.places[merged.name], runs.inside, (k + 1, 0), runs.outside, runs.length)

    def take_gradient(self, merged: Tensor, k: int, into: int) -> None:
        """The gradient of an operand as that of the merged tensor, zero where elements were cropped."""
        gradient, runs = Tensor(f"d{merged.name}", merged.axes), runs_of(self.plan, k)
        numel = merged.numel(self.plan.core_sizes)
        if is_made(self.plan, merged):
            if is_direct(self.plan, k):
                self.hold(gradient, buffer=k + 1)
                return
            self.hold(gradient)
        else:  # a core that was handed over as it is: its gradient is there already
            start = sum(self.plan.shape.core_sizes[: self.plan.merge.inputs.index(merged)])
            self.hold(gradient, buffer=into, offset=start)
        if runs.numel < numel:
            self._write(gradient, ZERO, [*self.places[gradient.name], numel])
        self._copy(gradient, (k + 1, 0), runs.outside, self.places[gradient.name], runs.inside, runs.length)

    def scale_gradients(self) -> None:
        """Gradients are those of the scaled cores until here."""
        for core in self.plan.merge.inputs:
            self._write(core, SCALE_GRADIENT, self._span(core))

    def _copy(
        self, of: Tensor, source: Place, rows: Sequence[int], target: Place, to: Sequence[int], length: int
    ) -> None:
        tables = [self._table([offset + r for r in run]) for (_, offset), run in ((source, rows), (target, to))]
        self._write(of, COPY, [source[0], target[0], len(rows), length, *tables])

    def _place(self, tensor: Tensor, rows: Axes, cols: Axes) -> list[int]:
        """Buffer, offset, length of runs of columns, and the offsets of both groups: a stride where that is all."""
        steps, sizes = strides(tensor.axes, self.plan.core_sizes), self.plan.core_sizes
        pair = [offsets_of(axes, steps, sizes) for axes in (rows, cols)]
        apart = [offsets[1] if len(offsets) > 1 else 0 for offsets in pair]
        even = [offsets == [i * s for i in range(len(offsets))] for offsets, s in zip(pair, apart, strict=True)]
        where = [s if e else self._table(o) for o, s, e in zip(pair, apart, even, strict=True)]
        return [*self.places[tensor.name], run_length(pair[1]), even[0] + 2 * even[1], *where]

    def _table(self, offsets: Sequence[int]) -> int:
        self.tables += offsets
        return len(self.tables) - len(offsets)

    def _span(self, core: Tensor) -> list[int]:
        """Where a core begins and ends in the packed vector, and in scratch."""
        _, first = self.places[core.name]
        return [first, first + core.numel(self.plan.core_sizes)]

    def _write(self, of: Tensor, kind: int, words: list[int]) -> None:
        """An instruction about a tensor or its gradient."""
        self.related.add_node(_value(of))
        self.instructions.append((_value(of), [kind, len(words) + 2, *words]))

    def program(self) -> MergeProgram:
        """What was written, part by part."""
        size = sum(self.plan.shape.core_sizes)
        parts = [[w for name, w in self.instructions if name in p] for p in nx.connected_components(self.related)]
        head = [len(parts), self.room["left"], self.room["right"], self.room["out"], size]
        words = head + [0] * (2 * len(parts))
        for k, instructions in enumerate(parts):
            words[len(head) + 2 * k : len(head) + 2 * k + 2] = len(words), len(instructions)
            words += itertools.chain.from_iterable(instructions)
        shapes = tuple(tuple(self.plan.operand_sizes[a] for a in o.axes) for o in self.plan.operands)
        steps = array("q", [self.scratch, *(math.prod(s) for s in shapes), size])
        return MergeProgram(array("q", words), array("q", self.tables), self.scratch, steps, shapes)


def _value(tensor: Tensor) -> str:
    """Name of a tensor or of what it is the gradient of."""
    return tensor.name.removeprefix("d")


def _count(axes: Axes, sizes: Sizes) -> int:
    return math.prod(sizes[a] for a in axes)

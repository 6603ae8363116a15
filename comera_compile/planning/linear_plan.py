"""Candidate plans of one tensor-train linear product: how its cores are grouped, merged and applied to the rows.

With W = A B (A: rows x bond from the row cores, B: bond x cols from the column cores) and x of t rows, every candidate
cuts each half into groups of neighbouring cores. Inside a group the cores are merged, which does not touch x; then the
groups are applied to x one after the other. One group a half is CoMERA's two-GEMM order (section 4.2 of the paper); one
core a group is the core-by-core order; ``dense`` merges everything into W.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from comera_compile.planning.merge_order import merge_steps
from comera_compile.planning.program import Program
from comera_compile.planning.step import Axes, Step, Tensor
from comera_compile.tt.shape import TTShape

Side = Literal["rows", "cols"]
Groups = tuple[int, ...]


@dataclass(frozen=True)
class LinearPlan:
    """One way to compute ``y = x W^T`` (``contracts="cols"``, nn.Linear) or ``y = x W`` (``"rows"``, Conv1D).

    Args:
        shape: a ``tt`` shape; its scale plays no part here.
        contracts: the side of W that meets x.
        row_groups, col_groups: sizes of the groups of each half, in chain order.
        dense: rebuild W and use one product.
        bond_multiple: merged halves get their bond padded with zeros to a multiple of this (MKL is slow in between).
    """

    shape: TTShape
    contracts: Side
    row_groups: Groups
    col_groups: Groups
    dense: bool = False
    bond_multiple: int = 1

    @property
    def name(self) -> str:
        """Short name for reports."""
        if self.dense:
            return "rebuild W"
        d_rows, d_cols = len(self.shape.row_modes), len(self.shape.col_modes)
        if self.merged:
            return "merge both halves"
        if len(self.row_groups) == d_rows and len(self.col_groups) == d_cols:
            return "core by core"
        return f"merge {'+'.join(map(str, self.row_groups))} | {'+'.join(map(str, self.col_groups))}"

    @property
    def merged(self) -> bool:
        """Whether both halves are merged whole and W is not rebuilt."""
        return not self.dense and len(self.row_groups) == len(self.col_groups) == 1

    @property
    def bond(self) -> int:
        """Bond of the merged operands, with its zero padding."""
        step = self.bond_multiple if self.merged else 1
        return -(-self.shape.bond // step) * step

    @cached_property
    def core_tensors(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Row cores and column cores with their axes; ranks of size one at the ends have none."""
        rows, cols = len(self.shape.row_modes), len(self.shape.col_modes)
        p = [*(f"p{k}" for k in range(1, rows)), "r"]
        q = ["r", *(f"q{k}" for k in range(1, cols))]
        left = [Tensor(f"A{k + 1}", ((p[k - 1],) if k else ()) + (f"m{k + 1}", p[k])) for k in range(rows)]
        right = [Tensor(f"B{k + 1}", (q[k], f"n{k + 1}") + ((q[k + 1],) if k + 1 < cols else ())) for k in range(cols)]
        return tuple(left), tuple(right)

    @cached_property
    def core_sizes(self) -> dict[str, int]:
        """Size of each axis of the cores."""
        sizes = {"r": self.shape.bond}
        for core, dims in zip(itertools.chain(*self.core_tensors), self.shape.core_shapes, strict=True):
            kept = dims if len(core.axes) == 3 else dims[1:] if core.name == "A1" else dims[:-1]
            sizes.update(zip(core.axes, kept, strict=True))
        return sizes

    @cached_property
    def operand_sizes(self) -> dict[str, int]:
        """Size of each axis in the part that touches the rows (without ``t``): padded bond, cropped modes."""
        return {**self.core_sizes, "m": self.shape.rows, "n": self.shape.cols, "r": self.bond}

    @cached_property
    def merge(self) -> Program:
        """The part that does not touch the rows: cores to operands."""
        steps: list[Step] = []
        outputs: list[Tensor] = []
        for half, groups, whole in zip(self.core_tensors, (self.row_groups, self.col_groups), "AB", strict=True):
            for group in _split(half, groups):
                name = whole if len(groups) == 1 else _span(group)
                order = _bond_first(group) if len(groups) == 1 else _outer_axes(group)
                merged, made = merge_steps(group, name, order, self.core_sizes)
                steps += made
                outputs.append(merged)
        if self.dense:
            a, b = outputs
            whole_w = Tensor("W", tuple(x for x in a.axes + b.axes if x != "r"))
            steps.append(Step(whole_w, a, b))
            outputs = [whole_w]
        return Program(tuple(itertools.chain(*self.core_tensors)), tuple(steps), tuple(outputs))

    @cached_property
    def operands(self) -> tuple[Tensor, ...]:
        """What the merge part hands over: whole halves as matrices (modes flattened), other groups as they are."""
        if self.dense:
            return (Tensor("W", ("m", "n")),)
        rows = self.merge.outputs[: len(self.row_groups)]
        cols = self.merge.outputs[len(self.row_groups) :]
        left = (Tensor("A", ("r", "m")),) if len(rows) == 1 else rows
        right = (Tensor("B", ("r", "n")),) if len(cols) == 1 else cols
        return left + right

    @cached_property
    def apply(self) -> Program:
        """The part that touches the rows: x and the operands to y."""
        if self.dense:
            taken, given = ("n", "m") if self.contracts == "cols" else ("m", "n")
            x, y = Tensor("x", ("t", taken)), Tensor("y", ("t", given))
            return Program((x, *self.operands), (Step(y, x, self.operands[0]),), (y,))
        rows = [t for t in self.operands if t.name.startswith("A")]
        cols = [t for t in self.operands if t.name.startswith("B")]
        inward, outward = (cols[::-1], rows[::-1]) if self.contracts == "cols" else (rows, cols)
        x_axes: Axes = ("t", *_modes(cols if self.contracts == "cols" else rows))
        y_axes: Axes = ("t", *_modes(rows if self.contracts == "cols" else cols))
        x = Tensor("x", x_axes)
        steps = _chain(x, inward, last="h")
        steps += _chain(steps[-1].out, outward, last="y", final=y_axes)
        return Program((x, *self.operands), tuple(steps), (steps[-1].out,))

    def encode(self) -> str:
        """One line of text from which the plan can be rebuilt: what a rewritten graph carries."""
        groups = ["+".join(map(str, g)) for g in (self.row_groups, self.col_groups)]
        kind = "dense" if self.dense else "tt"
        return f"{kind} {self.contracts} {groups[0]} {groups[1]} {self.bond_multiple} | {self.shape.encode()}"

    @staticmethod
    @lru_cache(maxsize=4096)
    def decode(text: str) -> LinearPlan:
        """Inverse of :meth:`encode`."""
        head, layout = text.split(" | ")
        kind, side, rows, cols, multiple = head.split(" ")
        row_groups, col_groups = (tuple(int(n) for n in g.split("+")) for g in (rows, cols))
        contracts: Side = "cols" if side == "cols" else "rows"
        return LinearPlan(TTShape.decode(layout), contracts, row_groups, col_groups, kind == "dense", int(multiple))


def candidates(shape: TTShape, contracts: Side, bond_multiple: int) -> list[LinearPlan]:
    """Every grouping of both halves, and the dense rebuild. Padded sides are only ever merged whole (then cropped)."""
    shape = shape.with_scale(1.0)
    whole_rows, whole_cols = (len(shape.row_modes),), (len(shape.col_modes),)
    rows = [whole_rows] if _is_padded(shape.row_modes, shape.rows) else _compositions(len(shape.row_modes))
    cols = [whole_cols] if _is_padded(shape.col_modes, shape.cols) else _compositions(len(shape.col_modes))
    plans = [LinearPlan(shape, contracts, a, b, False, bond_multiple) for a in rows for b in cols]
    return [*plans, LinearPlan(shape, contracts, whole_rows, whole_cols, True, bond_multiple)]


def _is_padded(modes: tuple[int, ...], size: int) -> bool:
    product = 1
    for mode in modes:
        product *= mode
    return product != size


def _compositions(count: int) -> list[Groups]:
    """Every way to cut a row of ``count`` cores into neighbouring groups."""
    cuts = itertools.product((False, True), repeat=count - 1)
    return [tuple(len(list(run)) for run in _runs(count, cut)) for cut in cuts]


def _runs(count: int, cut: tuple[bool, ...]) -> list[list[int]]:
    runs = [[0]]
    for k in range(1, count):
        if cut[k - 1]:
            runs.append([])
        runs[-1].append(k)
    return runs


def _split(cores: tuple[Tensor, ...], groups: Groups) -> list[tuple[Tensor, ...]]:
    parts, start = [], 0
    for size in groups:
        parts.append(cores[start : start + size])
        start += size
    return parts


def _span(group: tuple[Tensor, ...]) -> str:
    first, last = group[0].name, group[-1].name
    return first if len(group) == 1 else f"{first}_{last[1:]}"


def _modes(tensors: list[Tensor]) -> Axes:
    return tuple(a for t in tensors for a in t.axes if a[0] in "mn")


def _outer_axes(group: tuple[Tensor, ...]) -> Axes:
    """Axes of a merged group in chain order: outer rank, its modes, inner rank."""
    counts = [a for t in group for a in t.axes]
    return tuple(a for a in counts if a[0] in "mn" or counts.count(a) == 1)


def _bond_first(group: tuple[Tensor, ...]) -> Axes:
    return ("r", *(a for a in _outer_axes(group) if a != "r"))


def _chain(start: Tensor, groups: list[Tensor], *, last: str, final: Axes | None = None) -> list[Step]:
    """Apply groups one after the other; each sums the axes it shares with what is there and leaves its own."""
    steps: list[Step] = []
    current = start
    for k, group in enumerate(groups):
        left = tuple(a for a in current.axes if a not in group.axes)
        own = tuple(a for a in group.axes if a not in current.axes)
        own = tuple(a for a in own if a[0] in "mn") + tuple(a for a in own if a[0] not in "mn")
        end = k == len(groups) - 1
        axes = final if end and final is not None else left + own
        current_out = Tensor(last if end else f"{last}{len(groups) - 1 - k}", axes)
        steps.append(Step(current_out, current, group))
        current = current_out
    return steps

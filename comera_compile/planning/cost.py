"""What a step costs: FLOPs, bytes, and the time that a device model predicts for its product and its copies.

Copies are what opt_einsum's model leaves out and what makes core-by-core orders slow on many rows. Counted is what
``codegen/contract.py`` runs: one mm, or bmm where there are batch axes, of operands that may lie transposed, and a copy
for each tensor that the product needs, or leaves, in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from comera_compile.errors import OptionError
from comera_compile.planning.device_model import CUDA_MODEL, DeviceModel, cpu_model
from comera_compile.planning.kernel_times import ITEMSIZES
from comera_compile.planning.linear_plan import LinearPlan, Side
from comera_compile.planning.program import Program
from comera_compile.planning.step import Axes, Sizes, Step, Tensor
from comera_compile.tt.shape import TTShape

__all__ = [
    "CUDA_MODEL",
    "IN_PLAN",
    "OBJECTIVES",
    "Cost",
    "DeviceModel",
    "Objective",
    "cost_by_rows",
    "cpu_model",
    "dense_cost",
    "plan_cost",
    "saved_bytes",
    "step_cost",
    "steps_cost",
]

# A product that is timed alone finds its operands in the cache. Those of a plan, one after the other, take this many
# times as long, next to the package's own operators, which are few and timed as they run: 408 plans of 24 layers
# (docs/log.md). Figures that were not measured are fitted to plans as they are.
IN_PLAN = 1.2

Objective = Literal["time", "flops", "bytes"]
OBJECTIVES: tuple[Objective, ...] = ("time", "flops", "bytes")


@dataclass(frozen=True)
class Cost:
    """Sum over steps: floating-point operations, bytes moved, predicted seconds."""

    flops: int
    bytes: int
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        """Costs of two lists of steps done one after the other."""
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.seconds + other.seconds)

    def by(self, objective: Objective) -> float:
        """What a search minimizes.

        Raises:
            OptionError: there is no such objective.
        """
        if objective not in OBJECTIVES:
            raise OptionError(f"objective must be one of {', '.join(map(repr, OBJECTIVES))}, got {objective!r}")
        return {"time": self.seconds, "flops": self.flops, "bytes": self.bytes}[objective]


def step_cost(step: Step, sizes: Sizes, device: DeviceModel, itemsize: int) -> Cost:
    """Cost of one step under concrete axis sizes."""
    return steps_cost([step], sizes, device, itemsize)


def steps_cost(steps: Iterable[Step], sizes: Sizes, device: DeviceModel, itemsize: int) -> Cost:
    """Cost of a list of steps, done one after the other."""
    return _cost([_count(step, sizes) for step in steps], sizes.get("t", 1), device, itemsize)


@lru_cache(maxsize=4096)
def plan_cost(
    plan: LinearPlan, rows: int, device: DeviceModel, itemsize: int = 4, *, training: bool = True, layers: int = 1
) -> Cost:
    """Cost of a linear plan at ``rows`` rows: forward, and with ``training`` also every gradient.

    ``layers`` of equal shape have their cores merged together; each is charged its share.
    """
    return cost_by_rows(plan, device, itemsize, training=training, layers=layers)(rows)


def cost_by_rows(
    plan: LinearPlan, device: DeviceModel, itemsize: int, *, training: bool, layers: int = 1
) -> Callable[[int], Cost]:
    """The cost of a plan as a function of the rows: everything else is counted here, once."""
    merge = _all_steps(plan.merge if layers == 1 else plan.merge.with_layer_axis(), training)
    together = steps_cost(merge, {**plan.core_sizes, "l": layers}, device, itemsize)
    once = Cost(together.flops // layers, together.bytes // layers, together.seconds / layers)
    works = [_count(step, plan.operand_sizes) for step in _all_steps(plan.apply, training)]
    kernels = device.kernels
    factor = IN_PLAN if kernels is not None and device.products and not plan.dense else 1.0
    if kernels is not None and merge and not plan.dense and itemsize in ITEMSIZES:
        once = replace(once, seconds=kernels.merge_seconds(together.flops, plan.shape.bond, training=training) / layers)
    if kernels is None or not plan.merged or not kernels.takes(plan.bond, itemsize):
        return lambda rows: once + _slower(_cost(works, rows, device, itemsize), factor)

    def by_kernels(rows: int) -> Cost:
        seconds = kernels.apply_seconds(rows, *_widths(plan), plan.bond, training=training)
        steps = _cost(works, rows, device, itemsize)
        return once + replace(steps, seconds=max(seconds, steps.bytes / device.bytes_per_second))

    return by_kernels


def _slower(cost: Cost, factor: float) -> Cost:
    return replace(cost, seconds=factor * cost.seconds)


def _widths(plan: LinearPlan) -> tuple[int, int]:
    return plan.shape.rows, plan.shape.cols


def dense_cost(
    shape: TTShape,
    rows: int,
    device: DeviceModel,
    itemsize: int = 4,
    *,
    training: bool = True,
    contracts: Side = "cols",
) -> Cost:
    """Cost of the plain product with a dense weight of the same size, which is there and need not be rebuilt.

    With ``training`` three products of rows x in x out: y, the gradient of x, that of the weight. Left out are the
    optimizer's step over the dense weight, and what casts under autocast take.

    Args:
        shape: of the weight; its modes and ranks play no part.
        rows: rows of x.
        device, itemsize: as for :func:`plan_cost`.
        training: whether gradients of x and the weight are taken.
        contracts: the side of the weight that meets x: ``"cols"`` for nn.Linear, ``"rows"`` for Conv1D.
    """
    taken, given = ("n", "m") if contracts == "cols" else ("m", "n")
    x, weight, y = Tensor("x", ("t", taken)), Tensor("W", ("m", "n")), Tensor("y", ("t", given))
    steps = _all_steps(Program((x, weight), (Step(y, x, weight),), (y,)), training)
    return steps_cost(steps, {"t": rows, "m": shape.rows, "n": shape.cols}, device, itemsize)


def _all_steps(program: Program, training: bool) -> tuple[Step, ...]:
    return program.steps + (program.backward(program.input_names) if training else ())


class _Size(NamedTuple):
    """A product of axis sizes; where the rows are among them (axis ``t``), what each row adds."""

    number: int
    by_rows: bool

    def at(self, rows: int) -> int:
        return self.number * rows if self.by_rows else self.number


class _Work(NamedTuple):
    """What a step does: a product of (batch, m, n, k), and copies of tensors of so many elements, with their kind."""

    product: tuple[_Size, _Size, _Size, _Size]
    transposed: tuple[bool, bool]
    tensors: tuple[_Size, ...]
    copies: tuple[tuple[_Size, int], ...]


def _count(step: Step, sizes: Sizes) -> _Work:
    first, second = (step.right, step.left) if step.swapped else (step.left, step.right)
    forms = step.form(first, rows_first=True), step.form(second, rows_first=False)
    batch, m, n, k = (_size(axes, sizes) for axes in step.groups)
    return _Work(
        product=(batch, m, n, k),
        transposed=(forms[0].transposed, forms[1].transposed),
        tensors=tuple(_size(t.axes, sizes) for t in (step.left, step.right, step.out)),
        copies=tuple((_size(before, sizes), _kind(before, after)) for before, after in _copied(step)),
    )


def _copied(step: Step) -> list[tuple[Axes, Axes]]:
    """Axes before and after each copy."""
    first, second = (step.right, step.left) if step.swapped else (step.left, step.right)
    forms = (first, step.form(first, rows_first=True)), (second, step.form(second, rows_first=False))
    orders = [(operand.axes, form.order) for operand, form in forms if form.copies]
    return orders if step.product_axes == step.out.axes else [*orders, (step.product_axes, step.out.axes)]


def _kind(before: Axes, after: Axes) -> int:
    """Position of a copy in ``COPY_KINDS``."""
    if before[-1] == after[-1]:
        return 0
    return 2 if "t" in (before[-1], after[-1]) else 1


def _size(axes: Axes, sizes: Sizes) -> _Size:
    number = 1
    for axis in axes:
        number *= 1 if axis == "t" else sizes[axis]
    return _Size(number, "t" in axes)


def _cost(works: Iterable[_Work], rows: int, device: DeviceModel, itemsize: int) -> Cost:
    flops, moved, seconds = 0, 0, 0.0
    for work in works:
        batch, m, n, k = (size.at(rows) for size in work.product)
        copies = [(itemsize * size.at(rows), kind) for size, kind in work.copies]
        flops += 2 * batch * m * n * k  # a multiplication and an addition
        moved += itemsize * sum(size.at(rows) for size in work.tensors) + 2 * sum(n for n, _ in copies)  # read, written
        seconds += device.product_seconds(batch, m, n, k, itemsize, *work.transposed)
        for nbytes, kind in copies:
            seconds += device.copy_seconds(nbytes, kind)
    return Cost(flops, moved, seconds)


def saved_bytes(plan: LinearPlan, rows: int, itemsize: int = 4) -> int:
    """Bytes of the tensors kept between forward and backward, without x and the packed cores themselves."""
    sizes = {**plan.operand_sizes, "t": rows}
    named = {t.name: t for t in plan.operands if t not in plan.merge.inputs}
    named |= {s.out.name: s.out for s in plan.apply.steps}
    kept = [named[n] for n in plan.apply.saved(plan.apply.input_names) if n in named]
    total = sum(t.numel(sizes) for t in kept)
    made = {s.out.name: s.out for s in plan.merge.steps}
    inner = set(plan.merge.saved(plan.merge.input_names)) & set(made)
    return itemsize * (total + sum(made[n].numel(plan.core_sizes) for n in inner))

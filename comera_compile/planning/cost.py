"""What a step costs: FLOPs, bytes, and a predicted time from a few device figures.

Time of a step = max(launch floor, FLOPs / rate(m, n, k), bytes / bandwidth) + copies / bandwidth. Copies are what
opt_einsum's model leaves out and what makes core-by-core orders slow on many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.step import Axes, Sizes, Step


@dataclass(frozen=True)
class DeviceModel:
    """Figures of one device that turn a step into seconds.

    Args:
        flops_per_second: peak rate of a large matrix product.
        bytes_per_second: memory bandwidth of streaming reads and writes.
        launch_seconds: floor of one operation (dispatch on a CPU, kernel launch on a GPU).
        batch_seconds: extra time of each matrix of a batched product.
        half_rate_size: a product whose smallest dimension has this size runs at half the peak.
    """

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    batch_seconds: float
    half_rate_size: float


@dataclass(frozen=True)
class Cost:
    """Sum over steps: floating-point operations, bytes moved, predicted seconds."""

    flops: int
    bytes: int
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        """Costs of two lists of steps done one after the other."""
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.seconds + other.seconds)


# Shipped defaults, measured on server processors: one x86-64 core with AVX2 reaches 70-85 GFLOP/s in MKL and two cores
# stream 15-30 GB/s; the GPU row is an H100-class part in fp32 with tf32 off. They only have to order plans rightly.
_CPU_CORE_FLOPS = 7e10
CUDA_MODEL = DeviceModel(4e13, 2.5e12, 5e-6, 5e-9, 24.0)


def cpu_model(threads: int) -> DeviceModel:
    """Default figures for a CPU with that many threads."""
    return DeviceModel(_CPU_CORE_FLOPS * threads, 2.5e10, 4e-6, 3e-7, 12.0)


def step_cost(step: Step, sizes: Sizes, device: DeviceModel, itemsize: int) -> Cost:
    """Cost of one step under concrete axis sizes."""
    return steps_cost([step], sizes, device, itemsize)


def steps_cost(steps: Iterable[Step], sizes: Sizes, device: DeviceModel, itemsize: int) -> Cost:
    """Cost of a list of steps, done one after the other."""
    return _cost([_count(step, sizes) for step in steps], sizes.get("t", 1), device, itemsize)


def plan_cost(plan: LinearPlan, rows: int, device: DeviceModel, itemsize: int = 4, *, training: bool = True) -> Cost:
    """Cost of a linear plan at ``rows`` rows: forward, and with ``training`` also every gradient."""
    return cost_by_rows(plan, device, itemsize, training=training)(rows)


def cost_by_rows(plan: LinearPlan, device: DeviceModel, itemsize: int, *, training: bool) -> Callable[[int], Cost]:
    """The cost of a plan as a function of the rows: everything else is counted here, once."""
    merge, apply = (
        program.steps + (program.backward(program.input_names) if training else ())
        for program in (plan.merge, plan.apply)
    )
    once = steps_cost(merge, plan.core_sizes, device, itemsize)
    works = [_count(step, plan.operand_sizes) for step in apply]
    return lambda rows: once + _cost(works, rows, device, itemsize)


class _Count(NamedTuple):
    """A number of operations or elements: a fixed part and a part for each of the rows."""

    fixed: int
    per_row: int


class _Work(NamedTuple):
    """What a step does; ``narrow`` is the smallest dimension of its product, ``tall`` what each row adds to another."""

    flops: _Count
    moved: _Count
    copied: _Count
    batch: _Count
    narrow: int
    tall: int | None


def _count(step: Step, sizes: Sizes) -> _Work:
    batch, *dims = step.groups
    multiplied = (*step.left.axes, *(a for a in step.right.axes if a not in step.left.axes))
    tall = [_count_axes([axes], sizes).per_row for axes in dims if "t" in axes]
    return _Work(
        flops=_count_axes([multiplied], sizes, times=2),  # a multiplication and an addition
        moved=_count_axes([step.left.axes, step.right.axes, step.out.axes], sizes),
        copied=_count_axes([t.axes for t in step.copied], sizes, times=2),  # read and written
        batch=_count_axes([batch], sizes),
        narrow=min(_count_axes([axes], sizes).fixed for axes in dims if "t" not in axes),
        tall=tall[0] if tall else None,
    )


def _count_axes(groups: Iterable[Axes], sizes: Sizes, times: int = 1) -> _Count:
    """Sum over the groups of the products of their sizes, the rows (axis ``t``) set apart."""
    fixed = per_row = 0
    for axes in groups:
        size = times
        for axis in axes:
            size *= 1 if axis == "t" else sizes[axis]
        fixed, per_row = (fixed, per_row + size) if "t" in axes else (fixed + size, per_row)
    return _Count(fixed, per_row)


def _cost(works: Iterable[_Work], rows: int, device: DeviceModel, itemsize: int) -> Cost:
    flops, moved, seconds = 0, 0, 0.0
    for work in works:
        step_flops = work.flops.fixed + work.flops.per_row * rows
        streamed = itemsize * (work.moved.fixed + work.moved.per_row * rows)
        copied = itemsize * (work.copied.fixed + work.copied.per_row * rows)
        batch = work.batch.fixed + work.batch.per_row * rows
        # No row at all is as narrow as one: there is nothing to divide then.
        narrow = work.narrow if work.tall is None else min(work.narrow, work.tall * max(rows, 1))
        rate = device.flops_per_second * narrow / (narrow + device.half_rate_size)
        busy = max(device.launch_seconds, step_flops / rate, streamed / device.bytes_per_second)
        extra = copied / device.bytes_per_second + (batch * device.batch_seconds if batch > 1 else 0.0)
        flops, moved, seconds = flops + step_flops, moved + streamed + copied, seconds + (busy + extra)
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

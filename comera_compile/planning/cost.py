"""What a step costs: FLOPs, bytes, and a predicted time from a few device figures.

Time of a step = max(launch floor, FLOPs / rate(m, n, k), bytes / bandwidth) + copies / bandwidth. Copies are what
opt_einsum's model leaves out and what makes core-by-core orders slow on many rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.step import Sizes, Step


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
    flops = step.flops(sizes)
    moved = itemsize * (step.left.numel(sizes) + step.right.numel(sizes) + step.out.numel(sizes))
    copied = 2 * itemsize * step.copied_numel(sizes)
    batch, m, n, k = step.matmul_sizes(sizes)
    narrow = min(m, n, k)
    rate = device.flops_per_second * narrow / (narrow + device.half_rate_size)
    work = max(device.launch_seconds, flops / rate, moved / device.bytes_per_second)
    extra = copied / device.bytes_per_second + (batch * device.batch_seconds if batch > 1 else 0.0)
    return Cost(flops, moved + copied, work + extra)


def steps_cost(steps: Iterable[Step], sizes: Sizes, device: DeviceModel, itemsize: int) -> Cost:
    """Cost of a list of steps."""
    total = Cost(0, 0, 0.0)
    for step in steps:
        total += step_cost(step, sizes, device, itemsize)
    return total


def plan_cost(plan: LinearPlan, rows: int, device: DeviceModel, itemsize: int = 4, *, training: bool = True) -> Cost:
    """Cost of a linear plan at ``rows`` rows: forward, and with ``training`` also every gradient."""
    total = Cost(0, 0, 0.0)
    for program, sizes in ((plan.merge, plan.core_sizes), (plan.apply, {**plan.operand_sizes, "t": rows})):
        steps = program.steps + (program.backward(program.input_names) if training else ())
        total += steps_cost(steps, sizes, device, itemsize)
    return total


def saved_bytes(plan: LinearPlan, rows: int, itemsize: int = 4) -> int:
    """Bytes of the tensors kept between forward and backward, without x and the packed cores themselves."""
    sizes = {**plan.operand_sizes, "t": rows}
    named = {t.name: t for t in plan.operands}
    named |= {s.out.name: s.out for s in plan.apply.steps}
    kept = [named[n] for n in plan.apply.saved(plan.apply.input_names) if n in named]
    total = sum(t.numel(sizes) for t in kept)
    made = {s.out.name: s.out for s in plan.merge.steps}
    inner = set(plan.merge.saved(plan.merge.input_names)) & set(made)
    return itemsize * (total + sum(made[n].numel(plan.core_sizes) for n in inner))

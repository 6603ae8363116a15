"""When a graph is one tensor-train linear or lookup: run it by one call of C++ each way, without an inner compiler."""

from __future__ import annotations

from dataclasses import dataclass

from comera_compile.planning.choose import ranked_plans
from comera_compile.planning.cost import plan_cost
from comera_compile.planning.device_model import DeviceModel
from comera_compile.planning.linear_plan import LinearPlan

# What AOTAutograd and Inductor put around a forward and a backward, however small: measured (docs/log.md).
WRAPPED_SECONDS = 1.1e-4


@dataclass(frozen=True)
class AloneLinear:
    """The linear that is the only operation of a graph.

    Args:
        plan: merges both halves.
        scale: of the packed vector.
        x, bias, packed: positions among the graph's inputs; without a bias None.
    """

    plan: LinearPlan
    scale: float
    x: int
    bias: int | None
    packed: int

    def saved_elements(self, rows: int) -> int:
        """What is kept between forward and backward, inputs apart: both halves and the bond."""
        sizes = self.plan.operand_sizes
        return sizes["r"] * (rows + sizes["m"] + sizes["n"])


@dataclass(frozen=True)
class AloneLookup:
    """The lookup that is the only operation of a graph.

    Args:
        layout: of the table, ``TTShape.encode()``.
        ids, packed: positions among the graph's inputs.
    """

    layout: str
    ids: int
    packed: int

    def saved_elements(self, rows: int) -> int:
        """None: ids and packed vector are inputs, values of prefixes are made again."""
        return 0


Alone = AloneLinear | AloneLookup


def plan_alone(
    chosen: LinearPlan, rows: int | None, device: DeviceModel, threads: int, itemsize: int, *, training: bool
) -> LinearPlan | None:
    """The plan with both halves merged if, run alone, it is predicted to take no longer than the chosen one compiled.

    Args:
        chosen: plan of a layer on a CPU.
        rows: that it was chosen for, or None for a range of rows, in which nothing else than ``chosen`` is known.
        device: figures of the CPU.
        threads, itemsize: of the layer.
        training: whether gradients are taken.
    """
    if chosen.merged or rows is None:
        plan = chosen
    else:
        kind = "cpu", threads, itemsize, training
        plan = next(p for p in ranked_plans(chosen.shape, chosen.contracts, *kind, rows, device) if p.merged)
        costs = [plan_cost(p, rows, device, itemsize, training=training).seconds for p in (plan, chosen)]
        plan = plan if costs[0] <= costs[1] + WRAPPED_SECONDS else chosen
    takes = device.kernels is not None and plan.merged and device.kernels.takes(plan.bond, itemsize)
    return plan if takes else None

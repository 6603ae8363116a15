"""Pass 2: choose a plan for every tagged use, by its rows. On a symbolic number of rows the choice becomes a guard."""

from __future__ import annotations

from torch import fx

from comera_compile import torch_private
from comera_compile.calibrate import calibrated_model
from comera_compile.passes.graph_nodes import example, graph_modules, rows_of
from comera_compile.planning.choose import plans_by_rows
from comera_compile.planning.cost import Objective
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.lookup_plan import LookupPlan
from comera_compile.planning.uses import PLAN, USE, TTUse
from comera_compile.tt.marker import decode


def plan_contractions(
    graph_module: fx.GraphModule, *, threads: int, training: bool, objective: Objective = "time"
) -> fx.GraphModule:
    """Tag every use with its plan (``node.meta["comera_plan"]``).

    Args:
        graph_module: a graph tagged by ``find_tt_weights``.
        threads: threads of the CPU that will run it.
        training: whether gradients will be taken.
        objective: what plans are chosen by; times are those of this device's calibration where there is one.
    """
    for module in graph_modules(graph_module):
        for node in module.graph.nodes:
            use: TTUse | None = node.meta.get(USE)
            if use is not None:
                node.meta[PLAN] = _plan(use, threads, training, objective)
    return graph_module


def _plan(use: TTUse, threads: int, training: bool, objective: Objective) -> LinearPlan | LookupPlan:
    shape = decode(use.layout).with_scale(1.0)
    packed = example(use.packed)
    if use.kind == "embedding":
        return LookupPlan(shape)
    rows = rows_of(use.x)
    dtype, device_type = example(use.x).dtype, packed.device.type
    trained = training and packed.requires_grad
    device = calibrated_model(device_type, threads, dtype)
    ranges = plans_by_rows(shape, use.contracts, device_type, threads, dtype.itemsize, trained, device, objective)
    for candidate in ranges[:-1]:
        if torch_private.holds(rows <= candidate.up_to):
            return candidate.plan
    return ranges[-1].plan

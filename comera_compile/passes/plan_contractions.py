"""Pass 2: choose a plan for every tagged use, by its rows. On a symbolic number of rows the choice becomes a guard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from comera_compile import torch_private
from comera_compile.passes.graph_nodes import example, graph_modules, rows_of
from comera_compile.planning.choose import plans_by_rows
from comera_compile.planning.common_ranges import LayerRanges, common_ranges
from comera_compile.planning.cost import Objective, plan_cost
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.lookup_plan import LookupPlan
from comera_compile.planning.row_ranges import RowRange
from comera_compile.planning.uses import PLAN, USE, TTUse
from comera_compile.tt.marker import decode
from comera_compile.tuned_plans import Layer, ranges_for


def plan_contractions(
    graph_module: fx.GraphModule, *, threads: int, training: bool, objective: Objective = "time"
) -> fx.GraphModule:
    """Tag every use with its plan (``node.meta["comera_plan"]``).

    Args:
        graph_module: a graph tagged by ``find_tt_weights``.
        threads: threads of the CPU that will run it.
        training: whether gradients will be taken.
        objective: what plans are chosen by; times are those of this device's calibration where there is one, and plans
            that were tuned on it come before predicted ones.
    """
    for module in graph_modules(graph_module):
        nodes = [node for node in module.graph.nodes if isinstance(node.meta.get(USE), TTUse)]
        linears = {n: layer_of(n.meta[USE], threads=threads, training=training) for n in nodes if _is_linear(n)}
        for node, ranges in _ranges(linears, objective).items():
            node.meta[PLAN] = _at(rows_of(node.meta[USE].x), ranges)
        for node in nodes:
            if not _is_linear(node):
                node.meta[PLAN] = LookupPlan(decode(node.meta[USE].layout).with_scale(1.0))
    return graph_module


def layer_of(use: TTUse, *, threads: int, training: bool) -> Layer:
    """What the plan of a linear use depends on besides its rows."""
    packed, x = example(use.packed), example(use.x)
    shape = decode(use.layout).with_scale(1.0)
    trained = training and packed.requires_grad
    return Layer(shape, use.contracts, packed.device.type, threads, x.dtype, trained)


def _is_linear(node: fx.Node) -> bool:
    return bool(node.meta[USE].kind == "linear")


def _at(rows: Any, ranges: Sequence[RowRange]) -> LinearPlan:
    for candidate in ranges[:-1]:
        if torch_private.holds(rows <= candidate.up_to):
            return candidate.plan
    return ranges[-1].plan


def _ranges(layers: Mapping[fx.Node, Layer], objective: Objective) -> dict[fx.Node, tuple[RowRange, ...]]:
    """Ranges of each linear use; those of one dynamic number of rows share their limits, each of which is a guard."""
    found: dict[fx.Node, tuple[RowRange, ...]] = {}
    groups: dict[str, dict[Layer, list[fx.Node]]] = {}
    for node, layer in layers.items():
        rows = rows_of(node.meta[USE].x)
        if isinstance(rows, int):
            found[node] = _own_ranges(layer, rows, objective)
        else:
            groups.setdefault(str(rows), {}).setdefault(layer, []).append(node)
    for uses in groups.values():
        own = [LayerRanges(_own_ranges(layer, None, objective), partial(_cost, layer, objective)) for layer in uses]
        for nodes, ranges in zip(uses.values(), common_ranges(own), strict=True):
            found |= dict.fromkeys(nodes, ranges)
    return found


def _own_ranges(layer: Layer, rows: int | None, objective: Objective) -> tuple[RowRange, ...]:
    kind = layer.device_type, layer.threads, layer.dtype.itemsize, layer.training
    ranges = plans_by_rows(layer.shape, layer.contracts, *kind, layer.device, objective, rows)
    # Tuned plans are those that take the least time.
    return ranges_for(layer, ranges, rows) if objective == "time" else ranges


def _cost(layer: Layer, objective: Objective, plan: LinearPlan, rows: int) -> float:
    return plan_cost(plan, rows, layer.device, layer.dtype.itemsize, training=layer.training).by(objective)

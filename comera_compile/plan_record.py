"""Write down which plan each weight got in a compiled graph, for ``comera.report`` and ``comera.explain``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from comera_compile import ledger, torch_private
from comera_compile.calibrate import calibrated_model
from comera_compile.ledger import PlannedUse
from comera_compile.planning.cost import dense_cost, plan_cost, saved_bytes
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.uses import ALONE, ATTEND, BRIDGE, INSIDE, PLAN, USE, AttendUse, BridgeUse, TTUse
from comera_compile.tt.marker import is_marker

REBUILT = "rebuild W for"


def record_plans(graph_module: fx.GraphModule) -> list[str]:
    """Record the plans of a graph that ``plan_contractions`` has tagged.

    Returns:
        A line for each weight with a use that has no plan: its dense matrix is rebuilt in every call.
    """
    uses: dict[int, tuple[torch.Tensor, list[PlannedUse]]] = {}
    for parameter, use in _planned(graph_module, {}):
        uses.setdefault(id(parameter), (parameter, []))[1].append(use)
    for parameter, planned in uses.values():
        ledger.record_uses(parameter, planned)
    return [_name(p) + ": " + u.plan for p, planned in uses.values() for u in planned if u.plan.startswith(REBUILT)]


def _name(parameter: torch.Tensor) -> str:
    known = ledger.recall(parameter)
    return "a weight" if known is None else known.decision.name


def _planned(module: fx.GraphModule, outer: dict[fx.Node, Any]) -> list[tuple[torch.Tensor, PlannedUse]]:
    """Pairs of a real parameter and one use of it; ``outer`` maps this graph's inputs to real objects in a body."""
    values = outer or {n: torch_private.placeholder_value(n) for n in module.graph.nodes if n.op == "placeholder"}
    found: list[tuple[torch.Tensor, PlannedUse]] = []
    layers = _layers_by_plan(module)
    for node in module.graph.nodes:
        use = node.meta.get(USE)
        if isinstance(use, TTUse) and isinstance(values.get(use.packed), torch.Tensor):
            planned = _describe(use, node.meta[PLAN], len(layers.get(node.meta[PLAN], ())))
            found.append((values[use.packed], replace(planned, plan=planned.plan + _bridged(node))))
        if is_marker(node) and isinstance(values.get(node.args[0]), torch.Tensor):
            rebuilt = (PlannedUse(f"{REBUILT} {operation}", "any", None, None) for operation in _unplanned(node))
            found += [(values[node.args[0]], use) for use in rebuilt]
        found += _inside(node, module, values)
    return found


def _bridged(node: fx.Node) -> str:
    """What is said of a use that runs together with another one, or alone."""
    if ALONE in node.meta:
        return ", alone: without the inner compiler"
    if BRIDGE in node.meta:
        bridge: BridgeUse = node.meta[BRIDGE]
        return f", from bond to bond through {bridge.activation}{' and dropout' if bridge.dropout else ''}"
    if ATTEND in node.meta:
        block: AttendUse = node.meta[ATTEND]
        return f", from bond to bond through attention{' and dropout' if block.dropout else ''}"
    return ", its output never stored" if INSIDE in node.meta else ""


def _layers_by_plan(module: fx.GraphModule) -> dict[LinearPlan, set[fx.Node]]:
    """Weights of one plan: their cores are merged together. A rebuilt W is made for each on its own."""
    layers: dict[LinearPlan, set[fx.Node]] = {}
    for node in module.graph.nodes:
        plan = node.meta.get(PLAN)
        if isinstance(plan, LinearPlan) and not plan.dense:
            layers.setdefault(plan, set()).add(node.meta[USE].packed)
    return layers


def _unplanned(marker: fx.Node) -> list[str]:
    """Operations that use the dense matrix without a plan, directly or through a transpose."""
    users = [u for u in marker.users if USE not in u.meta and not (u.users and all(USE in v.meta for v in u.users))]
    return sorted({str(getattr(u.target, "__name__", u.target)) for u in users})


def _inside(node: fx.Node, module: fx.GraphModule, values: dict[fx.Node, Any]) -> list[tuple[torch.Tensor, PlannedUse]]:
    """Uses in the body of a higher-order op."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    names = [str(a.target) for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    inputs = [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr"]
    body = getattr(module, names[0], None) if len(names) == 1 else None
    if not isinstance(body, fx.GraphModule):
        return []
    inner = [n for n in body.graph.nodes if n.op == "placeholder"]
    return _planned(body, {i: values.get(o) for i, o in zip(inner, inputs, strict=False)})


def _describe(use: TTUse, plan: Any, layers: int) -> PlannedUse:
    """``layers``: how many weights of this plan are merged together; 0 counts as one alone."""
    rows = use.x.meta["example_value"].shape[:-1] if use.kind == "linear" else use.x.meta["example_value"].shape
    count: Any = 1
    for size in rows:
        count = count * size
    if not isinstance(plan, LinearPlan):
        return PlannedUse(plan.name, str(count), None, None)
    hint = torch_private.size_hint(count)
    x, packed = use.x.meta["example_value"], use.packed.meta["example_value"]
    itemsize = x.dtype.itemsize
    device = calibrated_model(x.device.type, torch.get_num_threads(), x.dtype)
    training = torch.is_grad_enabled() and packed.requires_grad
    shared = plan_cost(plan, hint, device, itemsize, training=training, layers=max(1, layers))
    dense = dense_cost(plan.shape, hint, device, itemsize, training=training, contracts=plan.contracts)
    flops, saved = plan_cost(plan, hint, device, itemsize).flops, saved_bytes(plan, hint, itemsize)
    return PlannedUse(plan.name, str(count), flops, saved, hint, shared.seconds, dense.seconds)

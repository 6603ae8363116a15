"""Pass: a graph whose only operation is one tensor-train linear or lookup is tagged to run alone."""

from __future__ import annotations

import torch
from torch import fx

from comera_compile import torch_private
from comera_compile.passes.graph_nodes import example, rows_of
from comera_compile.passes.plan_contractions import layer_of
from comera_compile.planning.alone import AloneLinear, AloneLookup, plan_alone
from comera_compile.planning.cost import Objective
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.lookup_plan import LookupPlan
from comera_compile.planning.uses import ALONE, PLAN, USE, TTUse
from comera_compile.tt.marker import decode

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def find_alone(
    graph_module: fx.GraphModule, *, threads: int, training: bool, objective: Objective = "time"
) -> fx.GraphModule:
    """Tag the use (``node.meta["comera_alone"]``), and give a linear one a plan with both halves merged.

    Left alone: anything but dense tensors on a CPU, float32 or float64, a packed vector that is frozen while other
    gradients are taken; of linear uses autocast, unequal dtypes, and objectives other than time unless the plan merges
    both halves anyway.
    """
    node = _only_operation(graph_module.graph)
    if node is None or not _is_plain(node, training):
        return graph_module
    if isinstance(node.meta.get(PLAN), LinearPlan):
        _tag_linear(node, threads=threads, training=training, objective=objective)
    elif isinstance(node.meta.get(PLAN), LookupPlan):
        ids, packed = _positions(node)
        node.meta[ALONE] = AloneLookup(node.meta[USE].layout, ids, packed)
    return graph_module


def _tag_linear(node: fx.Node, *, threads: int, training: bool, objective: Objective) -> None:
    use: TTUse = node.meta[USE]
    layer, rows = layer_of(use, threads=threads, training=training), rows_of(use.x)
    known = rows if isinstance(rows, int) and objective == "time" else None
    itemsize = layer.dtype.itemsize
    plan = plan_alone(node.meta[PLAN], known, layer.device, threads, itemsize, training=layer.training)
    if plan is not None:
        x, packed, *bias = _positions(node)
        scale = decode(use.layout).scale
        node.meta[PLAN], node.meta[ALONE] = plan, AloneLinear(plan, scale, x, bias[0] if bias else None, packed)


def _positions(node: fx.Node) -> list[int]:
    """Of x or ids, of the packed vector and of the bias, if there is one, among the graph's inputs."""
    inputs = node.graph.find_nodes(op="placeholder", sort=True)
    return [inputs.index(i) for i in _operands(node)]


def _operands(node: fx.Node) -> list[fx.Node]:
    use: TTUse = node.meta[USE]
    return [use.x, use.packed, *([] if use.bias is None else [use.bias])]


def _only_operation(graph: fx.Graph) -> fx.Node | None:
    """The use of a packed weight that is all a graph computes: from its inputs, for its only output."""
    [output] = graph.find_nodes(op="output")
    results = output.args[0]
    node = results[0] if isinstance(results, (tuple, list)) and len(results) == 1 else None
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get(USE), TTUse):
        return None
    use: TTUse = node.meta[USE]
    of_weight = {use.packed}
    for other in graph.nodes:
        if other.op in ("placeholder", "output") or other is node:
            continue
        if not other.all_input_nodes or not of_weight.issuperset(other.all_input_nodes):
            return None
        of_weight.add(other)  # the marker and its transposes, which nothing else reads
    return node if all(i.op == "placeholder" for i in _operands(node)) else None


def _is_plain(node: fx.Node, training: bool) -> bool:
    use: TTUse = node.meta[USE]
    values = [example(i) for i in _operands(node)]
    real = [torch_private.placeholder_value(i) for i in _operands(node)]
    x, packed = values[0], values[1]
    on_cpu = all(v.device.type == "cpu" and v.layout == torch.strided for v in values)
    plain = all(type(r) in _PLAIN and not torch_private.is_transformed(r) for r in real if isinstance(r, torch.Tensor))
    # Without gradients of the halves most of what the backward does would be for nothing.
    trained = packed.requires_grad or not training or not any(v.requires_grad for v in values)
    same = use.kind == "embedding" or all(v.dtype == x.dtype for v in values)
    exact = packed.dtype in (torch.float32, torch.float64)
    cast = use.kind == "linear" and torch.is_autocast_enabled("cpu")
    return on_cpu and same and plain and trained and exact and not cast and not torch_private.traces_backward()

"""Pass: a graph whose only operation is one tensor-train linear is tagged to run alone."""

from __future__ import annotations

import torch
from torch import fx

from comera_compile import torch_private
from comera_compile.passes.graph_nodes import example, rows_of
from comera_compile.passes.plan_contractions import layer_of
from comera_compile.planning.alone import Alone, plan_alone
from comera_compile.planning.cost import Objective
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.uses import ALONE, PLAN, USE, TTUse
from comera_compile.tt.marker import decode

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def find_alone(
    graph_module: fx.GraphModule, *, threads: int, training: bool, objective: Objective = "time"
) -> fx.GraphModule:
    """Tag the linear use (``node.meta["comera_alone"]``) and give it a plan with both halves merged.

    Left alone: anything but dense tensors of one dtype on a CPU, autocast, a packed vector that is frozen while other
    gradients are taken, objectives other than time unless the plan merges both halves anyway.
    """
    node = _only_operation(graph_module.graph)
    if node is None or not isinstance(node.meta.get(PLAN), LinearPlan) or not _is_plain(node, training):
        return graph_module
    use: TTUse = node.meta[USE]
    layer, rows = layer_of(use, threads=threads, training=training), rows_of(use.x)
    known = rows if isinstance(rows, int) and objective == "time" else None
    itemsize = layer.dtype.itemsize
    plan = plan_alone(node.meta[PLAN], known, layer.device, threads, itemsize, training=layer.training)
    if plan is not None:
        inputs = graph_module.graph.find_nodes(op="placeholder", sort=True)
        x, packed = inputs.index(use.x), inputs.index(use.packed)
        bias = None if use.bias is None else inputs.index(use.bias)
        node.meta[PLAN], node.meta[ALONE] = plan, Alone(plan, decode(use.layout).scale, x, bias, packed)
    return graph_module


def _only_operation(graph: fx.Graph) -> fx.Node | None:
    """The linear use that is all a graph computes: from its inputs, for its only output."""
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
    inputs = (use.x, use.packed) if use.bias is None else (use.x, use.packed, use.bias)
    return node if use.kind == "linear" and all(i.op == "placeholder" for i in inputs) else None


def _is_plain(node: fx.Node, training: bool) -> bool:
    use: TTUse = node.meta[USE]
    inputs = [use.x, use.packed, *([] if use.bias is None else [use.bias])]
    values, real = [example(i) for i in inputs], [torch_private.placeholder_value(i) for i in inputs]
    x, packed = values[0], values[1]
    same = all(v.dtype == x.dtype and v.device.type == "cpu" and v.layout == torch.strided for v in values)
    plain = all(type(r) in _PLAIN and not torch_private.is_transformed(r) for r in real if isinstance(r, torch.Tensor))
    # Without gradients of the halves most of what the backward does would be for nothing.
    trained = packed.requires_grad or not training or not any(v.requires_grad for v in values)
    exact = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    return same and plain and trained and exact and not torch_private.traces_backward()

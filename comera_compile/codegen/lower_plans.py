"""Last pass: planned uses become calls of the functions that run them; markers left over rebuild the dense matrix."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from comera_compile.codegen.apply_bridge import apply_bridge
from comera_compile.codegen.attention import attention_by_products
from comera_compile.codegen.attention_block import apply_attention
from comera_compile.codegen.lookup import ttm_lookup
from comera_compile.codegen.run_plan import apply_operands, merge_cores
from comera_compile.planning.attention_plan import AttentionPlan
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.uses import ATTEND, BRIDGE, BY_PLAN, INSIDE, PLAN, USE, AttendUse, BridgeUse
from comera_compile.tt.marker import decode, is_marker
from comera_compile.tt.packing import to_dense


def rebuild_dense(packed: torch.Tensor, layout: str) -> torch.Tensor:
    """The dense matrix as plain steps, which Inductor can see into (the marker op is opaque to it)."""
    with torch.autocast(packed.device.type, enabled=False):
        return to_dense(packed, decode(layout))


# Functions that a lowered graph calls: what AOTAutograd's disk cache has to know (see torch_private.cacheable).
GRAPH_FUNCTIONS = (
    merge_cores,
    apply_operands,
    apply_bridge,
    apply_attention,
    ttm_lookup,
    rebuild_dense,
    attention_by_products,
)
_OURS = (*GRAPH_FUNCTIONS, torch.unbind, operator.getitem)


def lower_plans(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Replace every planned node in the graph and in the bodies of its higher-order ops."""
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            _lower(module)
    return graph_module


def _lower(module: fx.GraphModule) -> None:
    graph = module.graph
    planned = [n for n in graph.nodes if PLAN in n.meta]
    linears = [n for n in planned if isinstance(n.meta[PLAN], LinearPlan)]
    operands = _merge_all(graph, linears)
    replaced: dict[fx.Node, fx.Node] = {}
    for node in planned:
        if INSIDE in node.meta:
            continue
        with graph.inserting_before(node):
            new = _call(graph, node, operands, replaced)
        replaced[node] = new
        new.meta = _by_plan(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        for inner in _run_inside(node):
            graph.erase_node(inner)
    _drop_unread(graph)
    for marker in filter(is_marker, list(graph.nodes)):
        with graph.inserting_before(marker):
            dense = graph.call_function(rebuild_dense, marker.args)
        dense.meta = dict(marker.meta)
        marker.replace_all_uses_with(dense)
        graph.erase_node(marker)
    graph.lint()
    module.recompile()


def _drop_unread(graph: fx.Graph) -> None:
    """Not by torch's ``eliminate_dead_code``: that goes on to bodies of higher-order ops, and there drops writes."""
    for node in reversed(graph.nodes):
        if not node.users and not _may_write(node):
            graph.erase_node(node)


def _may_write(node: fx.Node) -> bool:
    """Whether a node that nothing reads has to stay. Dynamo's graph writes in place, which looks like dead code.

    Surely without effect are what this pass puts in, markers, and what has a marker for its only input: writing to one
    has been refused.
    """
    ours = node.target in _OURS or is_marker(node)
    reads_weight = bool(node.all_input_nodes) and all(map(is_marker, node.all_input_nodes))
    return node.op not in ("call_function", "call_method") or not (ours or reads_weight)


def _call(
    graph: fx.Graph, node: fx.Node, operands: dict[fx.Node, list[fx.Node]], replaced: dict[fx.Node, fx.Node]
) -> fx.Node:
    """The call that runs a node's plan."""
    use, plan = node.meta[USE], node.meta[PLAN]
    if isinstance(plan, AttentionPlan):
        inputs = [replaced.get(n, n) for n in (use.query, use.key, use.value)]
        return graph.call_function(attention_by_products, (*inputs, plan.causal, plan.scale))
    if BRIDGE in node.meta:
        return _call_bridge(graph, node, operands, replaced)
    if ATTEND in node.meta:
        return _call_attention(graph, node, operands, replaced)
    x, bias = (replaced.get(n, n) for n in (use.x, use.bias))  # each may itself have been a planned use
    if isinstance(plan, LinearPlan):
        return graph.call_function(apply_operands, (plan.encode(), x, bias, *operands[node]))
    return graph.call_function(ttm_lookup, (use.packed, x, use.layout))


def _run_inside(node: fx.Node) -> list[fx.Node]:
    """What runs as part of a node's call, readers before what they read."""
    if ATTEND in node.meta:
        block: AttendUse = node.meta[ATTEND]
        return [*block.between, *block.projections]
    bridge: BridgeUse | None = node.meta.get(BRIDGE)
    return [] if bridge is None else [*bridge.between, *bridge.firsts]


def _call_bridge(
    graph: fx.Graph, node: fx.Node, operands: dict[fx.Node, list[fx.Node]], replaced: dict[fx.Node, fx.Node]
) -> fx.Node:
    bridge: BridgeUse = node.meta[BRIDGE]
    rows = tuple(replaced.get(n, n) for n in (first.meta[USE].x for first in bridge.firsts))
    texts, biases, flat = _layers([*bridge.firsts, node], operands, replaced)
    return graph.call_function(apply_bridge, (bridge.activation, bridge.dropout, texts, rows, biases, *flat))


def _call_attention(
    graph: fx.Graph, node: fx.Node, operands: dict[fx.Node, list[fx.Node]], replaced: dict[fx.Node, fx.Node]
) -> fx.Node:
    block: AttendUse = node.meta[ATTEND]
    settings = block.heads, block.kv_heads, block.causal, block.scale
    rows = tuple(replaced.get(n, n) for n in block.rows)
    texts, biases, flat = _layers([*block.projections, node], operands, replaced)
    mask = None if block.mask is None else replaced.get(block.mask, block.mask)
    form = block.widths, block.sides, block.flat
    return graph.call_function(apply_attention, (settings, block.dropout, form, texts, rows, biases, mask, *flat))


def _layers(
    layers: list[fx.Node], operands: dict[fx.Node, list[fx.Node]], replaced: dict[fx.Node, fx.Node]
) -> tuple[tuple[Any, ...], ...]:
    """Plans, biases and operands of linear uses that run together."""
    biases = tuple(replaced.get(n, n) for n in (layer.meta[USE].bias for layer in layers))
    texts = tuple(layer.meta[PLAN].encode() for layer in layers)
    return texts, biases, tuple(operand for layer in layers for operand in operands[layer])


def _merge_all(graph: fx.Graph, linears: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Merge nodes, one for all weights of equal plan, dtype and device; returns the operands of each use."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in linears:
        use, plan = node.meta[USE], node.meta[PLAN]
        value = use.packed.meta["example_value"]
        # A rebuilt W is as large as the dense weight: one at a time, where it is needed. A packed vector that the graph
        # computes may only exist after uses of others, and one that it works on may be another after some uses.
        settled = use.packed.op == "placeholder" and all(map(is_marker, use.packed.users))
        alone = node if plan.dense or not settled else None
        # Uses of one weight share its operands.
        groups[plan, value.dtype, value.device, value.requires_grad, alone][use.packed, use.layout].append(node)
    operands: dict[fx.Node, list[fx.Node]] = {}
    order = {n: k for k, n in enumerate(graph.nodes)}
    for (plan, _, _, _, alone), uses in groups.items():
        last = max((packed for packed, _ in uses), key=order.__getitem__)
        operands |= _merge_group(graph, last if alone is None else alone.prev, plan, uses)
    return operands


def _merge_group(
    graph: fx.Graph, after: fx.Node, plan: LinearPlan, uses: dict[tuple[Any, ...], list[fx.Node]]
) -> dict[fx.Node, list[fx.Node]]:
    """One merge call, unbound over its layers (unbind's gradient is one stack; indexing's would be a sum of zeros)."""
    scales = tuple(decode(layout).scale for _, layout in uses)
    with graph.inserting_after(_last_placeholder(graph, after)):
        merged = graph.call_function(merge_cores, (plan.encode(), scales, *(packed for packed, _ in uses)))
        merged.meta = _by_plan({})
    operands: list[list[fx.Node]] = [[] for _ in uses]
    previous = merged
    for position in range(len(plan.operands)):
        with graph.inserting_after(previous):
            stacked = graph.call_function(operator.getitem, (merged, position))
        with graph.inserting_after(stacked):
            previous = layers = graph.call_function(torch.unbind, (stacked,))
        for k, ours in enumerate(operands):
            with graph.inserting_after(previous):
                previous = graph.call_function(operator.getitem, (layers, k))
            ours.append(previous)
    return {node: ours for nodes, ours in zip(uses.values(), operands, strict=True) for node in nodes}


def _by_plan(meta: dict[str, Any]) -> dict[str, Any]:
    """A node's meta with the mark that a plan makes its result (see ``passes/count_saved.py``)."""
    return {**meta, "custom": {**meta.get("custom", {}), BY_PLAN: True}}


def _last_placeholder(graph: fx.Graph, after: fx.Node) -> fx.Node:
    """Nodes must not be put between placeholders."""
    while after.op == "placeholder" and after.next.op == "placeholder":
        after = after.next
    return after

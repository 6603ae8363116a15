"""Pass 3: linear, pointwise function, dropout or not, linear. What is wide between two bonds is then never stored."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from comera_compile.passes.graph_nodes import argument, example, graph_modules
from comera_compile.passes.runs_together import may_begin, may_end, same_sizes, undisturbed
from comera_compile.planning.uses import BRIDGE, INSIDE, USE, Activation, BridgeUse

_FUNCTIONS: dict[Any, Activation] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.silu: "silu",
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    F.tanh: "tanh",
}
_METHODS: dict[str, Activation] = {"relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}
_GELU = (F.gelu, torch._C._nn.gelu)
_PRODUCTS = (torch.mul, operator.mul)
# With the name of the argument that switches it on.
_DROPOUT: dict[Any, str] = {F.dropout: "training", torch.dropout: "train"}


def find_bridges(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Tag the second linear of each chain (``node.meta["comera_bridge"]``) and the first ones as inside of it.

    Left alone: what lies between has another reader, something between writes in place or switches gradients or
    autocast, a gate is broadcast, a half is not merged, of another dtype, or not on a CPU.
    """
    for module in graph_modules(graph_module):
        for node in module.graph.nodes:
            bridge = _bridge(node) if may_end(node) else None
            if bridge is not None:
                node.meta[BRIDGE] = bridge
                for first in bridge.firsts:
                    first.meta[INSIDE] = True
    return graph_module


def _bridge(node: fx.Node) -> BridgeUse | None:
    x, dropout, between = _without_dropout(node.meta[USE].x)
    if x is None:
        return None
    if x.target in _PRODUCTS and len(x.args) == 2 and not x.kwargs:
        for one, other in (x.args, x.args[::-1]):
            found = _activated(one)
            if found is not None and may_begin(other) and same_sizes(example(found[1]).shape, example(other).shape):
                function, gate = found
                return _checked(node, BridgeUse(other, gate, function, dropout, (*between, x, one)))
        return None
    found = _activated(x)
    if found is None:
        return None
    function, first = found
    return _checked(node, BridgeUse(first, None, function, dropout, (*between, x)))


def _without_dropout(x: fx.Node) -> tuple[Any, float, tuple[fx.Node, ...]]:
    """What dropout is applied to, its probability, and its node; x itself where it is none.

    None where x has another reader, or where it is dropout in place or with a probability that is not known.
    """
    if len(x.users) != 1:
        return None, 0.0, ()
    if x.target not in _DROPOUT:
        return x, 0.0, ()
    inner, probability = argument(x, 0, "input"), argument(x, 1, "p", 0.5)
    training, in_place = argument(x, 2, _DROPOUT[x.target], True), argument(x, 3, "inplace", False)
    known = isinstance(probability, (int, float)) and isinstance(training, bool) and in_place is False
    if not known or not isinstance(inner, fx.Node) or len(inner.users) != 1:
        return None, 0.0, ()
    return inner, float(probability) if training else 0.0, (x,)


def _activated(node: Any) -> tuple[Activation, fx.Node] | None:
    """The function that makes a node from a linear use, and that use."""
    if not isinstance(node, fx.Node) or len(node.users) != 1 or not node.args:
        return None
    inner, function = node.args[0], _function(node)
    return (function, inner) if function is not None and isinstance(inner, fx.Node) and may_begin(inner) else None


def _function(node: fx.Node) -> Activation | None:
    if node.kwargs.get("out") is not None:
        return None
    if node.target in _GELU:
        kinds: dict[str, Activation] = {"none": "gelu", "tanh": "gelu_tanh"}
        return kinds.get(argument(node, 1, "approximate", "none"))
    return _METHODS.get(str(node.target)) if node.op == "call_method" else _FUNCTIONS.get(node.target)


def _checked(node: fx.Node, bridge: BridgeUse) -> BridgeUse | None:
    """The bridge, unless what runs between its ends has an effect."""
    return bridge if undisturbed(bridge.firsts, node, (*bridge.firsts, *bridge.between)) else None

"""Find the dense parameters of a traced graph and what it uses them for, into the bodies of higher-order ops too."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from comera_compile import torch_private
from comera_compile.decide import Found

_LINEAR: tuple[Any, ...] = (F.linear, torch._C._nn.linear, torch.addmm, torch.matmul, torch.mm, operator.matmul)
_TRANSPOSES = ("t", "transpose", "permute", "T", "mT")


def find_dense_parameters(graph_module: fx.GraphModule) -> list[Found]:
    """Parameters among the graph's inputs with more than one dimension, each once, with their use."""
    found: dict[int, Found] = {}
    for node in graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        value = torch_private.placeholder_value(node)
        if isinstance(value, nn.Parameter) and value.dim() > 1:
            found.setdefault(id(value), Found(value, use_of(node, graph_module)))
    return list(found.values())


def use_of(node: fx.Node, graph_module: fx.GraphModule) -> str:
    """``"linear"`` or ``"embedding"`` if every use is one of these, otherwise the name of an operation that is not."""
    uses = [_use(user, node, graph_module) for user in node.users]
    others = [u for u in uses if u not in ("linear", "embedding")]
    if others or not uses:
        return (others or ["nothing"])[0]
    return "embedding" if "embedding" in uses else "linear"


def _use(user: fx.Node, node: fx.Node, graph_module: fx.GraphModule) -> str:
    if user.target in _LINEAR or (user.op == "call_method" and user.target in ("matmul", "mm", "__matmul__")):
        return "linear"
    if user.target is F.embedding:
        return "embedding"
    if user.target is getattr or user.target in _TRANSPOSES:
        return use_of(user, graph_module)
    body, position = _body(user, node, graph_module)
    if body is not None:
        inner = [n for n in body.graph.nodes if n.op == "placeholder"]
        return use_of(inner[position], body)
    return str(getattr(user.target, "__name__", user.target))


def _body(user: fx.Node, node: fx.Node, graph_module: fx.GraphModule) -> tuple[fx.GraphModule | None, int]:
    """The sub-graph that a higher-order op (activation checkpointing) runs, and which of its inputs ``node`` is."""
    if not isinstance(user.target, torch._ops.HigherOrderOperator):
        return None, 0
    bodies = [a for a in user.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    inputs = [a for a in user.args if isinstance(a, fx.Node) and a.op != "get_attr"]
    if len(bodies) != 1 or node not in inputs:
        return None, 0
    body = getattr(graph_module, str(bodies[0].target), None)
    return (body, inputs.index(node)) if isinstance(body, fx.GraphModule) else (None, 0)

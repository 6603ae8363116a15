"""Small questions to a traced graph that several passes ask."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

_IN_PLACE_OPERATORS = [
    getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
]


def graph_modules(root: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph module and every one inside it: bodies of higher-order ops such as activation checkpointing."""
    for module in root.modules():
        if isinstance(module, fx.GraphModule):
            yield module


def example(node: fx.Node) -> torch.Tensor:
    """The fake tensor that Dynamo traced for a node."""
    value: torch.Tensor = node.meta["example_value"]
    return value


def rows_of(x: fx.Node) -> Any:
    """Rows of an activation: the product of all dimensions but the last (an int or a symbolic one)."""
    return math.prod(example(x).shape[:-1])


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def called_name(node: fx.Node) -> str:
    """Name of the method or function that a node calls."""
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def writes(node: fx.Node) -> bool:
    """Whether an operation writes to its first argument."""
    name = called_name(node)
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    told = bool(argument(node, _inplace_position(node.target), "inplace"))  # F.relu(x, inplace=True)
    return in_place or told or node.target is operator.setitem or node.target in _IN_PLACE_OPERATORS


def has_effect(node: fx.Node) -> bool:
    """Whether an operation may write to something older: arguments, ``out``, or in the graphs that it runs."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        owner = node.graph.owning_module
        bodies = [getattr(owner, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
        graphs = [body.graph for body in bodies if isinstance(body, fx.GraphModule)]
        return not graphs or any(has_effect(inner) for graph in graphs for inner in graph.nodes)
    mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return mutable or writes(node) or node.kwargs.get("out") is not None


@cache
def _inplace_position(function: Any) -> int:
    """Where a Python function has its argument ``inplace``; behind all arguments where it has none."""
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return names.index("inplace") if "inplace" in names else sys.maxsize

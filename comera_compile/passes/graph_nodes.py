"""Small questions to a traced graph that several passes ask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


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

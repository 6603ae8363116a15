"""A pass on the joint graph: gradients of weights before the gradient that goes on, wherever both are there to take.

Of ``y = x W`` the backward takes ``dW = x' dy`` and ``dx = dy W'``. With dW first, x can be dropped before dx is made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from torch import fx

from comera_compile.passes.joint_graph import JointGraph, is_product
from comera_compile.torch_partition import hinted_bytes, is_view

# Where a node stands: its place in the graph as it was, or that of the node it was moved ahead of and when.
Order = dict[fx.Node, tuple[int, float]]

_SHRINKS = 4  # a product that frees at least so many times the bytes that it makes


def order_backward(joint: fx.GraphModule, read: JointGraph) -> fx.GraphModule:
    """Move products that are the smaller for it ahead of others of the same gradient.

    Args:
        joint: joint graph of forward and backward; reordered in place.
        read: the same graph, read.
    """
    order: Order = {node: (k, math.inf) for k, node in enumerate(joint.graph.nodes)}
    moves = itertools.count()
    first: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if node not in read.backward or not is_product(node):
            continue
        gradients = {base for base in map(_base, node.all_input_nodes) if base in read.backward}
        if len(gradients) == 1:
            leader = first.setdefault(gradients.pop(), node)
            if leader is not node and _shrinks(node, read):
                _move(node, leader, order, moves)
    joint.graph.lint()
    return joint


def _shrinks(node: fx.Node, read: JointGraph) -> bool:
    """Whether a product reads a tensor of the forward that is much larger than its result."""
    owners = [read.owners[n] for n in node.all_input_nodes if n in read.owners]
    return any(hinted_bytes(o.meta.get("val")) >= _SHRINKS * hinted_bytes(node.meta.get("val")) for o in owners)


def _move(node: fx.Node, ahead_of: fx.Node, order: Order, moves: Iterator[int]) -> None:
    """Put a node, with the views that it reads, ahead of an earlier one, unless it reads what is only made later."""
    moving, waiting = [node], [node]
    while waiting:
        later = [n for n in waiting.pop().all_input_nodes if order[n] >= order[ahead_of]]
        if not all(is_view(n) for n in later):
            return
        moving += later
        waiting += later
    for each in sorted(set(moving), key=order.__getitem__):
        ahead_of.prepend(each)
        order[each] = order[ahead_of][0], next(moves)


def _base(node: fx.Node) -> fx.Node:
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node

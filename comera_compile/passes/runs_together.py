"""Which linear uses can run together with others, and what must not lie between them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from comera_compile import torch_private
from comera_compile.passes.graph_nodes import called_name, example, has_effect
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.uses import ATTEND, BRIDGE, INSIDE, PLAN, USE

_DTYPES = (torch.float32, torch.float64)
# Beginnings of the names of functions that change how what follows is run: gradients, autocast, inference mode.
_SWITCHES = ("_set_", "_enter_", "_exit_")


def may_end(node: fx.Node) -> bool:
    """Whether a node is a linear use with merged halves whose operands the kernels know."""
    plan = node.meta.get(PLAN)
    if not isinstance(plan, LinearPlan) or not plan.merged:
        return False
    use = node.meta[USE]
    tensors = [example(n) for n in (node, use.x, use.packed)]
    return all(t.dtype == tensors[0].dtype and t.dtype in _DTYPES and t.device.type == "cpu" for t in tensors)


def may_begin(node: Any) -> bool:
    """Whether a node is such a use that has one reader only and that does not run together with others already."""
    alone = isinstance(node, fx.Node) and len(node.users) == 1
    return alone and may_end(node) and is_free(node)


def is_free(node: fx.Node) -> bool:
    """Whether a node does not yet run as part of, or as the end of, something larger."""
    return not any(key in node.meta for key in (ATTEND, BRIDGE, INSIDE))


def same_sizes(one: Collection[Any], other: Collection[Any]) -> bool:
    """Whether two shapes are known to be equal; symbolic sizes may become guards."""
    return len(one) == len(other) and all(torch_private.holds(a == b) for a, b in zip(one, other, strict=True))


def undisturbed(firsts: Collection[fx.Node], last: fx.Node, inner: Collection[fx.Node]) -> bool:
    """Whether nothing between the first of ``firsts`` and ``last`` has an effect: the firsts will run after it.

    ``inner`` are the nodes that will run together, firsts included.
    """
    order = list(last.graph.nodes)
    start, known = min(order.index(first) for first in firsts), set(inner)
    middle = (n for n in takewhile(lambda n: n is not last, order[start:]) if n not in known)
    return not any(has_effect(n) or called_name(n).startswith(_SWITCHES) for n in middle)

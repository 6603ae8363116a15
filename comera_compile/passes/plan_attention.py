"""Pass 5: attention over short sequences becomes plain products on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from comera_compile import torch_private
from comera_compile.passes.graph_nodes import argument, example, graph_modules
from comera_compile.planning.attention_plan import AttentionPlan, pays_off
from comera_compile.planning.uses import INSIDE, PLAN, USE, AttentionUse

ATTENTION = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)


def plan_attention(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Tag scaled dot-product attention that is cheaper as products (``node.meta["comera_plan"]``).

    Left alone: what runs from bond to bond, masks other than causal, dropout, grouped queries, inputs that are
    broadcast or of no width, half precision (autocast included), long sequences.
    """
    for module in graph_modules(graph_module):
        for node in module.graph.nodes:
            plan = _plan(node) if node.target in ATTENTION and INSIDE not in node.meta else None
            if plan is not None:
                node.meta[USE], node.meta[PLAN] = AttentionUse(*attention_inputs(node)), plan
    return graph_module


def attention_inputs(node: fx.Node) -> list[fx.Node]:
    """Query, key and value of a call of scaled dot-product attention."""
    return [argument(node, k, name) for k, name in enumerate(("query", "key", "value"))]


def _plan(node: fx.Node) -> AttentionPlan | None:
    plain = argument(node, 3, "attn_mask") is None and argument(node, 4, "dropout_p", 0.0) == 0.0
    if not plain or argument(node, 7, "enable_gqa", False):
        return None
    tensors = [example(n) for n in attention_inputs(node)]
    exact = all(t.dtype in (torch.float32, torch.float64) and t.dim() == 4 for t in tensors)
    exact = exact and example(node).dtype == tensors[0].dtype
    if not exact or not pays_off(tensors[0].shape[-2], tensors[1].shape[-2], tensors[0].device.type):
        return None
    if not all(_matches(t, tensors[0]) for t in tensors):
        return None
    scale = argument(node, 6, "scale")
    if scale is not None and not (isinstance(scale, (int, float)) and scale > 0):
        return None
    return AttentionPlan(bool(argument(node, 5, "is_causal", False)), scale)


def _matches(tensor: torch.Tensor, query: torch.Tensor) -> bool:
    """Whether batch and heads are those of the query, not broadcast to them, and there is a width to divide by."""
    same = all(torch_private.holds(a == b) for a, b in zip(tensor.shape[:2], query.shape[:2], strict=True))
    return same and torch_private.holds(tensor.shape[-1] > 0)

"""Scaled dot-product attention as batched products and a softmax, which Inductor sees into and fuses."""

from __future__ import annotations

import math
from typing import Any

import torch


def attention_by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    """``softmax(q k^T scale) v``, as ``F.scaled_dot_product_attention``.

    All are ``[batch, heads, tokens, width]`` with the same batch and heads, none broadcast. ``scale`` is positive, or
    None for one over the root of the width.
    """
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v = (x.reshape(-1, x.shape[-2], x.shape[-1]) for x in (query, key, value))
    mixed: torch.Tensor = AttentionByProducts.apply(q, k, v, causal, factor)  # type: ignore[no-untyped-call]
    return mixed.reshape([*query.shape[:-1], value.shape[-1]])


class AttentionByProducts(torch.autograd.Function):
    """The same over one batch axis; its backward gives every gradient in the order in which its input came.

    The gradient of a transposed factor, as autograd derives it, comes out transposed: a slow copy the more.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, factor: float
    ) -> torch.Tensor:
        """``q``: ``[batch, queries, width]``, ``k``: ``[batch, keys, width]``, ``v``: ``[batch, keys, v's width]``."""
        scores = torch.bmm(q, k.transpose(1, 2))
        if causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(allowed.logical_not(), -math.inf)
        # For a positive factor this is softmax(scores * factor), without a pass to find the largest scaled score.
        weights = torch.exp((scores - scores.amax(dim=-1, keepdim=True)) * factor)
        probabilities = weights / weights.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(q, k, v, probabilities)
        ctx.factor = factor
        return torch.bmm(probabilities, v)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of q, k and v."""
        q, k, v, probabilities = ctx.saved_tensors
        grad = grads[0]
        passed = torch.bmm(grad, v.transpose(1, 2)) * probabilities
        # d softmax(s) = p * (dp - sum(p * dp)), here with p * dp at hand.
        scores = (passed - probabilities * passed.sum(dim=-1, keepdim=True)) * ctx.factor
        dq, dk = torch.bmm(scores, k), torch.bmm(scores.transpose(1, 2), q)
        return dq, dk, torch.bmm(probabilities.transpose(1, 2), grad), None, None

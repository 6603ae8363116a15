"""Scaled dot-product attention as two batched products and a softmax, which Inductor sees into and fuses."""

from __future__ import annotations

import math

import torch


def attention_by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    """``softmax(q k^T scale) v``; all ``[batch, heads, tokens, width]``, as ``F.scaled_dot_product_attention``."""
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(allowed.logical_not(), -math.inf)
    return torch.matmul(torch.softmax(scores, dim=-1), value)

"""The same tensor-train forward as one writes it by hand: a module a layer, plain autograd, left to Inductor.

This is the yardstick between dense and the backend: equal shapes and parameters, none of its planning.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.six_encoders import INIT_STD
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.packing import merge_cols, merge_pair, merge_rows
from comera_compile.tt.shape import TTShape

MIN_ELEMENTS = 100_000  # the backend's default: smaller weights stay dense


class PlainTTLinear(nn.Module):
    """``y = (x B^T) A^T + bias`` with both halves merged from their cores in every forward."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.shape = choose_shape(linear.out_features, linear.in_features, format="tt", rank=rank)
        self.cores = draw_cores(self.shape)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in_features)`` to ``(..., out_features)``."""
        cores = list(self.cores)
        split = len(self.shape.row_modes)
        inner = F.linear(x, merge_cols(cores[split:]))
        return F.linear(inner, merge_rows(cores[:split]), self.bias)


class PlainTTEmbedding(nn.Module):
    """Rows of a ``ttm`` table: all cores but the last merged into one small table, looked up, times the last core."""

    def __init__(self, embedding: nn.Embedding, rank: int) -> None:
        super().__init__()
        self.shape = choose_shape(embedding.num_embeddings, embedding.embedding_dim, format="ttm", rank=rank)
        self.cores = draw_cores(self.shape)

    def forward(self, ids: Tensor) -> Tensor:
        """``(...)`` int64 ids to ``(..., embedding_dim)``."""
        *first, last = self.cores
        merged = first[0]
        for core in first[1:]:
            merged = merge_pair(merged, core)
        flat = ids.reshape(-1)
        left = merged[0].index_select(0, flat // last.shape[1])  # (ids, columns so far, rank)
        right = last.squeeze(-1).index_select(1, flat % last.shape[1]).transpose(0, 1)  # (ids, rank, last columns)
        rows = torch.bmm(left, right).reshape(flat.shape[0], -1)
        return rows[:, : self.shape.cols].reshape(*ids.shape, self.shape.cols)


def draw_cores(shape: TTShape) -> nn.ParameterList:
    """Normal cores whose product has entries of standard deviation :data:`INIT_STD` (CoMERA's initialisation)."""
    paths = math.prod(shape.ranks)
    std = (INIT_STD / math.sqrt(paths)) ** (1 / len(shape.core_shapes))
    return nn.ParameterList([nn.Parameter(torch.randn(size) * std) for size in shape.core_shapes])


def replace_layers(model: nn.Module, rank: int) -> nn.Module:
    """Put plain tensor-train modules in the place of every large ``nn.Linear`` and ``nn.Embedding``; in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.weight.numel() >= MIN_ELEMENTS:
                setattr(parent, name, PlainTTLinear(child, rank))
            elif isinstance(child, nn.Embedding) and child.weight.numel() >= MIN_ELEMENTS:
                setattr(parent, name, PlainTTEmbedding(child, rank))
    return model

"""Whole modules after the rewrite: embeddings, tied heads, attention, activation checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comera_compile.codegen.lookup import ttm_lookup
from comera_compile.codegen.lower_plans import rebuild_dense
from comera_compile.codegen.run_plan import apply_operands
from tests.packed_modules import Capture, Stack, assert_as_eager, linear, pack

WIDTH = 24
LOOKUP = ttm_lookup


def x(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.mark.parametrize("padding", [None, 4])
def test_embedding(padding: int | None) -> None:
    table = nn.Embedding(60, WIDTH, padding_idx=padding, dtype=torch.float64)
    model = pack(table, format="ttm", zero_row=-1 if padding is None else padding)
    capture = Capture()
    assert_as_eager(capture, model, torch.tensor([[4, 59, 0], [4, 4, 7]]))
    assert capture.count(LOOKUP) == 1 and capture.count(F.embedding, rebuild_dense) == capture.markers == 0


def test_tied_embedding_and_head() -> None:
    # The table stays a table for the lookup; the head rebuilds it.
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(60, WIDTH, dtype=torch.float64)
            self.body = linear(WIDTH, WIDTH)
            pack(self.embed, format="ttm")

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.body(self.embed(ids)), self.embed.weight)

    capture = Capture()
    assert_as_eager(capture, Tied(), torch.randint(60, (2, 5)))
    assert capture.count(LOOKUP) == capture.count(apply_operands) == capture.count(rebuild_dense) == 1


@pytest.mark.parametrize("bias", [True, False])
def test_multi_head_attention_rebuilds_its_input_projection(bias: bool) -> None:
    attention = nn.MultiheadAttention(WIDTH, 4, bias=bias, batch_first=True, dtype=torch.float64)
    pack(attention, "in_proj_weight")
    pack(attention.out_proj)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return out

    capture = Capture()
    assert_as_eager(capture, Block(), x(2, 5, WIDTH))
    assert capture.markers == 0 and capture.count(rebuild_dense) >= 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_bodies_of_activation_checkpoints_are_rewritten(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Stack(linear(WIDTH, 36), linear(36, WIDTH)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    capture = Capture()
    assert_as_eager(capture, Checkpointed(), x(5, WIDTH))
    assert capture.markers == capture.count(rebuild_dense) == 0
    assert capture.count(apply_operands) == 4
    inside = [n for n in capture.nodes if n.target is apply_operands and n.graph is not capture.graphs[0].graph]
    assert len(inside) == 4

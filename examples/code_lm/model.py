"""A byte-level GPT in plain PyTorch. Nothing in here knows about tensor trains."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class ByteGPT(nn.Module):
    """Predicts the next byte.

    Args:
        blocks: number of transformer blocks.
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads.
        context: bytes seen at once.
    """

    def __init__(self, blocks: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.initialise()

    def initialise(self) -> None:
        """Normal weights of 0.02, smaller where a block adds to the residual stream: depth must not swell it."""
        nn.init.normal_(self.position, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                adds = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.02 / (2 * len(self.blocks)) ** 0.5 if adds else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats per byte (a 0-d tensor) for int64 bytes of shape (batch, context)."""
        x = self.embedding(inputs) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

"""Blocks that run from bond to bond: a feed-forward network, attention, and a whole block of a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.linear_cases import DENSE, OURS, ROTATION, Batch, LinearStep

WIDTH, HIDDEN, HEADS, SEQUENCE = 768, 3072, 12, 128


class FeedForward(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """``(..., 768)`` to the same."""
        made: Tensor = self.narrow(F.gelu(self.widen(x), approximate=self.approximate))
        return made


class Attention(nn.Module):
    """Projections to q, k and v, attention of twelve heads, projection back; dropout 0."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.causal = nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, tokens, 768)`` to the same."""
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        made: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return made

    @staticmethod
    def _heads(x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        return x.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2)


class GPTBlock(nn.Module):
    """Norm, causal attention, residual; norm, feed-forward network with GELU by tanh, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention(causal=True)
        self.second, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward("tanh")

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, tokens, 768)`` to the same."""
        x = x + self.attention(self.first(x))
        made: Tensor = x + self.feed_forward(self.second(x))
        return made


@dataclass(frozen=True)
class Region:
    """A block, the rank of its tensor trains, and the rows of a step: tokens, or sequences of 128 of them."""

    name: str
    make: Callable[[], nn.Module]
    rank: int
    lead: tuple[int, ...]

    def batches(self) -> list[Batch]:
        """A rotation of inputs that want gradients and gradients of outputs."""
        generator = torch.Generator().manual_seed(0)
        xs, grads = torch.randn(2, ROTATION, *self.lead, WIDTH, generator=generator)
        return [(x.clone().requires_grad_(), grad) for x, grad in zip(xs.unbind(), grads.unbind(), strict=True)]


REGIONS = (
    *(Region(f"ffn_r32_T{rows}", FeedForward, 32, (rows,)) for rows in (128, 1024, 4096)),
    Region("ffn_r16_T1024", FeedForward, 16, (1024,)),
    *(Region(f"attention_r32_B{batch}", Attention, 32, (batch, SEQUENCE)) for batch in (1, 8)),
    Region("gpt_block_r32", GPTBlock, 32, (8, SEQUENCE)),
)


def build(variant: str, region: Region, batches: Sequence[Batch], *, inner: str = "inductor") -> LinearStep:
    """The block, dense or ours; nothing is compiled before its first step.

    Args:
        variant: ``dense`` or ``comera``.
        region: which block.
        batches: of :meth:`Region.batches`; both variants share them.
        inner: what lowers the traced graphs.

    Raises:
        ValueError: there is no such variant.
    """
    if variant not in (DENSE, OURS):
        raise ValueError(f"expected {DENSE!r} or {OURS!r}, got {variant!r}")
    torch.manual_seed(0)
    block = region.make()
    if variant == DENSE:
        return LinearStep(block, torch.compile(block, backend=inner), batches)
    # which allocator runs is said by the benchmark, for both variants alike
    options: dict[str, Any] = {"rank": region.rank, "init": "random", "min_elements": 0}
    options |= {"keep_memory": False, "inner": inner}
    return LinearStep(block, torch.compile(block, backend="comera", options=options), batches)

"""The measured model, CoMERA's six-encoder classifier as an ordinary ``nn.Module``, and its data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]

INIT_STD = 0.02
ZIPF_EXPONENT = 1.05
ROTATION = 4  # batches that a run goes round: fresh input each step, and nothing is drawn inside the timed step


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model (CoMERA, arXiv 2405.14377, MNLI experiment, with a plain three-way head)."""

    width: int = 768
    hidden: int = 3072
    heads: int = 12
    sequence: int = 128
    vocabulary: int = 30522
    classes: int = 3
    encoders: int = 6


class Encoder(nn.Module):
    """Post-norm encoder: attention without mask, then a GELU feed-forward network; dropout 0."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.heads = sizes.heads
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.attended = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.attention_norm, self.output_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, sequence, width)`` to the same shape."""
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        attention = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        x = self.attention_norm(x + self.attended(attention))
        x = self.output_norm(x + self.narrow(F.gelu(self.widen(x))))
        return x

    def _heads(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        return x.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)


class SixEncoders(nn.Module):
    """Token and position tables, encoders, a linear head on the first token, and the loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.empty(sizes.sequence, sizes.width))
        self.norm = nn.LayerNorm(sizes.width)
        self.encoders = nn.ModuleList([Encoder(sizes) for _ in range(sizes.encoders)])
        self.head = nn.Linear(sizes.width, sizes.classes)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of ``(batch, sequence)`` int64 token ids against ``(batch,)`` int64 classes."""
        x = self.norm(self.tokens(ids) + self.positions)
        for encoder in self.encoders:
            x = encoder(x)
        return F.cross_entropy(self.head(x[:, 0]), targets)


def zipf_batches(batch: int, sizes: Sizes, *, seed: int = 0) -> list[Batch]:
    """A rotation of batches; ids follow ``P(id) ~ 1 / (id + 1) ** 1.05``, like tokens sorted by frequency.

    Args:
        batch: sequences in one batch.
        sizes: of the model.
        seed: of the generator; the same batches come back for the same seed.

    Returns:
        :data:`ROTATION` pairs of ``(batch, sequence)`` ids and ``(batch,)`` classes.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, sizes.vocabulary + 1, dtype=torch.float32).pow(-ZIPF_EXPONENT)
    ids = torch.multinomial(weights, ROTATION * batch * sizes.sequence, replacement=True, generator=generator)
    targets = torch.randint(0, sizes.classes, (ROTATION, batch), generator=generator)
    return list(zip(ids.view(ROTATION, batch, sizes.sequence).unbind(), targets.unbind(), strict=True))

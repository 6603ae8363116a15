"""The number from which kernels find out what dropout drops (``dropout.h``)."""

from __future__ import annotations

import torch
from torch import Tensor

_SEEDS = (1 << 63) - 1


def draw(dropout: float, device: torch.device) -> Tensor | None:
    """A seed, ``[1]``, from torch's generator; None where nothing is dropped."""
    return torch.randint(_SEEDS, (1,), device=device) if dropout else None


def check(dropout: float, seed: Tensor | None) -> None:
    """Refuse what is no dropout.

    Raises:
        ValueError: no probability, or a seed that is missing, of another dtype or size, or in vain.
    """
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be a probability, 0 to 1, got {dropout}")
    if (seed is None) != (dropout == 0) or (seed is not None and (seed.numel() != 1 or seed.dtype != torch.int64)):
        shown = "none" if seed is None else f"{list(seed.shape)} of {seed.dtype}"
        raise ValueError(f"dropout {dropout} needs {'one int64' if dropout else 'no'} seed, got {shown}")


def number(seed: Tensor | None) -> int:
    """What the kernels take for it."""
    return 0 if seed is None else int(seed.item())

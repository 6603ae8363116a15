"""The variants of one training step: dense, this backend, the same written by hand, and the peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers, plain_tt
from benchmarks.six_encoders import Batch, SixEncoders, Sizes, zipf_batches

LEARNING_RATE = 1e-4
BASELINE = "dense"
OURS = "comera"
OURS_SAVING_ALL = "comera_saving_all"


@dataclass(frozen=True)
class Setting:
    """What one run measures."""

    batch: int
    rank: int
    sizes: Sizes = field(default_factory=Sizes)
    seed: int = 0
    saved: str = "auto"  # option of this backend: what is kept between forward and backward


@dataclass
class Training:
    """A model, its compiled form, its optimizer, and the batches it goes round."""

    model: nn.Module
    forward: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    batches: Sequence[Batch]
    done: int = 0
    loss: float = float("nan")

    def step(self) -> None:
        """Forward, backward, optimizer step, gradients dropped; the loss is read, as training loops do."""
        ids, targets = self.batches[self.done % len(self.batches)]
        loss = self.forward(ids, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.item()
        self.done += 1

    def run(self, steps: int) -> None:
        """Several steps."""
        for _ in range(steps):
            self.step()

    @property
    def parameters(self) -> int:
        """Trainable elements; of the backend's variant only after its first step."""
        return sum(p.numel() for p in self.model.parameters())


def build(variant: str, setting: Setting) -> Training:
    """Model, compiled form and optimizer of one variant; nothing is compiled before the first step.

    Args:
        variant: a key of :data:`VARIANTS`.
        setting: sizes, batch, rank and seed; all variants see the same batches.

    Raises:
        peers.PeerMissingError: the variant needs a package that is not installed.
    """
    torch.manual_seed(setting.seed)
    return VARIANTS[variant](SixEncoders(setting.sizes), setting)


def _dense(model: nn.Module, setting: Setting) -> Training:
    return _training(model, torch.compile(model), setting)


def _comera(model: nn.Module, setting: Setting) -> Training:
    # which allocator runs is said by the benchmark, for all variants of a process alike
    options: dict[str, str | int | bool | Callable[..., Any]] = {"rank": setting.rank, "keep_memory": False}
    options |= {"saved": setting.saved}
    return _training(model, torch.compile(model, backend="comera", options=options), setting)


def _comera_saving_all(model: nn.Module, setting: Setting) -> Training:
    return _comera(model, replace(setting, saved="all"))


def _tt_autograd(model: nn.Module, setting: Setting) -> Training:
    return _dense(plain_tt.replace_layers(model, setting.rank), setting)


def _tensorly(model: nn.Module, setting: Setting) -> Training:
    return _dense(peers.replace_with_tensorly(model, setting.rank), setting)


def _galore(model: nn.Module, setting: Setting) -> Training:
    optimizer = peers.galore_adamw(model, LEARNING_RATE)
    return Training(model, torch.compile(model), optimizer, zipf_batches(setting.batch, setting.sizes))


def _training(model: nn.Module, forward: Callable[[Tensor, Tensor], Tensor], setting: Setting) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return Training(model, forward, optimizer, zipf_batches(setting.batch, setting.sizes))


VARIANTS: dict[str, Callable[[nn.Module, Setting], Training]] = {
    BASELINE: _dense,
    OURS: _comera,
    OURS_SAVING_ALL: _comera_saving_all,
    "tt_autograd": _tt_autograd,
    "tensorly": _tensorly,
    "galore": _galore,
}
PEERS = ("tensorly", "galore")

"""The source of Python's own standard library, as bytes, cut into training files and held-out files."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

INSTALLED = {"site-packages", "dist-packages"}  # other people's packages, different on every machine
HELD_OUT = 20  # one file in so many


@dataclass(frozen=True)
class Corpus:
    """Two byte streams (uint8 vectors) from different files."""

    train: torch.Tensor
    held_out: torch.Tensor


def source_files(root: Path) -> list[Path]:
    """All Python files of the standard library under ``root``, in a fixed order."""
    files = [path for path in root.rglob("*.py") if not INSTALLED & set(path.relative_to(root).parts)]
    if len(files) < HELD_OUT:
        raise SystemExit(f"expected the source of the standard library under {root}, found {len(files)} Python files")
    return sorted(files)


def split(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files; the same for everyone who has the same files."""
    shuffled = random.Random(0).sample(files, len(files))
    cut = len(files) // HELD_OUT
    return shuffled[cut:], shuffled[:cut]


def read_bytes(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def load_corpus() -> Corpus:
    train, held_out = split(source_files(Path(sysconfig.get_path("stdlib"))))
    return Corpus(read_bytes(train), read_bytes(held_out))


def draw_starts(stream: torch.Tensor, count: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Where ``count`` random windows of ``context`` bytes and the byte after each of them begin."""
    return torch.randint(0, stream.numel() - context, (count,), generator=generator)


def windows(stream: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 of shape (windows, context); a target is the byte after its input."""
    cut = stream[starts[:, None] + torch.arange(context + 1)].long()
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()

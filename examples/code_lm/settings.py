"""What can be asked of the example on its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path

SIDES = ("dense", "comera")
SWEEP_RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)


@dataclass(frozen=True)
class Settings:
    """One comparison: the same for both sides, but for ``rank``, which only comera reads."""

    seconds: float = 80.0
    steps: int = 0
    width: int = 768
    blocks: int = 6
    heads: int = 0
    context: int = 256
    batch: int = 4
    rank: int = 32
    lr: float = 5e-4
    seed: int = 0
    threads: int = 0
    windows: int = 32
    checks: int = 8


SHORT = {"steps": 30, "width": 256, "blocks": 1, "context": 64, "batch": 4, "rank": 16, "windows": 16, "checks": 3}
HELP = {
    "seconds": "training time of each side, validation and compilation not counted",
    "steps": "stop after so many steps instead of --seconds",
    "width": "size of the residual stream",
    "blocks": "transformer blocks",
    "heads": "attention heads; 0 is one for every 64 of the width",
    "context": "bytes seen at once",
    "batch": "sequences in a step",
    "rank": "tensor-train rank of the comera side",
    "lr": "peak learning rate of both sides",
    "seed": "of weights and batches",
    "threads": "0 leaves the number to torch",
    "windows": "held-out windows, about",
    "checks": "how often to look at the held-out windows",
}


@dataclass(frozen=True)
class Task:
    """The settings, and what to do with them: the whole comparison, or one side of it in a process of its own."""

    settings: Settings
    out: Path
    side: str | None
    sweep: tuple[float, ...]


def parse(arguments: list[str] | None = None) -> Task:
    """Read the command line; ``--short`` and ``--lr-sweep`` change defaults, whatever else is given counts."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on Python's standard library, dense and with comera, and compare.",
        argument_default=argparse.SUPPRESS,
    )
    for field in fields(Settings):
        text = f"{HELP[field.name]} (default {field.default:g})"
        parser.add_argument(f"--{field.name}", type=type(field.default), metavar="N", help=text)
    parser.add_argument("--short", action="store_true", help="a tiny model and few steps: does it work here?")
    parser.add_argument(
        "--lr-sweep",
        type=float,
        nargs="*",
        metavar="LR",
        help="compare learning rates instead, by default ten from 1e-4 to 1e-1 with 60 steps each",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for plot, table and curves")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = vars(parser.parse_args(arguments))
    out, side = given.pop("out", Path("out/train_code_lm")), given.pop("side", None)
    sweep = tuple(given.pop("lr_sweep") or SWEEP_RATES) if "lr_sweep" in given else ()
    defaults = (SHORT if given.pop("short", False) else {}) | ({"steps": 60} if sweep else {})
    return Task(check(replace(Settings(), **(defaults | given)), parser), out, side, sweep)


def check(settings: Settings, parser: argparse.ArgumentParser) -> Settings:
    """Refuse numbers that cannot work, before anything has been compiled."""
    may_be_zero = {"steps", "seed", "threads", "heads"}
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if value < 0 or (value == 0 and field.name not in may_be_zero):
            parser.error(
                f"--{field.name} must be {'at least 0' if field.name in may_be_zero else 'above 0'}, got {value}"
            )
    if settings.heads == 0:
        at_most = max(1, settings.width // 64)
        heads = next(count for count in range(at_most, 0, -1) if settings.width % count == 0)
        settings = replace(settings, heads=heads)
    if settings.width % settings.heads:
        parser.error(f"--width {settings.width} must be a multiple of --heads {settings.heads}")
    return settings

"""One side of the comparison: compile, train, look at the held-out windows now and then."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from code_lm.data import Corpus, draw_starts, windows
from code_lm.machine import OthersWatch, held_mb, step_growth_mb
from code_lm.model import ByteGPT
from code_lm.settings import Settings

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Point:
    """Held-out bits per byte after so many steps, which took so many seconds."""

    step: int
    seconds: float
    bits: float


@dataclass
class Run:
    """What one side did."""

    side: str
    lr: float
    parameters: int
    compile_seconds: float
    step_ms: float = math.nan
    memory_mb: float | None = None
    others_share: float | None = None
    points: list[Point] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Run:
        return Run(**{**data, "points": [Point(**point) for point in data["points"]]})


class Trainer:
    """A model of one side, compiled, and put back to its beginning by each :meth:`train`."""

    def __init__(self, side: str, settings: Settings, corpus: Corpus) -> None:
        self.side, self.settings, self.corpus = side, settings, corpus
        torch.manual_seed(settings.seed)
        self.model = ByteGPT(settings.blocks, settings.width, settings.heads, settings.context)
        self.optimizer = self.new_optimizer(settings.lr)
        self.loss: Loss
        if side == "comera":
            self.loss = torch.compile(self.model, backend="comera", options={"rank": settings.rank})
        else:
            self.loss = torch.compile(self.model)
        self.compile_seconds = self.warm_up()
        self.beginning = [parameter.detach().clone() for parameter in self.model.parameters()]

    def new_optimizer(self, lr: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def warm_up(self) -> float:
        """Compile the training step and the validation; the weights stay as they were. Seconds."""
        say(f"{self.side}: compiling")
        start = time.perf_counter()
        self.loss(*self.batch(torch.Generator().manual_seed(0))).backward()
        self.model.zero_grad()
        self.held_out_bits(batches=1)
        return time.perf_counter() - start

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        context = self.settings.context
        return windows(
            self.corpus.train, draw_starts(self.corpus.train, self.settings.batch, context, generator), context
        )

    @torch.no_grad()
    def held_out_bits(self, batches: int | None = None) -> float:
        """Mean bits per byte over the held-out windows, which are always the same."""
        batches = batches or math.ceil(self.settings.windows / self.settings.batch)
        generator = torch.Generator().manual_seed(1)
        count, context = batches * self.settings.batch, self.settings.context
        starts = draw_starts(self.corpus.held_out, count, context, generator).split(self.settings.batch)
        losses = [self.loss(*windows(self.corpus.held_out, part, context)).item() for part in starts]
        return statistics.fmean(losses) / math.log(2)

    def step(self, generator: torch.Generator) -> float:
        """One step of training; bits per byte of its batch."""
        loss = self.loss(*self.batch(generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item() / math.log(2)

    def restart(self, lr: float) -> None:
        """Weights as at the beginning, a new optimizer."""
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.beginning, strict=True):
                parameter.copy_(value)
        self.optimizer = self.new_optimizer(lr)

    def train(self, lr: float, measure_memory: bool = True) -> Run:
        """Train from the beginning until time or steps are used up."""
        self.restart(lr)
        run = Run(self.side, lr, sum(p.numel() for p in self.model.parameters()), self.compile_seconds)
        generator = torch.Generator().manual_seed(self.settings.seed + 2)
        times: list[float] = []
        bits, done, spent, others = math.nan, 0.0, 0.0, OthersWatch()
        run.points.append(Point(0, 0.0, self.held_out_bits()))
        while done < 1:
            start = time.perf_counter()
            set_rate(self.optimizer, lr * schedule(done))
            bits = self.step(generator)
            times.append(time.perf_counter() - start)
            spent += times[-1]
            done = self.progress(len(times), spent)
            if done * self.settings.checks >= len(run.points) or done >= 1:
                run.points.append(Point(len(times), spent, self.held_out_bits()))
            self.show(done, len(times), spent, bits, run.points[-1].bits)
        run.step_ms, run.others_share = statistics.median(times) * 1000, others.share()
        if measure_memory:
            run.memory_mb = self.memory_mb(generator)
        return run

    def progress(self, steps: int, seconds: float) -> float:
        """Share of the budget used, 1 at the end."""
        budget = self.settings
        return min(1.0, steps / budget.steps if budget.steps else seconds / budget.seconds)

    def memory_mb(self, generator: torch.Generator) -> float | None:
        """Parameters, optimizer state and the most that one step needs beside them, in MiB."""
        growth = step_growth_mb(lambda: self.step(generator))
        return None if growth is None else growth + held_mb(self.model, self.optimizer)

    def show(self, done: float, steps: int, seconds: float, bits: float, held_out: float) -> None:
        text = f"step {steps}, {seconds:.0f} s, bits per byte: batch {bits:.2f}, held out {held_out:.2f}"
        bar = "#" * int(done * 30)
        say(f"{self.side:6} [{bar:30}] {text}", last=done >= 1)


def schedule(done: float) -> float:
    """Warm-up over 8 % of the budget, then a cosine down to a twentieth."""
    return max(min(1.0, done / 0.08) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))), 1e-3)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def say(text: str, last: bool = True) -> None:
    """A line on standard error: written over and over on a terminal, only when it is the last one in a log file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)
    elif last:
        print(text, file=sys.stderr, flush=True)

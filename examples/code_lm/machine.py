"""What the operating system knows: the memory that a training step takes, and who else used the processor (Linux)."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

STATUS, CLEAR, PROCESSOR = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/stat")


def status_mb(name: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def step_growth_mb(step: Callable[[], object]) -> float | None:
    """How far the resident memory rises above what lies between steps, in MiB; None where Linux does not tell."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
        trim(0)  # hand freed memory back, else it would hide what the step takes
        CLEAR.write_text("5")  # the peak begins anew
    except (OSError, AttributeError):
        return None
    before = status_mb("VmRSS")
    step()
    return status_mb("VmHWM") - before


def held_mb(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Parameters and optimizer state, in MiB."""
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *state]) / 2**20


class OthersWatch:
    """How much of the processor went to other programs since this was made."""

    def __init__(self) -> None:
        self.begin = self.read()

    @staticmethod
    def read() -> tuple[float, float, float] | None:
        """Seconds of the clock, of all cores at work, and of this process; None where Linux does not tell."""
        try:
            first = PROCESSOR.read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _idle, _wait, irq, softirq, steal = (int(word) for word in first[:8])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()

    def share(self) -> float | None:
        """0 where nobody else was at work, 1 where others had all cores."""
        end = self.read()
        if self.begin is None or end is None:
            return None
        clock, busy, own = (after - before for after, before in zip(end, self.begin, strict=True))
        return max(0.0, (busy - own) / (clock * (os.cpu_count() or 1)))

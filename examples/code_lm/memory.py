"""What one training step really takes in memory, read from the operating system (Linux)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


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

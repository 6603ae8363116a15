"""Peak memory of a training step above what the process keeps anyway; run it in a process of its own.

Compiling leaves code, caches and heap behind that are not the step's. So the whole run is done once and forgotten; the
resident size then is the *residue*, and the figure is the peak of three later steps minus this residue.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.training import Training

STEPS = 3
MIB = 2**20


class MemoryLeakError(RuntimeError):
    """Storages of the warm-up survive its deletion, so the residue would be too large and the figure too small."""


@dataclass(frozen=True)
class Peak:
    """Bytes of one variant."""

    residue: int
    peak: int

    @property
    def figure(self) -> int:
        """Bytes that training takes: parameters, optimizer state, gradients, activations and workspace."""
        return self.peak - self.residue


def measure(build: Callable[[], Training]) -> Peak:
    """Warm, delete, collect, trim, read the residue; rebuild, three steps, reset the peak, three steps, read it.

    Args:
        build: makes model, compiled code and optimizer from nothing; called twice.

    Raises:
        MemoryLeakError: something of the first run stays alive.
    """
    alive = [ref for ref in _warm(build) if not _forgotten(ref)]
    if alive:
        raise MemoryLeakError(f"{len(alive)} storages of the first run are alive after it was deleted; expected none")
    residue = _status("VmRSS")
    training = build()
    training.run(STEPS)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the resident size of now
    training.run(STEPS)
    return Peak(residue, _status("VmHWM"))


def _warm(build: Callable[[], Training]) -> list[StorageWeakRef]:
    """One whole run, deleted again, code included; weak references to all storages it owned."""
    training = build()
    training.run(STEPS)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in _owned(training)]
    del training
    torch.compiler.reset()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return storages


def _owned(training: Training) -> Iterator[torch.Tensor]:
    """Parameters and optimizer state."""
    yield from training.model.parameters()
    for state in training.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _forgotten(ref: StorageWeakRef) -> bool:
    return bool(ref.expired())


def _status(key: str) -> int:
    """Bytes of a line of the kernel's status of this process, e.g. ``VmRSS``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith(key + ":")]
    return int(kilobytes) * 1024

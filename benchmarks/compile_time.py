"""Seconds from ``torch.compile`` until a model is compiled, forward and backward, in fresh processes.

Once with a cold and then with a warm cache.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import comera_compile as comera
from benchmarks.six_encoders import SixEncoders
from benchmarks.training import VARIANTS, Setting

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def measure(variant: str, setting: Setting) -> dict[str, Any]:
    """``torch.compile`` and the first step, minus a later step, in a process that has not compiled anything before.

    ``torch.compile`` counts because it imports Inductor, which a backend of another name does in its first call. The
    later step is the fastest of three: the second one still waits for memory that the first has not asked for yet.

    Returns:
        ``seconds`` of compilation, decomposition included; for this package also ``decomposition`` alone, taken on a
        second model afterwards.
    """
    torch.manual_seed(setting.seed)
    model = SixEncoders(setting.sizes)
    start = time.perf_counter()
    training = VARIANTS[variant](model, setting)
    training.step()
    first = time.perf_counter() - start
    result: dict[str, Any] = {"seconds": first - min(_seconds(training.step) for _ in range(3))}
    if variant == "comera":
        model = SixEncoders(setting.sizes)
        result["decomposition"] = _seconds(lambda: comera.tensorize(model, rank=setting.rank))
    return result


def cold_and_warm(child: Callable[[dict[str, str]], dict[str, Any]]) -> dict[str, Any]:
    """Run a measuring child twice with one fresh Inductor cache.

    Args:
        child: runs :func:`measure` in a new process with the given environment variables added.
    """
    with tempfile.TemporaryDirectory() as cache:
        return {state: child({CACHE: cache}) for state in ("cold", "warm")}


def ratios(times: dict[str, dict[str, Any]], baseline: str, ours: str) -> dict[str, float]:
    """Seconds of ``ours`` over ``baseline`` for the cold and the warm cache: below 1 compiles faster than dense."""
    return {state: times[ours][state]["seconds"] / times[baseline][state]["seconds"] for state in ("cold", "warm")}


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

"""Seconds until a model is compiled, forward and backward, in fresh processes with a cold and then a warm cache."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import comera_compile as comera
from benchmarks.six_encoders import SixEncoders
from benchmarks.training import Setting, build

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def measure(variant: str, setting: Setting) -> dict[str, Any]:
    """First step minus a later step of a variant in this process, which must not have compiled anything before.

    The later one is the fastest of three: the second step still waits for memory that the first has not asked for yet.

    Returns:
        ``seconds`` of compilation, decomposition included; for this package also ``decomposition`` alone, taken on a
        second model afterwards.
    """
    training = build(variant, setting)
    first, *later = (_seconds(training.step) for _ in range(4))
    result: dict[str, Any] = {"seconds": first - min(later)}
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

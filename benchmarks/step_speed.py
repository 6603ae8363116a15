"""Times of the variants of the transformer step, in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import paired
from benchmarks.training import BASELINE, OURS, OURS_SAVING_ALL, PEERS, Setting, Training, build

PEER_ROUNDS, PEER_SECONDS = 5, 20.0


def measure(variants: Sequence[str], setting: Setting, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Paired times of the variants against dense.

    Peers are slow: they get a second, shorter session of their own, beside dense and this backend.

    Returns:
        Per variant ``speedup`` and its 25-75 % range, ``rounds``, ``milliseconds`` (median), ``parameters`` and
        ``raw_seconds``; for all ``processor_share``; ``speedup_over_galore`` when galore was asked for; and
        ``time_over_saving_all`` (below 1: faster) when this backend was timed with two ways of saving.

    Raises:
        ArithmeticError: a variant's loss is not finite.
    """
    trained = {name: build(name, setting) for name in dict.fromkeys((BASELINE, *variants))}
    standard = {name: t.step for name, t in trained.items() if name not in PEERS}
    timings = paired.compare(standard, BASELINE, rounds=rounds, seconds=seconds)
    result: dict[str, Any] = {}
    if len(standard) < len(trained):
        steps = {name: t.step for name, t in trained.items() if name in (BASELINE, OURS, *PEERS)}
        few, short = min(PEER_ROUNDS, rounds), min(PEER_SECONDS, seconds)
        beside = paired.compare(steps, BASELINE, rounds=few, seconds=short)
        timings |= {name: timing for name, timing in beside.items() if name in PEERS}
        if {OURS, "galore"} <= steps.keys():
            result["speedup_over_galore"] = beside["galore"].speedup(OURS, "galore").median
    if {OURS, OURS_SAVING_ALL} <= timings.get(OURS, timings[BASELINE]).seconds.keys():
        result["time_over_saving_all"] = timings[OURS].speedup(OURS_SAVING_ALL, OURS).median
    _check_losses(trained)
    return {**_figures(timings, trained), **result}


def _figures(timings: Mapping[str, paired.Timing], trained: Mapping[str, Training]) -> dict[str, Any]:
    spreads = {name: t.speedup(name, BASELINE) for name, t in timings.items() if name != BASELINE}
    return {
        "speedup": {name: s.median for name, s in spreads.items()},
        "speedup_range": {name: [s.low, s.high] for name, s in spreads.items()},
        "rounds": {name: t.rounds for name, t in timings.items()},
        "milliseconds": {name: 1e3 * t.median(name) for name, t in timings.items()},
        "parameters": {name: t.parameters for name, t in trained.items()},
        "processor_share": timings[BASELINE].share(torch.get_num_threads()),
        "raw_seconds": {name: dict(t.seconds) for name, t in timings.items()},
    }


def _check_losses(trained: Mapping[str, Training]) -> None:
    """A step that computes nonsense may be fast: every loss must be finite."""
    wrong = {name: t.loss for name, t in trained.items() if not math.isfinite(t.loss)}
    if wrong:
        raise ArithmeticError(f"every variant must train; losses that are not finite: {wrong}")

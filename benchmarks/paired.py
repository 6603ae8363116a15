"""Paired timing of benchmarks: :mod:`comera_compile.paired_timing`, and a second look at what seems to lose."""

from __future__ import annotations

from collections.abc import Mapping

from comera_compile.paired_timing import WARM_UP, Spread, Step, Timing, measure, spread

__all__ = ["AGAIN", "WARM_UP", "Spread", "Step", "Timing", "compare", "measure", "spread"]

AGAIN = 5  # times as many rounds for a variant whose loss is smaller than its spread


def compare(steps: Mapping[str, Step], baseline: str, *, rounds: int, seconds: float) -> dict[str, Timing]:
    """:func:`measure`, then once more with five times the rounds for every variant that is :attr:`Spread.undecided`.

    Returns:
        For each variant the timing that its figures are taken from; it holds the baseline too.
    """
    timing = measure(steps, rounds=rounds, seconds=seconds)
    chosen = dict.fromkeys(steps, timing)
    for name in steps:
        if name != baseline and timing.speedup(name, baseline).undecided:
            pair = {baseline: steps[baseline], name: steps[name]}
            chosen[name] = measure(pair, rounds=AGAIN * rounds, seconds=AGAIN * seconds)
    return chosen

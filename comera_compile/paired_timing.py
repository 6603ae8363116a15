"""Paired timing: variants alternate in one process, and only ratios taken inside a round count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Step = Callable[[], None]
Clock = Callable[[], float]

WARM_UP = 2


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of the ratios of all rounds."""

    median: float
    low: float
    high: float

    @property
    def undecided(self) -> bool:
        """Whether this is a loss (below 1) by less than the 25-75 % range: not to be called a loss yet."""
        return 1 - (self.high - self.low) < self.median < 1


@dataclass(frozen=True)
class Timing:
    """Seconds of every variant in every round, warm-up left out, and processor seconds of all of them together."""

    seconds: Mapping[str, Sequence[float]]
    processor: float = 0.0

    @property
    def rounds(self) -> int:
        """Number of rounds kept."""
        return len(next(iter(self.seconds.values())))

    def median(self, name: str) -> float:
        """Median seconds of one step: for the floor beside it only, never compared between runs."""
        return statistics.median(self.seconds[name])

    @property
    def noise(self) -> float:
        """How far the rounds lie apart: lower to upper quartile over the median, the median of all variants."""
        each = [spread(times) for times in self.seconds.values()]
        return statistics.median((s.high - s.low) / s.median for s in each)

    def share(self, threads: int) -> float:
        """Processor time got over time asked for: near 1 on a quiet machine, less when others run on it too."""
        return self.processor / (threads * sum(map(sum, self.seconds.values())))

    def speedup(self, name: str, baseline: str) -> Spread:
        """How many times faster ``name`` is than ``baseline``, ratio taken inside each round."""
        pairs = zip(self.seconds[baseline], self.seconds[name], strict=True)
        return spread([base / own for base, own in pairs])


def spread(ratios: Sequence[float]) -> Spread:
    """Median and 25-75 % range (linear interpolation between order statistics)."""
    if len(ratios) < 2:
        return Spread(ratios[0], ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Spread(median, low, high)


def measure(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    seconds: float,
    warm_up: int = WARM_UP,
    fewest: int = 2,
    clock: Clock = time.perf_counter,
) -> Timing:
    """Time all variants in alternation, in reversed order every second round.

    Args:
        steps: one training step of each variant.
        rounds: rounds to keep, if the time suffices.
        seconds: no further round is begun after this time, warm-up not counted.
        warm_up: rounds run first and thrown away (the first compiles).
        fewest: rounds that are always kept, whatever time they take.
        clock: seconds, monotonic.
    """
    names = list(steps)
    for k in range(warm_up):
        for name in names if k % 2 == 0 else reversed(names):
            steps[name]()
    taken: dict[str, list[float]] = {name: [] for name in names}
    begin, processor, done = clock(), time.process_time(), 0
    while done < fewest or (done < rounds and clock() - begin < seconds):
        for name in names if done % 2 == 0 else reversed(names):
            start = clock()
            steps[name]()
            taken[name].append(clock() - start)
        done += 1
    return Timing(taken, time.process_time() - processor)

"""Time matrix products and copies over a grid of sizes on one device, in rounds, so that what disturbs them shows.

Every product is timed once a round and the rounds go through the whole grid: another program that runs for a second
spoils one of the several times of a product, and the median of each product leaves it out.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch

from comera_compile.errors import CalibrationError

# The sizes that occur in plans: ranks and modes, then widths of layers and numbers of rows. No powers of two above 64,
# whose rows fall onto the same cache lines.
SIZES = (1, 4, 8, 16, 32, 64, 192, 768, 3072)
BATCHED_SIZES = (1, 4, 8, 16, 32, 64, 192, 768)
BATCH = 8
COPIES = tuple(1 << k for k in range(10, 25, 2))  # elements
# For each of COPY_KINDS: runs of the last axis move as a whole, the axes behind the rows swap, all are turned round.
ORDERS = ((1, 0, 2), (0, 2, 1), (2, 1, 0))
STREAM = (0, 1, 2)
_SAMPLE_SECONDS = 4e-5
_LARGEST_SECONDS = 1.2e-2
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 25
_PATIENCE = 3
# Products of at least these sizes and this many multiplications use every thread.
_THREADED_SIZE, _THREADED_WORK = 64, 1e7

Run = Callable[[], object]


class Product(NamedTuple):
    """``(m x k) . (k x n)``, one (``batch`` 0) or a batch of them; ``form`` says which operands lie transposed."""

    batch: int
    form: str
    m: int
    n: int
    k: int


class Copy(NamedTuple):
    """A copy of ``numel`` elements of three axes into another order."""

    numel: int
    order: tuple[int, ...]


class Wrapper(NamedTuple):
    """What generated code does around an operation: a result is allocated and an operand viewed."""


class Kernel(NamedTuple):
    """An operator of this package at one bond, or both ways of ``merge``; ``call`` has next to nothing to do."""

    name: str
    bond: int


Timed = Product | Copy | Wrapper | Kernel


@dataclass(frozen=True)
class Timings:
    """Seconds of each run in every round, and the share of its processors that the process got in large products."""

    seconds: dict[Timed, list[float]]
    share: float = 1.0

    @cached_property
    def median(self) -> dict[Timed, float]:
        """Median seconds of each run."""
        return {key: statistics.median(times) for key, times in self.seconds.items()}

    @property
    def spread(self) -> float:
        """How far the rounds lie apart; a few percent on a quiet machine.

        Lower to upper quartile over the median of each run; of all runs, the upper quartile.
        """
        ranges = []
        for times in self.seconds.values():
            low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
            ranges.append((high - low) / middle)
        return statistics.quantiles(ranges, n=4, method="inclusive")[2] if len(ranges) > 1 else ranges[0]

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(next(iter(self.seconds.values())))


class Operands:
    """Memory of two operands and a result, from which every product and copy takes its views: nothing is allocated."""

    def __init__(self, device: str, dtype: torch.dtype, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(min(numel, 1 << 20), generator=generator)
        self.left, self.right, self.out = (
            drawn.repeat(-(-numel // drawn.numel()))[:numel].to(device, dtype) for _ in range(3)
        )

    def run(self, timed: Product | Copy | Wrapper) -> Run:
        """What does it, into memory that exists."""
        if isinstance(timed, Wrapper):
            return self._wrap
        if isinstance(timed, Copy):
            # The last two axes are as modes and ranks are.
            source = self.left[: timed.numel].view(-1, 16, 32).permute(timed.order)
            return partial(self.out[: timed.numel].view(source.shape).copy_, source)
        lead = (timed.batch,) if timed.batch else ()
        left = _matrix(self.left, lead, timed.m, timed.k, timed.form[0] == "t")
        right = _matrix(self.right, lead, timed.k, timed.n, timed.form[1] == "t")
        out = _matrix(self.out, lead, timed.m, timed.n, False)
        return partial(torch.bmm if timed.batch else torch.mm, left, right, out=out)

    def _wrap(self) -> None:
        torch.empty_strided((4, 4), (4, 1), dtype=self.out.dtype, device=self.out.device)
        torch.as_strided(self.left, (4, 4), (4, 1), 0)


def _matrix(memory: torch.Tensor, lead: tuple[int, ...], rows: int, cols: int, transposed: bool) -> torch.Tensor:
    count = rows * cols * (lead[0] if lead else 1)
    shape = (cols, rows) if transposed else (rows, cols)
    matrix = memory[:count].view(*lead, *shape)
    return matrix.transpose(-1, -2) if transposed else matrix


def product_grid(sizes: Sequence[int], largest: float) -> list[tuple[int, int, int]]:
    """(m, n, k) of the grid with at most ``largest`` multiplications, and at most as many elements a matrix as fit."""
    most = sizes[-1] ** 2
    grid = itertools.product(sizes, repeat=3)
    return [(m, n, k) for m, n, k in grid if m * n * k <= largest and max(m * n, n * k, m * k) <= most]


def largest_product(operands: Operands, synchronize: Run, size: int = 768) -> float:
    """Multiplications of the largest product worth timing, from the best time of a square one."""
    run = operands.run(Product(0, "nn", size, size, size))
    return size**3 / min(_seconds(run, 1, synchronize) for _ in range(4)) * _LARGEST_SECONDS


def measure(runs: Mapping[Timed, Run], seconds: float, synchronize: Run, threads: int = 0) -> Timings:
    """Time every run once a round, as many rounds as fit into ``seconds``, three at least.

    Short runs are repeated within a round. A first round, which is not kept, warms up and says how often. With
    ``threads`` of a CPU the share of their time that large products got is measured too.

    Raises:
        CalibrationError: three rounds take more than thrice ``seconds``.
    """
    begin = time.perf_counter()
    latest = begin + _PATIENCE * max(seconds, 10.0)
    repeats = {key: _repeats(run, synchronize, latest) for key, run in runs.items()}
    taken: dict[Timed, list[float]] = {key: [] for key in runs}
    wall = processor = 0.0
    rounds, first = 0, time.perf_counter()
    while rounds < _MOST_ROUNDS:
        now = time.perf_counter()
        if rounds >= _FEWEST_ROUNDS and now - begin + (now - first) / rounds > seconds:
            break
        for key, run in runs.items():
            _check_time(latest)
            before = time.process_time()
            taken[key].append(_seconds(run, repeats[key], synchronize))
            if _is_threaded(key):
                processor += time.process_time() - before
                wall += repeats[key] * taken[key][-1]
        rounds += 1
    return Timings(taken, processor / (wall * threads) if threads and wall else 1.0)


def _is_threaded(timed: Timed) -> bool:
    if not isinstance(timed, Product) or timed.batch:
        return False
    sizes = timed.m, timed.n, timed.k
    return min(sizes) >= _THREADED_SIZE and math.prod(sizes) >= _THREADED_WORK


def fill(times: dict[tuple[int, int, int], float], sizes: Sequence[int]) -> list[float]:
    """Times of the whole grid, k fastest; what was too large to time gets the rate of the next smaller product."""
    filled: dict[tuple[int, ...], float] = {}
    for point in itertools.product(range(len(sizes)), repeat=3):
        m, n, k = (sizes[i] for i in point)
        if (m, n, k) in times:
            filled[point] = times[m, n, k]
            continue
        largest = max(range(3), key=lambda axis: point[axis])
        below = tuple(i - (axis == largest) for axis, i in enumerate(point))
        growth = sizes[point[largest]] / sizes[point[largest] - 1]
        filled[point] = filled[below] * growth
    return [filled[point] for point in itertools.product(range(len(sizes)), repeat=3)]


def _check_time(latest: float) -> None:
    if time.perf_counter() > latest:
        raise CalibrationError(
            f"calibration refused: {_FEWEST_ROUNDS} rounds take more than {_PATIENCE} times the time they were given. "
            "Other programs are running, or there are more threads than free cores: stop them or pass fewer threads"
        )


def _repeats(run: Run, synchronize: Run, latest: float) -> int:
    _check_time(latest)
    estimate = _seconds(run, 1, synchronize)
    if estimate < 10 * _SAMPLE_SECONDS:  # the first of them may have set something up
        estimate = min(_seconds(run, 2, synchronize) for _ in range(2))
    return max(1, round(_SAMPLE_SECONDS / max(estimate, 1e-9)))


def _seconds(run: Run, repeats: int, synchronize: Run) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return (time.perf_counter() - start) / repeats

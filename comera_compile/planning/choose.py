"""Which plan runs for how many rows: the cheapest candidate in each of a few ranges of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from comera_compile.planning.cost import CUDA_MODEL, DeviceModel, cpu_model, plan_cost
from comera_compile.planning.linear_plan import LinearPlan, Side, candidates
from comera_compile.tt.shape import TTShape

CPU_BOND_MULTIPLE = 16
_LARGEST_ROWS = 1 << 20
_MAX_RANGES = 3


@dataclass(frozen=True)
class RowRange:
    """A plan and the largest number of rows it is meant for (None: no limit)."""

    up_to: int | None
    plan: LinearPlan


@lru_cache(maxsize=1024)
def plans_by_rows(
    shape: TTShape, contracts: Side, device_type: str, threads: int, itemsize: int, training: bool
) -> tuple[RowRange, ...]:
    """Ranges of rows, ascending, each with its cheapest plan.

    torch stops compiling after eight variants of a function, so there are at most three ranges. ``shape.scale`` plays no
    part; callers pass it as 1.0 so that layers share an entry.
    """
    device = CUDA_MODEL if device_type == "cuda" else cpu_model(threads)
    multiple = CPU_BOND_MULTIPLE if device_type == "cpu" else 1
    plans = candidates(shape, contracts, multiple)

    def best(rows: int) -> LinearPlan:
        return min(plans, key=lambda p: plan_cost(p, rows, device, itemsize, training=training).seconds)

    ranges = _ranges(best)
    while len(ranges) > _MAX_RANGES:
        ranges = _without_cheapest_loss(ranges, device, itemsize, training)
    return tuple(ranges)


def _ranges(best: Callable[[int], LinearPlan]) -> list[RowRange]:
    """Ranges between powers of two whose best plans differ, each crossover found by bisection."""
    ranges: list[RowRange] = []
    low, current = 1, best(1)
    while low < _LARGEST_ROWS:
        high = low * 2
        following = best(high)
        if following != current:
            ranges.append(RowRange(_crossover(best, low, high, current), current))
            current = following
        low = high
    return [*ranges, RowRange(None, current)]


def _crossover(best: Callable[[int], LinearPlan], low: int, high: int, plan: LinearPlan) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if best(middle) == plan else (low, middle)
    return low


def _without_cheapest_loss(
    ranges: list[RowRange], device: DeviceModel, itemsize: int, training: bool
) -> list[RowRange]:
    """Merge the two neighbouring ranges whose merging costs least, judged at the upper end of the lower one."""

    def loss(k: int) -> float:
        rows = ranges[k].up_to or _LARGEST_ROWS
        pair = [plan_cost(r.plan, rows, device, itemsize, training=training).seconds for r in ranges[k : k + 2]]
        return pair[1] / pair[0]

    k = min(range(len(ranges) - 1), key=loss)
    return ranges[:k] + ranges[k + 1 :]

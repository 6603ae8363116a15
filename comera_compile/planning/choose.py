"""Which plan runs for how many rows: the cheapest candidate in each of a few ranges of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from comera_compile.planning.cost import Cost, Objective, cost_by_rows
from comera_compile.planning.device_model import DeviceModel, shipped_model
from comera_compile.planning.linear_plan import LinearPlan, Side, candidates
from comera_compile.tt.shape import TTShape

# Elements of a vector of an AVX2 register: a bond in between would be filled up to it anyway.
CPU_BOND_MULTIPLE = 8
_LARGEST_ROWS = 1 << 20
_MAX_RANGES = 3


@dataclass(frozen=True)
class RowRange:
    """A plan and the largest number of rows it is meant for (None: no limit)."""

    up_to: int | None
    plan: LinearPlan


@lru_cache(maxsize=1024)
def plans_by_rows(
    shape: TTShape,
    contracts: Side,
    device_type: str,
    threads: int,
    itemsize: int,
    training: bool,
    device: DeviceModel | None = None,
    objective: Objective = "time",
    rows: int | None = None,
) -> tuple[RowRange, ...]:
    """Ranges of rows, ascending, each with its cheapest plan; where ``rows`` is known, one with the cheapest for it.

    torch stops compiling after eight variants of a function, so there are at most three ranges. ``shape.scale`` plays
    no part; callers pass it as 1.0 so that layers share an entry. ``device``: a calibration, or None for the shipped
    figures; ``objective``: what is cheapest.
    """
    device = device or shipped_model(device_type, threads)
    plans = candidates(shape, contracts, _bond_multiple(device_type))
    costs = {plan: cost_by_rows(plan, device, itemsize, training=training) for plan in plans}

    @cache
    def best(rows: int) -> LinearPlan:
        return min(plans, key=lambda plan: costs[plan](rows).by(objective))

    if rows is not None:
        return (RowRange(None, best(rows)),)
    ranges = _ranges(best)
    while len(ranges) > _MAX_RANGES:
        ranges = _without_cheapest_loss(ranges, costs, objective)
    return tuple(ranges)


@lru_cache(maxsize=1024)
def ranked_plans(
    shape: TTShape,
    contracts: Side,
    device_type: str,
    threads: int,
    itemsize: int,
    training: bool,
    rows: int,
    device: DeviceModel | None = None,
    objective: Objective = "time",
) -> tuple[LinearPlan, ...]:
    """Every plan there is, the cheapest at ``rows`` rows first. Arguments as for :func:`plans_by_rows`."""
    device = device or shipped_model(device_type, threads)
    plans = candidates(shape, contracts, _bond_multiple(device_type))
    costs = {p: cost_by_rows(p, device, itemsize, training=training)(rows).by(objective) for p in plans}
    return tuple(sorted(plans, key=costs.__getitem__))


def plan_from(text: object, shape: TTShape, contracts: Side, device_type: str) -> LinearPlan:
    """The plan of one layer that a text stands for (``encode()`` of a plan).

    Raises:
        ValueError: it is none, or one that this layer cannot have on this kind of device.
    """
    if not isinstance(text, str):
        raise ValueError(f"expected the text of a plan, got {text!r}")
    plan = LinearPlan.decode(text)  # what is no plan has other words and numbers: a ValueError, too
    if plan not in candidates(shape, contracts, _bond_multiple(device_type)):
        raise ValueError(f"not a plan of this layer: {text!r}")
    return plan


def _bond_multiple(device_type: str) -> int:
    return CPU_BOND_MULTIPLE if device_type == "cpu" else 1


def _ranges(best: Callable[[int], LinearPlan]) -> list[RowRange]:
    """Ranges between powers of two whose best plans differ, each crossover found by bisection."""
    ranges: list[RowRange] = []
    low, current = 1, best(1)
    while low < _LARGEST_ROWS:
        high = low * 2
        while best(high) != current:  # between two powers a third plan may come first
            low = _crossover(best, low, high, current)
            ranges.append(RowRange(low, current))
            low += 1
            current = best(low)
        low = high
    return [*ranges, RowRange(None, current)]


def _crossover(best: Callable[[int], LinearPlan], low: int, high: int, plan: LinearPlan) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if best(middle) == plan else (low, middle)
    return low


def _without_cheapest_loss(
    ranges: list[RowRange], costs: Mapping[LinearPlan, Callable[[int], Cost]], objective: Objective
) -> list[RowRange]:
    """Merge the two neighbouring ranges whose merging costs least, judged at the upper end of the lower one."""

    def loss(k: int) -> float:
        rows = ranges[k].up_to or _LARGEST_ROWS
        kept, dropped = costs[ranges[k + 1].plan](rows), costs[ranges[k].plan](rows)
        return kept.by(objective) / dropped.by(objective)

    k = min(range(len(ranges) - 1), key=loss)
    fewer = ranges[:k] + ranges[k + 1 :]
    # The neighbours of the range that went may be of one plan: no guard is needed between them.
    return [r for r, after in zip(fewer, [*fewer[1:], None], strict=True) if after is None or r.plan != after.plan]

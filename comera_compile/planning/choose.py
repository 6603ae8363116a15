"""Which plan runs for how many rows: the cheapest candidate in each of a few ranges of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

from comera_compile.planning.common_ranges import LayerRanges, common_ranges
from comera_compile.planning.cost import Objective, cost_by_rows
from comera_compile.planning.device_model import DeviceModel, shipped_model
from comera_compile.planning.linear_plan import LinearPlan, Side, candidates
from comera_compile.planning.row_ranges import LARGEST_ROWS, RowRange
from comera_compile.tt.shape import TTShape

# Elements of a vector of an AVX2 register: a bond in between would be filled up to it anyway.
CPU_BOND_MULTIPLE = 8
_MAX_RANGES = 3


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

    torch stops compiling after eight variants of a function, so there are at most three ranges, and one for a single
    row, which torch compiles apart anyway. ``shape.scale`` plays no part; callers pass it as 1.0 so that layers share
    an entry. ``device``: a calibration, or None for the shipped figures; ``objective``: what is cheapest.
    """
    device = device or shipped_model(device_type, threads)
    plans = candidates(shape, contracts, _bond_multiple(device_type))
    costs = {plan: cost_by_rows(plan, device, itemsize, training=training) for plan in plans}

    def cost(plan: LinearPlan, rows: int) -> float:
        return costs[plan](rows).by(objective)

    @cache
    def best(rows: int) -> LinearPlan:
        return min(plans, key=lambda plan: cost(plan, rows))

    if rows is not None:
        return (RowRange(None, best(rows)),)
    return common_ranges([LayerRanges(tuple(_ranges(best)), cost)], _MAX_RANGES)[0]


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
    while low < LARGEST_ROWS:
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

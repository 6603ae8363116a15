"""Ranges of rows that all layers of a graph share, so that a model is compiled as rarely as one layer.

Each layer has crossovers of its own. On a dynamic batch every one of them is a guard of the whole graph: a model of
three sizes of layers has up to six, and torch stops compiling after eight variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.row_ranges import LARGEST_ROWS, RowRange, joined, plan_in

MOST_RANGES = 4


@dataclass(frozen=True)
class LayerRanges:
    """A distinct layer of a graph: its own ranges, and what a plan of it costs at so many rows."""

    ranges: tuple[RowRange, ...]
    cost: Callable[[LinearPlan, int], float]

    @property
    def limits(self) -> tuple[int, ...]:
        """Where its plan changes, ascending."""
        return tuple(r.up_to for r in self.ranges if r.up_to is not None)

    def plan_at(self, rows: int) -> LinearPlan:
        """Its own choice."""
        return plan_in(self.ranges, rows)


def common_ranges(layers: Sequence[LayerRanges], most: int = MOST_RANGES) -> list[tuple[RowRange, ...]]:
    """Ranges for each layer whose limits all come from one set of at most ``most - 1``.

    Limits are given up one by one, always the one whose loss is smallest: by how much the worst layer is then slower,
    at the worst number of rows, than with its own choice. A limit of one row is free, since torch compiles a single row
    apart from others anyway.

    Args:
        layers: of one graph, with the same number of rows.
        most: ranges that the graph may have, a single row left out.
    """
    limits = sorted({limit for layer in layers for limit in layer.limits})
    while sum(limit > 1 for limit in limits) > most - 1:
        fewer = [[*limits[:k], *limits[k + 1 :]] for k in range(len(limits)) if limits[k] > 1]
        limits = min(fewer, key=lambda chosen: _losses(layers, chosen))
    return [_merged(layer, limits) for layer in layers]


def _losses(layers: Sequence[LayerRanges], limits: Sequence[int]) -> tuple[float, float]:
    """The largest loss of a layer, and the sum of all."""
    losses = [max(_best(layer, low, high)[0] for low, high in _intervals(limits)) for layer in layers]
    return max(losses), sum(losses)


def _intervals(limits: Sequence[int]) -> list[tuple[int, int]]:
    """First and last number of rows of each range."""
    return [(low + 1, high) for low, high in pairwise((0, *limits, LARGEST_ROWS))]


def _best(layer: LayerRanges, first: int, last: int) -> tuple[float, LinearPlan]:
    """The plan for a whole range and its loss: largest ratio of its cost to that of the layer's own choice.

    Between two of the layer's limits the ratio is largest at an end, near enough.
    """
    inside = [n for limit in layer.limits for n in (limit, limit + 1) if first <= n <= last]
    points = sorted({first, last, *inside})
    own = [layer.cost(layer.plan_at(n), n) for n in points]
    plans = dict.fromkeys(layer.plan_at(n) for n in points)
    losses = {p: max(layer.cost(p, n) / best for n, best in zip(points, own, strict=True)) for p in plans}
    chosen = min(losses, key=lambda plan: losses[plan])
    return losses[chosen], chosen


def _merged(layer: LayerRanges, limits: Sequence[int]) -> tuple[RowRange, ...]:
    plans = [_best(layer, first, last)[1] for first, last in _intervals(limits)]
    return tuple(joined([RowRange(limit, plan) for limit, plan in zip((*limits, None), plans, strict=True)]))

"""Graphs of alternatives: items made by arcs from at most two other items, and the cheapest trees in them.

Each arc has a price and a weight. Wanted is the cheapest set of arcs from which every goal can be derived, their
weights within a budget (``best_first``). It is a Steiner problem: what two goals share is paid once, so goals cannot be
solved one by one. One goal alone is easy: the cheapest tree of every item follows from those of its parts.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Arc:
    """Makes ``item`` of ``parts`` (one or two items with smaller numbers)."""

    item: int
    parts: tuple[int, ...]
    price: float
    weight: float = 0.0


@dataclass(frozen=True)
class Derivation:
    """Chosen arcs (positions), ascending by the item they make; what they cost; whether that is proven the least."""

    arcs: tuple[int, ...]
    price: float
    weight: float
    optimal: bool = False


@dataclass(frozen=True)
class _Level:
    """Items of one depth, their arcs, where each item's arcs begin, and the two parts of each arc."""

    items: Ints
    arcs: Ints
    starts: Ints
    parts: Ints


class AndOr:
    """A graph of alternatives.

    Args:
        items: number of items. Those without arcs are given, at no price.
        arcs: in ascending order of ``item``; the parts of an arc have smaller numbers than its item.
        goals: items to be derived.
        budget: most that the weights of the chosen arcs may add up to.
    """

    def __init__(self, items: int, arcs: Sequence[Arc], goals: Sequence[int], budget: float = math.inf) -> None:
        self.items, self.arcs, self.goals, self.budget = items, tuple(arcs), tuple(goals), budget
        self.of: list[list[int]] = [[] for _ in range(items)]
        for k, arc in enumerate(self.arcs):
            self.of[arc.item].append(k)
        self.prices = np.array([arc.price for arc in self.arcs], dtype=np.float64)
        self.weights = np.array([arc.weight for arc in self.arcs], dtype=np.float64)
        self.made = np.array([arc.item for arc in self.arcs], dtype=np.intp)
        # A part that is not there is item number ``items``.
        self.parts = np.array([(*arc.parts, items)[:2] for arc in self.arcs], dtype=np.intp).reshape(-1, 2)
        self._levels = self._by_level()

    def altered(
        self, *, prices: Floats | None = None, weights: Floats | None = None, budget: float | None = None
    ) -> AndOr:
        """The same graph with other prices (arcs,), weights (arcs,) or budget."""
        other = copy.copy(self)
        other.prices = self.prices if prices is None else prices
        other.weights = self.weights if weights is None else weights
        other.budget = self.budget if budget is None else budget
        return other

    def _by_level(self) -> list[_Level]:
        """Levels in ascending order, so that the parts of an arc lie in earlier ones."""
        depth = [0] * self.items
        for arc in self.arcs:
            depth[arc.item] = max(depth[arc.item], 1 + max(depth[p] for p in arc.parts))
        levels = []
        for level in range(1, max(depth, default=0) + 1):
            made = [i for i in range(self.items) if depth[i] == level]
            chosen = np.array([k for i in made for k in self.of[i]], dtype=np.intp)
            starts = list(itertools.accumulate((len(self.of[i]) for i in made[:-1]), initial=0))
            levels.append(_Level(np.array(made), chosen, np.array(starts), self.parts[chosen]))
        return levels

    @cached_property
    def wanted(self) -> npt.NDArray[np.bool_]:
        """Whether a goal can use an arc: (arcs, goals)."""
        by_item = np.zeros((self.items + 1, len(self.goals)), dtype=bool)
        by_item[list(self.goals), range(len(self.goals))] = True
        for k in reversed(range(len(self.arcs))):
            by_item[self.parts[k]] |= by_item[self.made[k]]
        return by_item[self.made]

    def trees(self, price: Floats) -> tuple[Floats, Floats]:
        """Price of the cheapest tree of every item, and of every arc together with its parts' trees.

        ``price`` is (arcs,) or (arcs, goals), and so are the results: (items + 1, ...) and (arcs, ...).
        """
        best, total = np.zeros((self.items + 1, *price.shape[1:])), np.empty_like(price)
        for level in self._levels:
            whole = price[level.arcs] + best[level.parts[:, 0]] + best[level.parts[:, 1]]
            total[level.arcs] = whole
            best[level.items] = np.minimum.reduceat(whole, level.starts)
        return best, total

    def trees_through(self, price: Floats) -> tuple[Floats, Floats]:
        """Price of each goal's cheapest tree (goals,), and of its cheapest that has a given arc (arcs, goals).

        ``price`` is (arcs, goals). Infinite where a goal cannot use the arc.
        """
        best, through = self.trees(price)
        columns = range(len(self.goals))
        above = np.full_like(best, np.inf)
        above[list(self.goals), columns] = 0.0
        for level in reversed(self._levels):
            through[level.arcs] += above[self.made[level.arcs]]
            for side in (0, 1):
                parts = level.parts[:, side]
                np.minimum.at(above, parts, through[level.arcs] - best[parts])
        return best[list(self.goals), columns], through

    def derivation(self, arcs: Sequence[int]) -> Derivation:
        """The derivation that consists of the given arcs."""
        chosen = tuple(sorted(arcs))
        price, weight = (math.fsum(values[list(chosen)]) for values in (self.prices, self.weights))
        return Derivation(chosen, price, weight)

    def derive(self, price: Floats) -> Derivation:
        """The derivation in which every item is made by the arc that is cheapest with its trees at these prices."""
        total = self.trees(price)[1].tolist()
        needed, arcs = set(self.goals), []
        for item in reversed(range(self.items)):
            if item in needed and self.of[item]:
                arcs.append(min(self.of[item], key=total.__getitem__))
                needed.update(self.arcs[arcs[-1]].parts)
        return self.derivation(arcs)

"""The cheapest derivation within a budget, by best-first search under a lower bound: exact, anytime.

Take the largest item still needed, try each arc for it, order states by price paid plus bound of the rest. The first
state that needs nothing is the cheapest derivation. How much is searched depends on the bound (``price_split``): where
it meets the price of a known derivation nothing is.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from dataclasses import replace

from comera_compile.planning.and_or import AndOr, Arc, Derivation
from comera_compile.planning.price_split import EQUAL, Split

State = tuple[tuple[int, int], ...]  # items still needed, largest first, each with the goals (bits) that need it


def best_first(graph: AndOr, split: Split, best: Derivation, deadline: float = math.inf) -> Derivation:
    """The cheapest derivation within the budget.

    Args:
        graph: what may be made of what.
        split: prices divided among the goals: the better, the less is searched.
        best: a derivation within the budget to begin with.
        deadline: by ``time.monotonic``; after it the best derivation known is returned, not marked as optimal.
    """
    search = _Search(graph, split, best.price * (1 - EQUAL))
    while search.least() < search.limit:
        if time.monotonic() > deadline:
            return replace(best, optimal=False)
        found = search.advance()
        if found is not None:
            return replace(found, optimal=True)
    return replace(best, optimal=True)


class _Search:
    """States that may lead to a derivation cheaper than ``limit``, the one of least bound first."""

    def __init__(self, graph: AndOr, split: Split, limit: float) -> None:
        self.limit = limit
        self._graph, self._toll, self._rest = graph, split.toll, _Rest(graph, split)
        self._prices, self._weights = graph.prices.tolist(), graph.weights.tolist()
        self._free = split.toll * graph.budget if split.toll else 0.0
        self._count = itertools.count()
        start = tuple(sorted(((g, 1 << k) for k, g in enumerate(graph.goals) if graph.of[g]), reverse=True))
        self._heap: list[tuple[float, int, State, float, float, tuple[int, ...]]] = []
        self._heap.append((self._bound(start, 0.0, 0.0), 0, start, 0.0, 0.0, ()))
        self._seen: dict[tuple[int, ...], list[tuple[float, float]]] = {}

    def least(self) -> float:
        """Bound of everything that is left."""
        return self._heap[0][0] if self._heap else math.inf

    def advance(self) -> Derivation | None:
        """Replace the best state by what its arcs lead to, or return it if it needs nothing."""
        _, _, state, price, weight, arcs = heapq.heappop(self._heap)
        if not state:
            return self._graph.derivation(arcs)
        for k in self._graph.of[state[0][0]]:
            paid, carried = price + self._prices[k], weight + self._weights[k]
            if carried > self._graph.budget:
                continue
            new = _expand(self._graph, state, self._graph.arcs[k])
            least = self._bound(new, paid, carried)
            if least < self.limit and self._is_new(new, paid, carried):
                # Of equal states the latest first: it is nearest to the end.
                heapq.heappush(self._heap, (least, -next(self._count), new, paid, carried, (*arcs, k)))
        return None

    def _bound(self, state: State, paid: float, carried: float) -> float:
        """What a derivation through a state costs at least. Before its end, weight left over may still be used."""
        return paid + self._toll * carried - self._free + self._rest(state) if state else paid

    def _is_new(self, state: State, price: float, weight: float) -> bool:
        """Whether nothing cheaper and lighter has reached the same needs; remembers it."""
        known = self._seen.setdefault(tuple(item for item, _ in state), [])
        if any(p <= price and w <= weight for p, w in known):
            return False
        known[:] = [(p, w) for p, w in known if p < price or w < weight]
        known.append((price, weight))
        return True


class _Rest:
    """Lower bound of what a state still has to pay: each needed item's tree at the shares of the goals that need it.

    Two needed items of one goal have no item in common below them, and different goals pay different shares, so nothing
    is counted twice.
    """

    def __init__(self, graph: AndOr, split: Split) -> None:
        self._graph, self._share = graph, split.share
        self._trees: dict[int, list[float]] = {}

    def __call__(self, state: State) -> float:
        """Bound of a state."""
        return sum(self._tree(goals)[item] for item, goals in state)

    def _tree(self, goals: int) -> list[float]:
        if goals not in self._trees:
            columns = [k for k in range(len(self._graph.goals)) if goals >> k & 1]
            self._trees[goals] = self._graph.trees(self._share[:, columns].sum(axis=1))[0].tolist()
        return self._trees[goals]


def _expand(graph: AndOr, state: State, arc: Arc) -> State:
    """What is needed once the largest item is made by ``arc``."""
    (_, goals), *others = state
    needed = dict(others)
    for part in arc.parts:
        if graph.of[part]:
            needed[part] = needed.get(part, 0) | goals
    return tuple(sorted(needed.items(), reverse=True))

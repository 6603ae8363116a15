"""Good derivations found quickly: what an exact search starts from, and all there is when time is short."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np

from comera_compile.planning.and_or import AndOr, Derivation, Floats


def first_derivation(graph: AndOr, deadline: float = math.inf) -> Derivation:
    """The best of several derivations within the budget, each improved goal by goal until ``deadline``.

    Args:
        graph: what may be made of what; some derivation must weigh nothing.
        deadline: by ``time.monotonic``.
    """
    best = weightless(graph)
    for price in _prices(graph):
        if time.monotonic() > deadline:
            break
        best = min(best, improved(graph, price, graph.derive(price), deadline), key=lambda d: _rank(graph, d))
    return best


def weightless(graph: AndOr) -> Derivation:
    """A derivation without weight."""
    forbidden = 1.0 + 2.0 * float(graph.prices.sum())
    return graph.derive(np.where(graph.weights > 0, forbidden, graph.prices))


def improved(graph: AndOr, price: Floats, start: Derivation, deadline: float = math.inf) -> Derivation:
    """Each goal in turn derived anew with what the others use for nothing, as long as that helps."""
    best, worse_since, goal = start, 0, 0
    while worse_since < len(graph.goals) and time.monotonic() < deadline:
        others = _used_by_others(graph, best, goal)
        guess = graph.derive(np.where(others, 0.0, price))
        better = _rank(graph, guess) < _rank(graph, best)
        best, worse_since = (guess, 0) if better else (best, worse_since + 1)
        goal = (goal + 1) % len(graph.goals)
    return best


def _prices(graph: AndOr) -> Iterator[Floats]:
    """Prices to derive by: full ones, and ones divided among all who could share."""
    for sharing in (1, np.maximum(graph.wanted.sum(axis=1), 1)):
        yield fitting(graph, graph.prices / sharing)


def fitting(graph: AndOr, price: Floats) -> Floats:
    """``price`` with arcs with weight forbidden, one after the other, until what is derived is within the budget."""
    forbidden = 1.0 + 2.0 * float(graph.prices.sum())
    price = np.where(graph.weights > graph.budget, forbidden, price)
    while True:
        start = graph.derive(price)
        excess = start.weight - graph.budget
        weights = {k: float(graph.weights[k]) for k in start.arcs if graph.weights[k] > 0 and price[k] < forbidden}
        if excess <= 0 or not weights:
            return price
        # The lightest that is enough, or else the heaviest.
        enough = [k for k, weight in weights.items() if weight >= excess]
        arc = min(enough, key=weights.__getitem__) if enough else max(weights, key=weights.__getitem__)
        price[arc] = forbidden


def _rank(graph: AndOr, derivation: Derivation) -> tuple[float, float, float]:
    """Within the budget first, then cheap, then light."""
    return max(0.0, derivation.weight - graph.budget), derivation.price, derivation.weight


def _used_by_others(graph: AndOr, derivation: Derivation, goal: int) -> list[bool]:
    """Of every arc, whether a goal other than this one uses it in a derivation."""
    others = {g for k, g in enumerate(graph.goals) if k != goal}
    used = [False] * len(graph.arcs)
    for k in reversed(derivation.arcs):
        if graph.arcs[k].item in others:
            used[k] = True
            others.update(graph.arcs[k].parts)
    return used

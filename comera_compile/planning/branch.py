"""The cheapest derivation within a budget: branch and bound over what is saved, exact, anytime.

The bound of ``price_split`` nearly always meets the price of a derivation, but for one thing: a budget that is not
quite used up leaves an arc with weight half taken. Then either that arc is paid for out of the budget from the start,
or it is not used at all. What is left open where no such arc is half taken is closed by ``best_first``.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from dataclasses import replace

import numpy as np

from comera_compile.planning.and_or import AndOr, Derivation, Floats
from comera_compile.planning.best_first import best_first
from comera_compile.planning.first_plans import first_derivation, fitting, improved
from comera_compile.planning.price_split import EQUAL, Split, best_split, even_split

_WHOLE = 1e-6  # what the relaxation takes of an arc counts as all or nothing within this
_LP_PART = 0.8  # of the time left, for one linear program at most


def cheapest(graph: AndOr, seconds: float = math.inf) -> Derivation:
    """The cheapest derivation within the budget.

    Args:
        graph: what may be made of what; some derivation must weigh nothing.
        seconds: after this time the best derivation known is returned, not marked as optimal.
    """
    deadline, count = time.monotonic() + seconds, itertools.count()
    best = first_derivation(graph, deadline)
    nodes = [(0.0, next(count), graph)]  # by what is known of their derivations: none is cheaper
    while nodes and nodes[0][0] < best.price * (1 - EQUAL):
        node = _affordable(heapq.heappop(nodes)[2], best.price)
        split, taken, best = _bounded(node, best, deadline)
        if not split.leaves_room(best):
            continue
        arc = _half_taken(node, taken)
        if arc is None:
            best = best_first(node, split, best, deadline)
            if not best.optimal:
                return graph.derivation(best.arcs)
        else:
            for child in _children(node, arc, best.price):
                heapq.heappush(nodes, (split.bound, next(count), child))
    return replace(graph.derivation(best.arcs), optimal=True)


def _affordable(graph: AndOr, forbidden: float) -> AndOr:
    """Arcs that the budget does not allow cost more than any derivation worth knowing."""
    return graph.altered(prices=np.where(graph.weights > graph.budget, graph.prices + forbidden, graph.prices))


def _bounded(graph: AndOr, best: Derivation, deadline: float) -> tuple[Split, Floats, Derivation]:
    """The best split, what its relaxation takes, and the best derivation known then.

    A better derivation makes the bound's program smaller, and the program points to better derivations.
    """
    split, taken = even_split(graph), np.zeros(len(graph.arcs))
    while split.leaves_room(best):
        known = best
        split, taken = best_split(graph, split, best, _LP_PART * (deadline - time.monotonic()))
        if split.leaves_room(best):
            best = _better(graph, split, taken, best, deadline)
        if best is known:
            break
    return split, taken, best


def _better(graph: AndOr, split: Split, taken: Floats, best: Derivation, deadline: float) -> Derivation:
    """``best``, or a cheaper derivation found where arcs that the relaxation takes are nearly free."""
    price = graph.prices + split.toll * graph.weights
    for trust in (0.9, 0.999):
        start = graph.derive(fitting(graph, price * (1 - trust * taken)))
        found = improved(graph, graph.prices, start, deadline)
        best = found if found.weight <= graph.budget and found.price < best.price else best
    return best


def _half_taken(graph: AndOr, taken: Floats) -> int | None:
    """The arc with weight that is least decided, if any."""
    half = np.where(graph.weights > 0, np.minimum(taken, 1 - taken), 0.0)
    arc = int(half.argmax()) if len(half) else 0
    return arc if len(half) and half[arc] > _WHOLE else None


def _children(graph: AndOr, arc: int, forbidden: float) -> list[AndOr]:
    """With an arc not used (it costs ``forbidden``), and with its weight paid for."""
    prices, weights = graph.prices.copy(), graph.weights.copy()
    prices[arc] += forbidden
    weights[arc] = 0.0
    left = graph.budget - float(graph.weights[arc])
    return [graph.altered(prices=prices), graph.altered(weights=weights, budget=left)]

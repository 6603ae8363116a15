"""Two exact answers to what the planner's search has to find, neither of which uses it.

Both read a candidate DAG as networkx shows it: set nodes (ints), pair nodes (tuples) that make them.
``enumerate_plans`` tries every derivation; ``integer_program`` gives the same question to HiGHS as a mixed integer
program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import networkx as nx
import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from comera_compile.planning.problem import Problem

Floats = npt.NDArray[np.float64]
Item = tuple[int, bool]  # a set, and whether it is made in the backward


@dataclass(frozen=True)
class Way:
    """One way to get an item: what it costs, elements it keeps from forward to backward, items it needs."""

    item: int
    price: float
    saved: int
    needed: tuple[int, ...]


class Ways:
    """Every way to get every item, items numbered such that needed ones have smaller numbers; leaves are left out.

    With ``limited`` a set that the backward needs is made there, or is saved by the forward. Without it a set of the
    forward is there for both.
    """

    def __init__(self, graph: nx.DiGraph, problem: Problem, *, limited: bool) -> None:
        self._graph, self._limited = graph, limited
        parts = [p for p in graph if isinstance(p, int) and graph.in_degree(p)]
        items = [(p, late) for p in parts for late in (False, True) if self._exists(p, late)]
        items.sort(key=lambda item: (item[0].bit_count(), item[1]))
        self._number = {item: k for k, item in enumerate(items)}
        self.of = [list(self._ways(item)) for item in items]
        self.goals = [self._number[o, not graph.nodes[o]["forward"]] for o in problem.outputs]

    def _exists(self, part: int, late: bool) -> bool:
        forward = self._graph.nodes[part]["forward"]
        return (self._limited or not forward) if late else forward

    def _ways(self, item: Item) -> Iterator[Way]:
        part, late = item
        here = self._number[item]
        for pair in self._graph.predecessors(part):
            needed = [p for p in pair if self._graph.in_degree(p)]
            numbers = tuple(self._number[p, late and self._exists(p, True)] for p in needed)
            yield Way(here, float(self._graph.nodes[pair]["price"]), 0, numbers)
        if late and (part, False) in self._number:
            yield Way(here, 0.0, self._graph.nodes[part]["numel"], (self._number[part, False],))


Front = list[tuple[float, int]]  # (price, elements saved): each is cheaper than the one before and saves more


def enumerate_plans(graph: nx.DiGraph, problem: Problem, *, limited: bool) -> Front:
    """Price and elements saved of every plan that no other beats in both, by trying every way for every item needed.

    The largest item needed is made first, so an item once made is not needed again, and what is still needed is all
    that matters for the rest: of those who need the same, one that is dearer and saves more is dropped.
    """
    ways = Ways(graph, problem, limited=limited)
    start = sum(1 << goal for goal in set(ways.goals))
    waiting: list[dict[int, Front]] = [{} for _ in range(len(ways.of) + 1)]  # by largest item needed; 0 for nothing
    waiting[start.bit_length()][start] = [(0.0, 0)]
    for item in reversed(range(len(ways.of))):
        for needed, reached in waiting[item + 1].items():
            front = _front(reached)
            for way in ways.of[item]:
                after = needed & ~(1 << item)
                for number in way.needed:
                    after |= 1 << number
                more = waiting[after.bit_length()].setdefault(after, [])
                more += [(price + way.price, saved + way.saved) for price, saved in front]
        waiting[item + 1] = {}
    return _front(waiting[0][0])


def cheapest(front: Front, limit: float) -> float:
    """Least price on a front with at most ``limit`` elements saved."""
    return min(price for price, saved in front if saved <= limit)


def _front(reached: Iterable[tuple[float, int]]) -> Front:
    """What nothing beats in both, cheapest first."""
    kept: Front = []
    for price, saved in sorted(reached):
        if not kept or saved < kept[-1][1]:
            kept.append((price, saved))
    return kept


def integer_program(graph: nx.DiGraph, problem: Problem, limit: float | None) -> float:
    """The same least price as a mixed integer program (``limit`` in elements saved, None: any).

    Each output sends one unit down to the leaves: an item passes on, by its ways, what comes to it. A way may carry
    something only if it is bought (0 or 1), and only what is bought is paid.
    """
    ways = Ways(graph, problem, limited=limit is not None)
    bought = [way for of in ways.of for way in of]
    ceiling = sum(_alone(ways)[goal] for goal in ways.goals)  # each output on its own, nothing saved: a plan
    if not ceiling:
        return 0.0
    price = np.array([way.price for way in bought])
    carried, rows = _network(ways, bought)
    cost = np.zeros(rows.A.shape[1])
    # HiGHS stops at an absolute gap of 1e-6, so prices are put on a scale where that is nothing.
    cost[: len(bought)] = 1e3 * np.minimum(price, 2 * ceiling) / ceiling
    most = np.ones(len(cost))
    constraints = [rows] if limit is None else [rows, _saved_within(limit, bought, most)]
    whole = np.concatenate([np.ones(len(bought)), np.zeros(carried)])
    bounds, exact = Bounds(0, most), {"mip_rel_gap": 0.0}
    done = milp(cost, integrality=whole, bounds=bounds, constraints=constraints, options=exact)
    assert done.status == 0, done.message
    return float(price[done.x[: len(bought)] > 0.5].sum())


def _saved_within(limit: float, bought: list[Way], most: Floats) -> LinearConstraint:
    """The limit as a row; what is above it alone is taken out of ``most`` (variables,)."""
    saved = np.array([float(way.saved) for way in bought])
    most[: len(bought)] = saved <= limit
    # In units of the limit, so that the solver's tolerance is a part of the limit too.
    row = np.zeros(len(most))
    row[: len(bought)] = np.where(saved <= limit, saved / max(limit, 1.0), 0.0)
    return LinearConstraint(row, -np.inf, min(limit, 1.0))


def _alone(ways: Ways) -> list[float]:
    """Price of every item made by itself without saving."""
    least: list[float] = []
    for of in ways.of:
        least.append(min(way.price + sum(least[k] for k in way.needed) for way in of if not way.saved))
    return least


def _network(ways: Ways, bought: list[Way]) -> tuple[int, LinearConstraint]:
    """Number of carrying variables (a way for an output that can use it), and the rows that hold the units together."""
    carriers = []
    for goal in range(len(ways.goals)):
        below = {ways.goals[goal]}
        for of in reversed(ways.of):
            below.update(k for way in of if way.item in below for k in way.needed)
        carriers += [(k, goal) for k, way in enumerate(bought) if way.item in below]
    first, count = len(carriers), len(ways.of)  # rows: carry only what is bought; then balance of each item and output
    matrix = lil_array((first + count * len(ways.goals), len(bought) + len(carriers)))
    for n, (k, goal) in enumerate(carriers):
        matrix[n, k], matrix[n, len(bought) + n] = 1.0, -1.0
        matrix[first + goal * count + bought[k].item, len(bought) + n] = 1.0
        for item in bought[k].needed:
            matrix[first + goal * count + item, len(bought) + n] = -1.0
    least = np.zeros(matrix.shape[0])
    upper = np.zeros(matrix.shape[0])
    upper[:first] = np.inf
    for goal, item in enumerate(ways.goals):
        least[first + goal * count + item] = upper[first + goal * count + item] = 1.0
    return len(carriers), LinearConstraint(matrix.tocsc(), least, upper)

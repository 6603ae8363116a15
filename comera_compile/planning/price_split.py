"""A lower bound of all derivations: the price of each arc divided among the goals that may use it.

Let each goal take its own cheapest tree at its shares: no derivation is cheaper than the sum. The best division is the
dual of a linear program. Relaxed to fractions, a derivation is a flow for each goal: ``u[arc, goal]`` from the goal
down to what is given, and ``z[arc]`` is at least the largest of them and pays the price. The multipliers of ``u <= z``
are the shares, the multiplier of the budget is a toll on weight. The bound is nearly always the price of the cheapest
derivation.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from comera_compile.planning.and_or import AndOr, Derivation, Floats, Ints

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Bools = npt.NDArray[np.bool_]
_INFEASIBLE = 2  # a status of linprog
EQUAL = 1e-9  # relative difference of prices that counts as none


@dataclass(frozen=True)
class Split:
    """Prices divided among the goals.

    Args:
        share: (arcs, goals); each arc's add up to at most its price + toll x weight.
        toll: price of a unit of weight; what the budget would pay is given back.
        bound: no derivation is cheaper.
        bounds: (arcs, goals); none in which the goal uses the arc is.
    """

    share: Floats
    toll: float
    bound: float
    bounds: Floats

    @staticmethod
    def of(graph: AndOr, share: Floats, toll: float = 0.0) -> Split:
        """The split of given shares, with its bounds."""
        alone, through = graph.trees_through(share)
        bound = float(alone.sum()) - (toll * graph.budget if toll else 0.0)
        return Split(share, toll, bound, bound + through - alone)

    def leaves_room(self, best: Derivation) -> bool:
        """Whether a derivation cheaper than ``best`` is not ruled out."""
        return self.bound < best.price * (1 - EQUAL)

    def useful(self, best: Derivation) -> Bools:
        """Which arcs a goal can use in a derivation cheaper than ``best``: (arcs, goals)."""
        return self.bounds < best.price * (1 - EQUAL)


def even_split(graph: AndOr) -> Split:
    """Every price in equal parts among the goals that may use the arc."""
    return Split.of(graph, graph.prices[:, None] * graph.wanted / np.maximum(graph.wanted.sum(axis=1), 1)[:, None])


def best_split(graph: AndOr, start: Split, best: Derivation, seconds: float = math.inf) -> tuple[Split, Floats]:
    """The split of highest bound, and how much of each arc the relaxation takes (arcs,).

    What no derivation cheaper than ``best`` can have is left out; its share is so high that whatever has it is above
    ``best``. If that leaves no derivation, the bound is infinite. ``start`` and nothing taken if it takes longer than
    ``seconds``.
    """
    began, taken = time.monotonic(), np.zeros(len(graph.arcs))
    if not start.leaves_room(best):
        return start, taken
    program = _Program(graph, start.useful(best), best.price)
    left = seconds - (time.monotonic() - began)
    if left <= 0:
        return start, taken
    done = program.solve(left)
    if done.status == _INFEASIBLE:
        return replace(start, bound=math.inf), taken
    if done.status != 0:
        return start, taken
    share, toll = program.split(np.maximum(-done.ineqlin.marginals, 0.0))
    np.maximum.at(taken, program.arc, done.x[: len(program.arc)])
    found = Split.of(graph, share, toll)
    return (found if found.bound > start.bound else start), taken


class _Program:
    """The linear program. Prices are in units of the best one known, weights in units of the heaviest.

    Variables: ``u`` of each (arc, goal) in ``useful``, then ``z`` of each arc that several goals can use. Rows: the
    budget if there is one, ``u <= z`` of those arcs, then of each item and goal that no more is used than made.
    """

    def __init__(self, graph: AndOr, useful: Bools, top: float) -> None:
        self._graph, self._useful, self._top = graph, useful, top
        self.arc, self._goal = np.nonzero(useful)
        several = useful.sum(axis=1) > 1
        self._common = np.flatnonzero(several[self.arc])
        # Which variable pays for each u: itself, or the z of its arc.
        self._payer = np.arange(len(self.arc))
        self._payer[self._common] = len(self.arc) + (np.cumsum(several) - 1)[self.arc[self._common]]
        count = len(self.arc) + int(several.sum())
        self.cost, self._weight = np.zeros(count), np.zeros(count)
        self._heavy = float(graph.weights[self.arc].max(initial=0.0)) or 1.0
        self.cost[self._payer] = graph.prices[self.arc] / top
        self._weight[self._payer] = graph.weights[self.arc] / self._heavy
        self._first = int(math.isfinite(graph.budget))  # number of the row after the budget's
        self.matrix, self.limits = self._rows()

    def solve(self, seconds: float) -> Any:
        """What linprog says of it."""
        from scipy.optimize import linprog  # heavy; only when a plan is searched

        # There is little to presolve; devex is up to three times as fast here as steepest edges.
        options: dict[str, Any] = {"presolve": False, "simplex_dual_edge_weight_strategy": "devex"}
        if math.isfinite(seconds):
            options["time_limit"] = seconds
        sides = {"A_ub": self.matrix, "b_ub": self.limits}
        return linprog(self.cost, **sides, bounds=(0, None), method="highs-ds", options=options)

    def split(self, multipliers: Floats) -> tuple[Floats, float]:
        """Shares and toll of the multipliers of the rows, all in the graph's units."""
        graph, first = self._graph, self._first
        toll = self._top * float(multipliers[0]) / self._heavy if first else 0.0
        sums = graph.prices + toll * graph.weights
        of_pair = sums[self.arc]
        of_pair[self._common] = self._top * multipliers[first : first + len(self._common)]
        share = np.zeros(self._useful.shape)
        share[self.arc, self._goal] = of_pair
        # A solver keeps to the sums only nearly; a bound has to keep to them.
        total = share.sum(axis=1)
        share *= np.minimum(1.0, sums / np.where(total > 0, total, 1.0))[:, None]
        share[~self._useful] = self._top + (toll * graph.budget if toll else 0.0)
        return share, toll

    def _rows(self) -> tuple[csr_array, Floats]:
        """Left sides (rows, variables) and right sides (rows,): left <= right."""
        from scipy.sparse import csr_array

        graph, goals = self._graph, len(self._graph.goals)
        made, (user, below) = graph.made[self.arc] * goals + self._goal, self._uses()
        wanted = np.array(graph.goals) * goals + np.arange(goals)
        keys = np.unique(np.concatenate([made, below, wanted]))
        flow = self._first + len(self._common)
        limits = np.zeros(flow + len(keys))
        limits[flow + np.searchsorted(keys, wanted)] = -1.0
        limits[: self._first] = graph.budget / self._heavy
        entries = [
            *self._paid(),
            (flow + np.searchsorted(keys, made), np.arange(len(made)), np.full(len(made), -1.0)),
            (flow + np.searchsorted(keys, below), user, np.ones(len(user))),
        ]
        row, col, value = (np.concatenate(column) for column in zip(*entries, strict=True))
        return csr_array((value, (row, col)), shape=(len(limits), len(self.cost))), limits

    def _uses(self) -> tuple[Ints, Ints]:
        """Variables and the (item, goal) that they use, as numbers item x goals + goal."""
        graph = self._graph
        made = np.array([*map(bool, graph.of), False])
        user, side = np.nonzero(made[graph.parts[self.arc]])
        return user, graph.parts[self.arc[user], side] * len(graph.goals) + self._goal[user]

    def _paid(self) -> list[tuple[Ints, Ints, Floats]]:
        """Entries (row, variable, value) of the budget and of ``u <= z``."""
        heavy = np.flatnonzero(self._weight) if self._first else np.arange(0)
        rows = self._first + np.arange(len(self._common))
        return [
            (np.zeros_like(heavy), heavy, self._weight[heavy]),
            (rows, self._common, np.ones(len(rows))),
            (rows, self._payer[self._common], np.full(len(rows), -1.0)),
        ]

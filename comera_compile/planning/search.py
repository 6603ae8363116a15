"""The cheapest plan over a candidate DAG: which sets are computed, of what, and which are kept for the backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

from comera_compile.errors import PlanningError
from comera_compile.planning.and_or import AndOr, Arc, Derivation
from comera_compile.planning.branch import cheapest
from comera_compile.planning.candidates import Candidates, Pair, Price
from comera_compile.planning.layout import tensor_of
from comera_compile.planning.problem import Part, Problem
from comera_compile.planning.step import Step


@dataclass(frozen=True)
class Choice:
    """What a search found.

    Args:
        forward, backward: pairs of sets to contract, in order. A set may be made in both: it is then computed again.
        saved: sets that the forward computes and the backward reads, leaves left out.
        price: sum of the prices of all steps.
        saved_bytes: size of what is saved.
        optimal: whether no plan over the candidates is cheaper (False: the time limit came first).
    """

    forward: tuple[Pair, ...]
    backward: tuple[Pair, ...]
    saved: tuple[Part, ...]
    price: float
    saved_bytes: int
    optimal: bool


def search(
    candidates: Candidates,
    price: Price,
    *,
    itemsize: int = 4,
    saved_bytes: int | None = None,
    seconds: float = math.inf,
) -> Choice:
    """The plan of least total price that yields every output of the problem.

    Args:
        candidates: what may be computed.
        price: price of one step (seconds, FLOPs or bytes).
        itemsize: bytes of an element.
        saved_bytes: most bytes of intermediates that may be kept between forward and backward (None: any).
        seconds: time for the search, after which the best plan found so far is returned. Pricing comes on top.

    Raises:
        PlanningError: the limit is negative.
    """
    if saved_bytes is not None and saved_bytes < 0:
        raise PlanningError(f"saved_bytes must be at least 0, got {saved_bytes}")
    items = _Items(candidates, limited=saved_bytes is not None)
    arcs = items.arcs(price, itemsize)
    budget = math.inf if saved_bytes is None else float(saved_bytes)
    found = cheapest(AndOr(len(items.keys), [a for a, _ in arcs], items.goals(), budget), seconds)
    made = [(items.keys[arcs[k][0].item], arcs[k][1]) for k in found.arcs]
    return _choice(candidates.problem, made, found, itemsize)


Phase = bool  # whether an item is a set in the backward
Key = tuple[Part, Phase]


class _Items:
    """Sets as items of an and-or graph.

    Without a limit a set that both directions use is made once. With a limit it is two items, made apart, and an arc
    from the first to the second stands for saving it.
    """

    def __init__(self, candidates: Candidates, *, limited: bool) -> None:
        problem = candidates.problem
        self._candidates, self._limited = candidates, limited
        leaves = [1 << k for k in range(len(problem.leaves))]
        self.keys: list[Key] = [(p, False) for p in leaves]
        for part in candidates.pairs:  # ascending: what a set is made of comes before it
            if problem.in_forward(part):
                self.keys.append((part, False))
            if limited or not problem.in_forward(part):
                self.keys.append((part, True))
        self.number = {key: k for k, key in enumerate(self.keys)}

    def goals(self) -> list[int]:
        """Items of the outputs: those that exist in the forward are wanted there."""
        problem = self._candidates.problem
        return [self.number[o, not problem.in_forward(o)] for o in problem.outputs]

    def arcs(self, price: Price, itemsize: int) -> list[tuple[Arc, Pair | None]]:
        """Arcs in ascending order of their items, each with its pair (None: saving)."""
        problem = self._candidates.problem
        tensor = {part: tensor_of(problem, part) for part in {key[0] for key in self.keys}}
        prices: dict[Pair, float] = {}
        arcs: list[tuple[Arc, Pair | None]] = []
        for k, (part, late) in enumerate(self.keys):
            for pair in self._candidates.pairs.get(part, ()):
                if pair not in prices:
                    prices[pair] = float(price(Step(tensor[part], tensor[pair[0]], tensor[pair[1]])))
                arcs.append((Arc(k, tuple(self._at(p, late) for p in pair), prices[pair]), pair))
            if late and self._limited and problem.in_forward(part):
                arcs.append((Arc(k, (self.number[part, False],), 0.0, float(problem.numel(part) * itemsize)), None))
        return arcs

    def _at(self, part: Part, late: Phase) -> int:
        """Item of a part of something made in a phase."""
        return self.number.get((part, late), self.number.get((part, False), -1))


def _choice(problem: Problem, made: list[tuple[Key, Pair | None]], found: Derivation, itemsize: int) -> Choice:
    """Order the steps. Without a limit, what the forward's outputs do not need is computed in the backward."""
    pairs = {key: pair for key, pair in made if pair is not None}
    saving = {part for (part, late), pair in made if pair is None}
    early = _reach(pairs, [(o, False) for o in problem.outputs if problem.in_forward(o)] + [(p, False) for p in saving])
    forward = [pairs[key] for key in pairs if key in early and not key[1]]
    backward = [pairs[key] for key in pairs if key not in early or key[1]]
    there = {sum(pair) for pair in backward}
    read = {part for pair in backward for part in pair}
    saved = tuple(sum(p) for p in forward if sum(p) in read and sum(p) not in there)
    total = itemsize * sum(problem.numel(part) for part in saved)
    return Choice(tuple(forward), tuple(backward), saved, found.price, total, found.optimal)


def _reach(pairs: dict[Key, Pair], start: list[Key]) -> set[Key]:
    """Items below the given ones."""
    found, pending = set(start), list(start)
    while pending:
        pair = pairs.get(pending.pop())
        new = [(p, False) for p in pair or () if (p, False) not in found]
        found.update(new)
        pending += new
    return found

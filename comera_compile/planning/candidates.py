"""Which intermediates a plan may use: the candidate DAG of a problem.

Nodes are sets of leaves; each has the pairs it may be made of. Always in are the runs of neighbouring leaves along the
ring, every cut of each (core by core, any grouping of cores, both halves merged, the dense matrix and its gradient are
all among them), and the pairwise orders that opt_einsum finds best for each output alone, by FLOPs and by the largest
intermediate. Left out are sets that neither gives, such as x with a core from the middle of its side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import networkx as nx
import opt_einsum

from comera_compile.planning.layout import step_of, tensor_of
from comera_compile.planning.problem import Part, Problem
from comera_compile.planning.step import Step

Pair = tuple[Part, Part]
Price = Callable[[Step], float]


@dataclass(frozen=True)
class Candidates:
    """Every set that a plan of ``problem`` may compute, smaller ones first, with the pairs that make it."""

    problem: Problem
    pairs: dict[Part, tuple[Pair, ...]]

    def graph(self, price: Price) -> nx.DiGraph:
        """As a DAG for looking at: sets are nodes, and so is each pair, whose two parts point to it and it to its set.

        Set nodes have ``tensor``, ``shape``, ``numel`` and ``forward`` (whether it exists before the backward); pair
        nodes have ``step``, ``flops`` and ``price``.
        """
        graph = nx.DiGraph()
        size_of = self.problem.size_of
        for part in {*self.pairs, *(1 << k for k in range(len(self.problem.leaves)))}:
            tensor = tensor_of(self.problem, part)
            shape = tuple(size_of[a] for a in tensor.axes)
            forward = self.problem.in_forward(part)
            graph.add_node(part, tensor=tensor, shape=shape, numel=tensor.numel(size_of), forward=forward)
        for part, pairs in self.pairs.items():
            for pair in pairs:
                step = step_of(self.problem, pair)
                graph.add_node(pair, step=step, flops=step.flops(size_of), price=price(step))
                graph.add_edges_from([(pair[0], pair), (pair[1], pair), (pair, part)])
        return graph


def find_candidates(problem: Problem, *, proposals: bool = True) -> Candidates:
    """The candidate DAG, cut down to what some output can use.

    Args:
        problem: the network and its outputs.
        proposals: also ask opt_einsum for orders of each output.
    """
    pairs: dict[Part, dict[Pair, None]] = {}
    for part, pair in _ring_pairs(problem):
        pairs.setdefault(part, {})[pair] = None
    if proposals:
        for part, pair in _proposed_pairs(problem):
            pairs.setdefault(part, {})[pair] = None
    return Candidates(problem, _usable(problem, pairs))


def _ring_pairs(problem: Problem) -> Iterator[tuple[Part, Pair]]:
    count = len(problem.leaves)
    for length in range(2, count):
        for start in range(count):
            run = [1 << (start + k) % count for k in range(length)]
            for cut in range(1, length):
                first, second = sum(run[:cut]), sum(run[cut:])
                if all(problem.allowed(p) for p in (first, second, first | second)):
                    yield first | second, _ordered(first, second)


def _proposed_pairs(problem: Problem) -> Iterator[tuple[Part, Pair]]:
    symbols = {a: opt_einsum.get_symbol(k) for k, a in enumerate(problem.size_of)}
    sizes = {symbols[a]: max(1, size) for a, size in problem.size_of.items()}
    for output in problem.outputs:
        leaves = [k for k in range(len(problem.leaves)) if output >> k & 1]
        terms = [frozenset(symbols[a] for a in problem.leaves[k].axes) for k in leaves]
        wanted = frozenset(symbols[a] for a in problem.open_axes(output))
        for minimize in ("flops", "size"):
            search = opt_einsum.DynamicProgramming(minimize=minimize)
            yield from _path_pairs(problem, [1 << k for k in leaves], search(terms, wanted, sizes))


def _path_pairs(problem: Problem, parts: list[Part], path: Iterable[tuple[int, ...]]) -> Iterator[tuple[Part, Pair]]:
    """Pairs along a path of opt_einsum: positions of each pair are removed, the result is appended."""
    for positions in path:
        chosen = [parts[k] for k in positions]
        parts = [p for k, p in enumerate(parts) if k not in positions] + [sum(chosen)]
        if len(chosen) == 2 and all(problem.allowed(p) for p in (*chosen, sum(chosen))):
            yield sum(chosen), _ordered(*chosen)


def _ordered(first: Part, second: Part) -> Pair:
    """The operand with the lowest leaf first: one name a pair, and x ahead of what it meets."""
    return (first, second) if first & -first < second & -second else (second, first)


def _usable(problem: Problem, pairs: dict[Part, dict[Pair, None]]) -> dict[Part, tuple[Pair, ...]]:
    """What can be made from the leaves and is used by an output, smaller sets first."""
    makeable: dict[Part, tuple[Pair, ...]] = {}
    for part in sorted(pairs, key=lambda p: (p.bit_count(), p)):
        good = tuple(p for p in pairs[part] if all(_is_leaf(q) or q in makeable for q in p))
        if good:
            makeable[part] = good
    used = set(problem.outputs)
    for part in reversed(makeable):
        if part in used:
            used.update(q for pair in makeable[part] for q in pair)
    return {part: good for part, good in makeable.items() if part in used}


def _is_leaf(part: Part) -> bool:
    return part & (part - 1) == 0

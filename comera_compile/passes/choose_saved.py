"""Which tensors of a joint graph are saved for the backward, the rest being made again: a minimum cut.

A choice costs ``bytes saved + work again / rate``, both in bytes. The one that costs least is a minimum cut of the
forward's graph: what is made again lies behind it, on the side of the backward. As the rate rises, more is made again
and less is saved, one choice inside the next: that is the fixed order in which a limit on the bytes is met, so that a
smaller limit never saves more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import networkx as nx
from torch import fx

from comera_compile.passes.joint_graph import JointGraph, Piece

# Bytes' worth of work that one byte less to save may take. Rebuilding the output of a tensor-train layer from its bond
# takes 4 to 7, probabilities of attention 10, its output 14; a bond, or a dense layer's output, takes 50 and more.
FREE_RATE, MIN_RATE, _MOST_RATE = 3.0, 7.0, 30.0
_UNIT = 1024  # capacities are whole numbers: a byte is this much
# Layers are alike: of two, the earlier is rebuilt first, since its tensors would be kept longest.
_EARLIER = 0.5
_STEPS_PER_OCTAVE, _OCTAVES = 64, (-10, 40)
_SHORTEST_CHAIN = 2
_SMALL = 1 / 16  # of the largest tensor that is rebuilt: no matter for the peak
_NARROW, _CLOSE = 1 / 8, 3  # of a link's bytes; operations behind it


@dataclass(frozen=True)
class Choice:
    """What is saved.

    Args:
        saved: owners of the saved storages.
        again: operations that run once more in the backward, or there only.
        bytes: of the saved storages: unique, inputs of the graph left out, and states of random generators, which
            activation checkpointing makes torch save. Dynamic sizes count with their hints.
        work: of the operations that run again, in bytes moved.
    """

    saved: frozenset[fx.Node]
    again: frozenset[fx.Node]
    bytes: int
    work: float


class SavedTensors:
    """The choices for one joint graph, from saving everything to saving as little as possible."""

    def __init__(self, joint: JointGraph) -> None:
        self.pieces = _reaching(joint.pieces)
        self._kept = frozenset(p.node for p in self.pieces if p.kept)
        rebuilt = self.at_rate(_MOST_RATE).again
        self._kept |= _anchors(self.pieces, rebuilt)
        # The least choice would go back through bonds as well. Kept are some that no lower rate rebuilds either: the
        # choices stay one inside the next.
        self._kept |= _anchors(self.pieces, self.least().again) - rebuilt

    def at_rate(self, rate: float, kept: AbstractSet[fx.Node] = frozenset()) -> Choice:
        """The best choice where a byte less may take ``rate`` bytes' worth of work; ``kept`` are not rebuilt."""
        _, (_, behind) = nx.minimum_cut(self._network(rate, self._kept | kept), "source", "sink")
        again = frozenset(p.node for p in self.pieces if (p.node, 0) in behind)
        saved = [p for p in self.pieces if (p.node, 0) not in behind and (p.node, 1) in behind]
        total = sum(p.bytes or 0 for p in saved)
        work = sum(p.work or 0.0 for p in self.pieces if p.node in again)
        return Choice(frozenset(p.node for p in saved), again, total, work)

    def lowest_peak(self) -> Choice:
        """What saves most at the peak of the backward for little time."""
        return self.at_rate(MIN_RATE, _first(self.pieces, self.at_rate(MIN_RATE).again))

    def within(self, limit: int) -> Choice | None:
        """The choice with the least work of those that save at most ``limit`` bytes, or None."""
        low, high = (_STEPS_PER_OCTAVE * octave for octave in _OCTAVES)
        best: Choice | None = None
        while low <= high:
            middle = (low + high) // 2
            found = self.at_rate(2.0 ** (middle / _STEPS_PER_OCTAVE))
            if found.bytes <= limit:
                best, high = found, middle - 1
            else:
                low = middle + 1
        return best

    def least(self) -> Choice:
        """The choice that saves least."""
        return self.at_rate(2.0 ** _OCTAVES[1])

    def _network(self, rate: float, kept: AbstractSet[fx.Node]) -> nx.DiGraph:
        network = nx.DiGraph()
        network.add_nodes_from(("source", "sink"))
        for position, piece in enumerate(self.pieces):
            before, after = (piece.node, 0), (piece.node, 1)
            network.add_edge(before, after, **_capacity(piece.bytes))
            if piece.forced:
                network.add_edge(before, "sink")
            elif piece.work is None or piece.node in kept:
                network.add_edge("source", before)
            else:
                later = 1.0 + _EARLIER * position / len(self.pieces)
                network.add_edge("source", before, **_capacity(piece.work * later / rate))
            if piece.read is not None:
                network.add_edge(after, "sink")
            network.add_edges_from(((i, 1), before) for i in piece.inputs)
        return network


def _capacity(size: float | None) -> dict[str, int]:
    """Attributes of an edge; one without a capacity cannot be cut."""
    return {} if size is None else {"capacity": math.ceil(size * _UNIT)}


def _reaching(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The pieces that the backward needs, directly or to make another one."""
    wanted: set[fx.Node] = set()
    for piece in reversed(pieces):
        if piece.read is not None or piece.node in wanted:
            wanted.update((piece.node, *piece.inputs))
    return tuple(p for p in pieces if p.node in wanted)


def _first(pieces: Sequence[Piece], again: AbstractSet[fx.Node]) -> frozenset[fx.Node]:
    """The first large tensor that the backward would rebuild, with the products that it is made from.

    When the backward gets there everything else is still saved: this is the peak. Rebuilt or saved, the tensor is part
    of it, so rebuilding takes time for nothing.
    """
    read = [p for p in _large(pieces, again, 0.5) if p.read is not None and not p.forced]
    found = {p.node for p in sorted(read, key=lambda p: p.read or 0)[:1]}
    for piece in reversed(pieces):
        if piece.node in found and not piece.is_product:
            found.update(i for i in piece.inputs if i in again)
    large = {p.node for p in _large(pieces, again, 0.5) if p.is_product or p.read is not None}
    return frozenset(found & large)


def _anchors(pieces: Sequence[Piece], again: AbstractSet[fx.Node]) -> frozenset[fx.Node]:
    """Tensors to save so that no long chain is rebuilt link by link, such as a residual stream from its beginning.

    All links of a chain live at once while the backward goes back through it, so rebuilding all of it saves nothing at
    the peak. Of a chain of n every (root of n)-th link is kept, which minimizes kept plus rebuilt ones.
    """
    links = {p.node for p in _large(pieces, again, _SMALL) if p.read is not None}
    inner = links & _continued(pieces, links, again)
    lengths, _ = _chains(pieces, links, {}, again, 0)
    longest = max(_SHORTEST_CHAIN, math.isqrt(max(lengths.values(), default=0)))
    instead = {node: _narrower(node, pieces, again) for node in inner}
    return frozenset(_chains(pieces, links, instead, again, longest)[1])


def _large(pieces: Sequence[Piece], again: AbstractSet[fx.Node], share: float) -> list[Piece]:
    """What is rebuilt and has at least a share of the bytes of the largest that is; parts of results left out."""
    rebuilt = [p for p in pieces if p.node in again and p.node.target is not operator.getitem]
    largest = max((p.bytes or 0 for p in rebuilt), default=0)
    return [p for p in rebuilt if (p.bytes or 0) >= share * largest]


def _continued(
    pieces: Sequence[Piece], links: AbstractSet[fx.Node], again: AbstractSet[fx.Node]
) -> AbstractSet[fx.Node]:
    """Nodes from which a link further on is rebuilt."""
    found: set[fx.Node] = set()
    for piece in reversed(pieces):
        if piece.node in again and (piece.node in links or piece.node in found):
            found.update(i for i in piece.inputs if i in again)
    return found


def _narrower(node: fx.Node, pieces: Sequence[Piece], again: AbstractSet[fx.Node]) -> fx.Node:
    """A much smaller tensor close behind a link, such as a bond, if the chain goes through it only; else the link."""
    rebuilt = [p for p in pieces if p.node in again]
    size = next(p.bytes or 0 for p in rebuilt if p.node is node)
    here = node
    for _ in range(_CLOSE):
        readers = [p for p in rebuilt if here in p.inputs]
        if len(readers) != 1 or readers[0].node.target is operator.getitem:
            break
        here = readers[0].node
        if 0 < (readers[0].bytes or 0) <= _NARROW * size:
            return here
    return node


def _chains(
    pieces: Sequence[Piece],
    links: AbstractSet[fx.Node],
    instead: Mapping[fx.Node, fx.Node],
    again: AbstractSet[fx.Node],
    longest: int,
) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """Links of the chain up to each node, and what is kept so that no chain is longer than ``longest``.

    Where a link that has an entry in ``instead`` would be one too many, the chain ends at that entry.
    """
    lengths: dict[fx.Node, int] = {}
    kept: set[fx.Node] = set()
    for piece in (p for p in pieces if p.node in again):
        length = max((lengths.get(i, 0) for i in piece.inputs), default=0) + (piece.node in links)
        if length > longest and piece.node in instead and not piece.forced:
            kept.add(instead[piece.node])
        lengths[piece.node] = 0 if piece.node in kept else length
    return lengths, kept

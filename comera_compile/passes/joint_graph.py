"""What a joint forward-and-backward graph holds: the tensors that could be saved, and what making each again takes.

Work is counted in bytes: the time of an operation times the memory bandwidth. Saving a tensor moves its bytes as well,
so the two compare. What is saved must not depend on the machine: the figures are the same everywhere.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from comera_compile import torch_partition, torch_private
from comera_compile.torch_partition import hinted_bytes, storage_owners

# What activation checkpointing writes on nodes, and with which meaning.
RECOMPUTE, REGION = "recompute", "ac_graph_id"
AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)

# Operations in the time that a byte takes, for a large product; half of it where the smallest size is this.
_FLOPS_PER_BYTE, _HALF_RATE_SIZE = 5.6, 12
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})
# Operators of this package, all of them products.
_OWN = frozenset({"narrow", "wide"})
# Functions that take longer than moving their operands, and how many times as long.
_COSTLY, _COSTLY_PASSES = {"exp", "erf", "tanh", "gelu", "silu", "sigmoid", "log", "pow", "sin", "cos", "_softmax"}, 3.0
# Operations that give the same result each time and are no pointwise functions of their inputs.
_REPEATABLE = _PRODUCTS | set(
    "sum mean amax amin max min var var_mean std any all argmax argmin logsumexp native_layer_norm native_group_norm "
    "_fused_rms_norm _softmax _log_softmax _safe_softmax prepare_softmax_online full full_like ones ones_like zeros "
    "zeros_like new_zeros new_ones new_full new_empty empty empty_like arange iota scalar_tensor tril triu eye clone "
    "_to_copy convert_element_type cat stack index_select index gather embedding constant_pad_nd flip roll repeat "
    "where masked_fill copy fill lift_fresh_copy nll_loss_forward".split()
)
_ONLY_ONCE = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


@dataclass(frozen=True)
class Piece:
    """A storage that the forward makes (with all views of it), or an operation with several results.

    Args:
        node: the operation that makes it.
        bytes: of the storage; None for an operation with several results, whose parts are pieces of their own.
        work: of making it again, in bytes moved; None where that cannot be done (random numbers, opaque operations).
        inputs: owners of the pieces it is made from; inputs of the graph are always there and left out.
        read: position in the graph of the first operation of the backward that reads it; None where none does.
        forced: it is made in the backward: activation checkpointing says so, or the forward has no use for it.
        kept: activation checkpointing says that it is saved.
    """

    node: fx.Node
    bytes: int | None
    work: float | None
    inputs: tuple[fx.Node, ...]
    read: int | None
    forced: bool
    kept: bool

    @property
    def is_product(self) -> bool:
        """Whether it is made by a matrix product."""
        return is_product(self.node)


@dataclass(frozen=True)
class JointGraph:
    """The forward part of a joint graph.

    Args:
        pieces: in the order of the graph.
        owners: the piece that each operation's result lives in; without views of inputs of the graph.
        backward: nodes that depend on a gradient coming in.
        results: what the backward returns.
    """

    pieces: tuple[Piece, ...]
    owners: dict[fx.Node, fx.Node]
    backward: frozenset[fx.Node]
    results: frozenset[fx.Node]


def read_joint_graph(graph: fx.Graph, forward_outputs: int) -> JointGraph:
    """Every storage that the forward makes, what it is made from, what that takes, and when the backward reads it.

    Args:
        graph: as AOTAutograd traces it, without common subexpressions.
        forward_outputs: how many of its outputs belong to the forward.
    """
    (output,) = graph.find_nodes(op="output")
    ends = tree_leaves(output.args)
    results = frozenset(n for n in ends[forward_outputs:] if isinstance(n, fx.Node))
    backward = _backward_nodes(graph)
    nodes = [n for n in graph.nodes if n.op == "call_function" and n not in backward and not is_size(n)]
    owners = storage_owners(nodes)
    facts = _Facts(
        owners,
        _first_reads(graph, backward, results, owners),
        ahead=_ancestors(n for n in ends[:forward_outputs] if isinstance(n, fx.Node)),
        crossing={owners[n] for n in nodes if n in owners and _leaves_its_region(n)},
        overwritten=torch_partition.written_inputs(graph),
    )
    pieces = tuple(_piece(n, facts) for n in nodes if n in owners and owners[n] is n)
    return JointGraph(pieces, owners, frozenset(backward), results)


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number: sizes are saved apart from tensors and take nothing."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def is_product(node: fx.Node) -> bool:
    """Whether a node is a matrix product."""
    op = torch_partition.operator_of(node)
    return op is not None and (op.name in _PRODUCTS or _is_own(op))


@dataclass(frozen=True)
class _Facts:
    """What makes a piece of a node."""

    owners: dict[fx.Node, fx.Node]
    reads: dict[fx.Node, int]
    ahead: set[fx.Node]  # what the forward needs
    crossing: set[fx.Node]  # what goes from one checkpointed region into another
    overwritten: set[fx.Node]  # inputs


def _piece(node: fx.Node, facts: _Facts) -> Piece:
    value, said = node.meta.get("val"), node.meta.get(RECOMPUTE)
    # One of several results comes to be with the others, and no tag makes torch save it.
    part = node.target is operator.getitem
    crossing = node in facts.crossing
    return Piece(
        node=node,
        bytes=None if isinstance(value, (tuple, list)) else hinted_bytes(value),
        work=None if facts.overwritten.intersection(node.all_input_nodes) else _work(node),
        inputs=tuple(dict.fromkeys(facts.owners[n] for n in node.all_input_nodes if n in facts.owners)),
        read=facts.reads.get(node),
        forced=(said in AGAIN and not crossing) or not (node in facts.ahead or part),
        kept=not part and (said is CheckpointPolicy.MUST_SAVE or crossing),
    )


def _first_reads(
    graph: fx.Graph, backward: set[fx.Node], results: Iterable[fx.Node], owners: dict[fx.Node, fx.Node]
) -> dict[fx.Node, int]:
    found: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.nodes):
        if node in backward:
            for owner in (owners[n] for n in node.all_input_nodes if n in owners):
                found.setdefault(owner, position)
    for owner in (owners[n] for n in results if n in owners):
        found.setdefault(owner, len(graph.nodes))
    return found


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _leaves_its_region(node: fx.Node) -> bool:
    """Whether a result of one checkpointed region goes straight into another: torch saves what crosses the border."""
    users = [u for u in node.users if u.meta.get(RECOMPUTE) in AGAIN]
    return node.meta.get(RECOMPUTE) in AGAIN and any(u.meta.get(REGION, 0) > node.meta.get(REGION, 0) for u in users)


def _backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on a gradient coming in, and writes that belong to the backward."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        starts = torch_partition.is_tangent(node) or torch_partition.is_backward_write(node)
        if starts or (node.op != "output" and any(n in found for n in node.all_input_nodes)):
            found.add(node)
    return found


def _is_repeatable(op: torch_partition.Operator) -> bool:
    once = op.writes or any(tag in op.tags for tag in _ONLY_ONCE)
    known = op.namespace in ("aten", "prims") and (torch.Tag.pointwise in op.tags or op.name in _REPEATABLE)
    return (known or _is_own(op)) and not once


def _is_own(op: torch_partition.Operator) -> bool:
    return op.namespace == "comera" and op.name in _OWN


def _work(node: fx.Node) -> float | None:
    """Bytes that could be moved in the time that an operation takes; None where it cannot be repeated."""
    if node.target is operator.getitem:
        return 0.0
    op = torch_partition.operator_of(node)
    if op is None or not (op.is_view or _is_repeatable(op)):
        return None
    result = hinted_bytes(node.meta.get("val"))
    passes = _COSTLY_PASSES if op.name in _COSTLY else 1.0
    if torch.Tag.pointwise in op.tags:
        return 0.5 * passes * result  # fused with its neighbours: only a part of the traffic is its own
    moved = passes * (result + sum(hinted_bytes(n.meta.get("val")) for n in node.all_input_nodes))
    return max(moved, _product_work(node, own=_is_own(op))) if is_product(node) else moved


def _product_work(node: fx.Node, *, own: bool) -> float:
    factors = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    # torch's have a summand ahead of both factors, this package's behind them, and its right one is [bond, size]
    left, right = factors[:2] if own else factors[-2:]
    result = node.meta["val"] if own else right
    sizes = [torch_private.size_hint(s) for s in (*left.shape, result.shape[-1])]
    narrow = min(sizes[-3:])
    return 2.0 * math.prod(sizes) / _FLOPS_PER_BYTE * (narrow + _HALF_RATE_SIZE) / max(1, narrow)

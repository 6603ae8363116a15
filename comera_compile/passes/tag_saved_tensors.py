"""A pass on the joint graph of forward and backward: tag what is saved between them and what is made again.

Tags are those of activation checkpointing (``node.meta["recompute"]``), which torch's partitioner obeys. Behind a
tensor-train layer, whose output is its bond ``h`` (rows x rank) times a matrix, the wide tensors are the cheap ones to
make again: through bias, activation, norm, residual sum and attention, from ``h``.
"""

from __future__ import annotations

from typing import Literal

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from comera_compile.errors import CompileError
from comera_compile.passes.choose_saved import FREE_RATE, Choice, SavedTensors
from comera_compile.passes.joint_graph import RECOMPUTE, REGION, JointGraph, is_size, read_joint_graph
from comera_compile.passes.order_backward import order_backward

Saved = Literal["auto", "min"]


def tag_saved_tensors(joint: fx.GraphModule, forward_outputs: int, *, saved: Saved, limit: int | None) -> Choice:
    """Choose what is saved, tag the forward part of a joint graph with it, and order the backward to suit.

    Args:
        joint: as AOTAutograd hands it to a partitioner, equal nodes merged; changed in place.
        forward_outputs: how many of its outputs belong to the forward.
        saved: ``"auto"`` makes again what takes no longer than saving it; ``"min"`` what takes little time.
        limit: bytes saved at most, or None.

    Returns:
        What was chosen; ``bytes`` is what the cut graph saves.

    Raises:
        CompileError: the limit cannot be met; the message names the smallest that can.
    """
    read = read_joint_graph(joint.graph, forward_outputs)
    choice = choose(read, saved=saved, limit=limit)
    _tag(joint.graph, read, choice)
    order_backward(joint, read)
    joint.recompile()
    return choice


def choose(read: JointGraph, *, saved: Saved, limit: int | None) -> Choice:
    """What is saved under these options; changes nothing.

    Raises:
        CompileError: the limit cannot be met; the message names the smallest that can.
    """
    choices = SavedTensors(read)
    choice = choices.lowest_peak() if saved == "min" else choices.at_rate(FREE_RATE)
    if limit is None or choice.bytes <= limit:
        return choice
    within = choices.within(limit)
    if within is None:
        least = choices.least().bytes
        raise CompileError(
            f"saved_bytes={limit} cannot be met: this graph has to save at least {least} bytes between forward and "
            f"backward. Set saved_bytes to {least} or more, or make the batch smaller"
        )
    return within


def _tag(graph: fx.Graph, read: JointGraph, choice: Choice) -> None:
    """Every operation of the forward is made again or saved where needed; views follow whoever reads them."""
    again: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node in read.backward or is_size(node):
            continue
        if read.owners.get(node) is node:
            repeated = node in choice.again
        else:  # a view: wherever it is read
            repeated = node in read.results or any(u in read.backward or u in again for u in node.users)
        if repeated:
            again.add(node)
        node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE if repeated else CheckpointPolicy.MUST_SAVE
        node.meta[REGION] = 0  # one for all: at the border of two, torch saves whatever crosses it

"""What passes write on graph nodes and code generation reads: a use of a packed weight, and its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from comera_compile.planning.linear_plan import Side

# Keys of ``node.meta``.
USE = "comera_use"
PLAN = "comera_plan"
# On the last linear use of a bridge, or of attention from bond to bond: what it is; on what runs as part of it: that.
BRIDGE, ATTEND, INSIDE = "comera_bridge", "comera_attend", "comera_inside"
# On the only operation of a graph, where it runs alone: how (``planning/alone.py``).
ALONE = "comera_alone"
# Key of ``node.meta["custom"]``, which AOTAutograd hands on to the operations that a node is traced into: a plan's.
BY_PLAN = "comera_by_plan"


@dataclass(frozen=True)
class TTUse:
    """One use of a packed weight.

    Args:
        kind: ``"linear"`` or ``"embedding"``.
        packed: node of the packed vector.
        layout: ``TTShape.encode()``.
        contracts: the side of the weight that is summed with x (``linear``).
        x: node of the activation or of the ids.
        bias: node of the bias, or None.
    """

    kind: Literal["linear", "embedding"]
    packed: fx.Node
    layout: str
    contracts: Side
    x: fx.Node
    bias: fx.Node | None


@dataclass(frozen=True)
class AttentionUse:
    """The inputs of scaled dot-product attention; two of them may be one node."""

    query: fx.Node
    key: fx.Node
    value: fx.Node


Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"]


@dataclass(frozen=True)
class BridgeUse:
    """Linear uses that run together with a last one, which reads ``act(value)``, or ``act(gate) * value``, dropped out.

    Args:
        value: the first linear use.
        gate: another one, or None.
        activation: act.
        dropout: probability with which each element of that is dropped; 0 for none.
        between: nodes between them and the last one, readers before what they read.
    """

    value: fx.Node
    gate: fx.Node | None
    activation: Activation
    dropout: float
    between: tuple[fx.Node, ...]

    @property
    def firsts(self) -> tuple[fx.Node, ...]:
        """The linear uses that it begins with."""
        return (self.value,) if self.gate is None else (self.value, self.gate)


@dataclass(frozen=True)
class AttendUse:
    """Linear uses, attention between heads of what they give, and a last linear use that reads all heads side by side.

    Args:
        projections: the linear uses that give q, k and v, of ``[batch, tokens, inputs]``: three, or fewer where columns
            of one are divided among them.
        rows: x of each, with these three axes.
        widths: columns of the parts of each.
        sides: of q, k and v each the number of the projection and of its part.
        mask: node of what is added to the scores, or of which of them count, or None.
        heads: of q; those of k and v, ``kv_heads``, divide them.
        causal: whether query i sees the keys up to i only.
        scale: factor of the scores.
        dropout: probability with which each weight of a key is dropped.
        flat: whether the last linear use has batch and tokens in one axis.
        between: nodes between the projections and the last use, readers before what they read.
    """

    projections: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    widths: tuple[tuple[int, ...], ...]
    sides: tuple[tuple[int, int], ...]
    mask: fx.Node | None
    heads: int
    kv_heads: int
    causal: bool
    scale: float
    dropout: float
    flat: bool
    between: tuple[fx.Node, ...]

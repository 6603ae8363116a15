"""What passes write on graph nodes and code generation reads: a use of a packed weight, and its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from comera_compile.planning.linear_plan import Side

# Keys of ``node.meta``.
USE = "comera_use"
PLAN = "comera_plan"
# On the last linear use of a bridge: what it is; on its first ones: that they run as part of it.
BRIDGE, INSIDE = "comera_bridge", "comera_inside"
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
    """Linear uses that run together with a last one, which reads ``act(value)``, or ``act(gate) * value``.

    Args:
        value: the first linear use.
        gate: another one, or None.
        activation: act.
        between: nodes between them and the last one, readers before what they read.
    """

    value: fx.Node
    gate: fx.Node | None
    activation: Activation
    between: tuple[fx.Node, ...]

    @property
    def firsts(self) -> tuple[fx.Node, ...]:
        """The linear uses that it begins with."""
        return (self.value,) if self.gate is None else (self.value, self.gate)

"""What was decided about each parameter and what was planned for it: read by ``comera.report``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from comera_compile.tt.shape import TTShape


@dataclass(frozen=True)
class Decision:
    """What became of one weight.

    Args:
        name: dotted name.
        shape: its tensor-train shape, or None if it stays dense.
        reason: how it was converted, or why it stays dense.
        kept: share of the weight's energy that the bond's rank keeps (None: not looked at).
        error: relative Frobenius error of the conversion (None: drawn, not approximated).
        dense_numel: elements of the dense weight.
        final: whether it holds from now on; False where a compiled graph may still show a use that decides.
    """

    name: str
    shape: TTShape | None
    reason: str
    dense_numel: int
    kept: float | None = None
    error: float | None = None
    final: bool = True

    @property
    def numel(self) -> int:
        """Elements that are trained."""
        return self.dense_numel if self.shape is None else self.shape.numel


@dataclass
class PlannedUse:
    """One planned use of a weight in one compiled graph."""

    plan: str
    rows: str
    flops: int | None
    saved_bytes: int | None


@dataclass
class Record:
    """A decision and the uses planned since."""

    decision: Decision
    uses: list[PlannedUse] = field(default_factory=list)


_records: Any = WeakIdKeyDictionary()


def record(parameter: torch.Tensor, decision: Decision) -> None:
    """Remember a decision; forgets earlier plans."""
    _records[parameter] = Record(decision)


def recall(parameter: torch.Tensor) -> Record | None:
    """What is known about a parameter."""
    found: Record | None = _records.get(parameter)
    return found


def is_settled(parameter: torch.Tensor) -> bool:
    """Whether a decision about a parameter holds, so that it is not to be looked at again."""
    known = recall(parameter)
    return known is not None and known.decision.final


def record_uses(parameter: torch.Tensor, uses: Sequence[PlannedUse]) -> None:
    """Remember the plans of the newest compiled graph that uses a parameter."""
    known = recall(parameter)
    if known is not None:
        known.uses = list(uses)


def forget(parameter: torch.Tensor) -> None:
    """Drop what is known, so that the parameter is looked at afresh."""
    if parameter in _records:
        del _records[parameter]

"""What was decided about each parameter and what was planned for it: read by ``comera.report``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """One planned use of a weight in one compiled graph.

    Args:
        plan: its name.
        rows: rows of x; a dynamic number as torch writes it.
        flops: operations of one step, merges of its own cores included (None: not known).
        saved_bytes: bytes that the plan would keep for the backward if nothing were made again.
        rows_hint: a concrete number of rows, at which the figures hold.
        seconds: predicted time of one step: forward, and all gradients where they are taken. Cores that are merged
            together with those of other layers are charged their share.
        dense_seconds: the same for the plain product with a dense weight, without the optimizer on either side.
    """

    plan: str
    rows: str
    flops: int | None
    saved_bytes: int | None
    rows_hint: int | None = None
    seconds: float | None = None
    dense_seconds: float | None = None


@dataclass(frozen=True)
class SavedBytes:
    """What one compiled graph keeps between forward and backward, predicted when it was cut, before it was lowered.

    Unique storages in bytes, inputs and parameters left out; a dynamic batch counts with the size it was compiled for.

    Args:
        planned: of tensors that plans made: merged cores, bonds, outputs of planned products, lookups and attention.
        rest: of all others.
    """

    planned: int
    rest: int

    @property
    def total(self) -> int:
        """Both."""
        return self.planned + self.rest

    def __str__(self) -> str:
        """One line."""
        return f"{self.total:,} bytes saved for the backward: {self.planned:,} made by plans, {self.rest:,} by the rest"


@dataclass
class GraphRecord:
    """One compiled graph; ``saved`` is None until it is cut, and where something else than this package cuts it."""

    saved: SavedBytes | None = None


@dataclass
class Record:
    """A decision and the uses planned since."""

    decision: Decision
    uses: list[PlannedUse] = field(default_factory=list)
    graph: GraphRecord | None = None


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


def record_graph(parameters: Iterable[torch.Tensor], graph: GraphRecord) -> None:
    """Remember the newest compiled graph that uses each of these parameters."""
    for parameter in parameters:
        known = recall(parameter)
        if known is not None:
            known.graph = graph


def forget(parameter: torch.Tensor) -> None:
    """Drop what is known, so that the parameter is looked at afresh."""
    if parameter in _records:
        del _records[parameter]

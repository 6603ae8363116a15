"""Plans that were measured on this machine: stored on disk for each layer, looked up when a graph is planned.

An entry holds for one layer (shape without its scale, side that meets x, training or not), device, number of threads,
torch version and dtype. In it, for every number of rows that was tuned: the plan that won, the rows that it holds for,
its neighbours there, and the seconds of every plan that was timed. ``planning/tuned_ranges.py`` has the rule by which
these become ranges of rows. Nothing is measured here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from comera_compile import user_cache
from comera_compile.calibrate import calibrated_model, device_text
from comera_compile.planning.choose import plan_from, plans_by_rows
from comera_compile.planning.cost import plan_cost
from comera_compile.planning.device_model import DeviceModel
from comera_compile.planning.linear_plan import LinearPlan, Side
from comera_compile.planning.row_ranges import RowRange
from comera_compile.planning.tuned_ranges import Span, plan_at, tuned_ranges
from comera_compile.tt.shape import TTShape

_log = logging.getLogger("comera_compile")

VERSION = 1  # of what is measured, of the plans there are, and of how both are stored
# Entries that could not be written: they hold for this process.
_unsaved: dict[str, dict[str, Any]] = {}
_said: set[str] = set()


@dataclass(frozen=True)
class Layer:
    """What plans are tuned for: layers that are equal in this share a plan.

    Args:
        shape: a ``tt`` shape whose scale is 1.0.
        contracts: the side of the weight that meets x.
        device_type, threads, dtype: what computes it, and in what.
        training: whether gradients are taken.
    """

    shape: TTShape
    contracts: Side
    device_type: str
    threads: int
    dtype: torch.dtype
    training: bool

    @property
    def key(self) -> str:
        """Key of the layer's entry on this device."""
        mode = "training" if self.training else "inference"
        on = device_text(self.device_type, self.threads, self.dtype)
        return f"v{VERSION} | {on} | {mode} | {self.contracts} | {self.shape.encode()}"

    @property
    def device(self) -> DeviceModel:
        """The figures by which its plans are predicted."""
        return calibrated_model(self.device_type, self.threads, self.dtype)

    def predicted(self) -> tuple[RowRange, ...]:
        """Ranges of rows with the plans that are predicted to be best."""
        kind = self.device_type, self.threads, self.dtype.itemsize, self.training
        return plans_by_rows(self.shape, self.contracts, *kind, self.device, "time")

    def seconds(self, plan: LinearPlan, rows: int) -> float:
        """Predicted time of a plan."""
        return plan_cost(plan, rows, self.device, self.dtype.itemsize, training=self.training).seconds

    def __str__(self) -> str:
        """Such as ``768x3072 rank 32``: columns and rows of the matrix as it is applied, and its bond."""
        taken, given = self.shape.cols, self.shape.rows
        if self.contracts == "rows":
            taken, given = given, taken
        return f"{taken}x{given} rank {self.shape.bond}"


@dataclass(frozen=True)
class Tuned:
    """What was measured at one number of rows.

    Args:
        rows: where the plans were compared.
        plan: what runs from now on; the predicted plan, unless another one was ahead of it by more than the noise.
        predicted: the plan that would run without this measurement.
        low, high: the rows that ``plan`` holds for.
        neighbours: plans measured to be faster next to that.
        seconds: median time of each plan compared, by its text.
        noise: quartiles over median of the times of one plan.
    """

    rows: int
    plan: LinearPlan
    predicted: LinearPlan
    low: int
    high: int
    neighbours: tuple[Span, ...]
    seconds: Mapping[str, float]
    noise: float

    @property
    def spans(self) -> tuple[Span, ...]:
        """The rows at which this changes the choice."""
        return Span(self.low, self.high, self.plan, self.rows), *self.neighbours


def store(layer: Layer, tuned: Tuned) -> bool:
    """Add a measurement to those of the layer; an earlier one at the same rows goes.

    Returns:
        Whether it is on disk; otherwise it holds until this process ends.
    """
    entry = {str(tuned.rows): _to_json(tuned)}

    def add(held: dict[str, Any] | None) -> dict[str, Any]:
        # What cannot be used is not carried on.
        kept = {str(t.rows): _to_json(t) for t in _read(layer, held or {})}
        return {"tuned": {**kept, **entry}}

    if user_cache.update("plans", layer.key, add) is not None:
        return True
    _unsaved[layer.key] = add(_unsaved.get(layer.key))
    return False


def stored(layer: Layer) -> list[Tuned]:
    """The usable measurements of a layer, by rows; what is stored but makes no sense is ignored with a warning."""
    key = layer.key
    found = {t.rows: t for held in (_unsaved.get(key), user_cache.load("plans", key)) for t in _read(layer, held)}
    return [found[rows] for rows in sorted(found)]


def is_tuned(layer: Layer, rows: int) -> bool:
    """Whether a measurement decides what runs at these rows."""
    return any(t.low <= rows <= t.high for t in stored(layer))


def ranges_for(layer: Layer, predicted: Sequence[RowRange], rows: int | None = None) -> tuple[RowRange, ...]:
    """The predicted ranges as measurements change them.

    Args:
        layer: what is planned.
        predicted: its predicted ranges.
        rows: the number of rows where it is known: then there is one range, and none of few plans had to be given up.
    """
    spans = [span for tuned in stored(layer) for span in tuned.spans]
    if rows is not None:
        return (RowRange(None, plan_at(rows, predicted, spans)),)

    def prefer(rows: int, one: LinearPlan, other: LinearPlan) -> LinearPlan:
        return min(one, other, key=lambda plan: layer.seconds(plan, rows))

    return tuned_ranges(predicted, spans, prefer)


def _to_json(tuned: Tuned) -> dict[str, Any]:
    return {
        "plan": tuned.plan.encode(),
        "predicted": tuned.predicted.encode(),
        "rows": [tuned.low, tuned.high],
        "neighbours": [[s.low, s.high, s.plan.encode()] for s in tuned.neighbours],
        "seconds": dict(tuned.seconds),
        "noise": tuned.noise,
    }


def _read(layer: Layer, held: Mapping[str, Any] | None) -> list[Tuned]:
    each = {} if held is None else held.get("tuned")
    if not isinstance(each, dict):
        each = {"?": each} if held else {}
    found = []
    for rows, value in each.items():
        try:
            found.append(_from_json(layer, rows, value))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            _warn_once(layer, f"{rows} rows: {error or type(error).__name__}")
    return found


def _from_json(layer: Layer, rows: str, value: Mapping[str, Any]) -> Tuned:
    def plan(text: object) -> LinearPlan:
        return plan_from(text, layer.shape, layer.contracts, layer.device_type)

    low, high = _limits(*value["rows"])
    neighbours = tuple(Span(*_limits(first, last), plan(text)) for first, last, text in value["neighbours"])
    seconds = {str(text): _positive(time) for text, time in value["seconds"].items()}
    tuned = Tuned(
        int(rows), plan(value["plan"]), plan(value["predicted"]), low, high, neighbours, seconds, float(value["noise"])
    )
    if not low <= tuned.rows <= high:
        raise ValueError(f"not within its own span {low} to {high}")
    return tuned


def _limits(low: object, high: object) -> tuple[int, int]:
    if type(low) is not int or type(high) is not int or not 1 <= low <= high:
        raise ValueError(f"expected two ascending numbers of rows, got {low!r} and {high!r}")
    return low, high


def _positive(seconds: object) -> float:
    if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ValueError(f"expected seconds, got {seconds!r}")
    return float(seconds)


def _warn_once(layer: Layer, text: str) -> None:
    if (about := f"{layer.key} {text}") not in _said:
        _said.add(about)
        _log.warning("comera: a stored plan of %s is ignored, the predicted one runs (%s): tune again", layer, text)

"""Measure the best few plans of a layer at its rows, and where others take over; keep what is ahead for sure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from comera_compile import tuned_plans
from comera_compile.calibrate import LARGEST_SPREAD, SMALLEST_SHARE
from comera_compile.paired_timing import Timing
from comera_compile.passes.graph_nodes import graph_modules, rows_of
from comera_compile.passes.plan_contractions import layer_of
from comera_compile.plan_timing import time_plans
from comera_compile.planning.choose import ranked_plans
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.row_ranges import RowRange
from comera_compile.planning.tuned_ranges import Span, plan_at
from comera_compile.planning.uses import USE, TTUse
from comera_compile.torch_private import size_hint
from comera_compile.tuned_plans import Layer, Tuned

_log = logging.getLogger("comera_compile")

FEW, WITHIN = 4, 3.0  # plans that are timed, and how far their predictions may lie above the best one
SURE = 1.01  # a plan replaces the predicted one where it is this much faster in three rounds of four
REACH = 8  # crossovers are looked for up to so many times the rows away
_MOST_ELEMENTS = 1 << 25  # of an activation, away from the rows at hand
_PROBES, _PROBE_SECONDS, _CLOSE = 8, 1.0, 1.15
# What was measured in this process and could not be used: not again in every compilation.
_refused: set[tuple[Layer, int]] = set()


@dataclass(frozen=True)
class Outcome:
    """One layer at one number of rows.

    Args:
        layer, rows: what was measured.
        predicted: the plan that would run without any measurement.
        measured: the plan that took least.
        plan: the plan that runs from now on.
        predicted_seconds, measured_seconds: median times of the first two.
        noise: quartiles over median of the times.
        stored: whether a later process finds the measurement.
        note: empty, or why ``plan`` is not the measured one, or is not stored.
    """

    layer: Layer
    rows: int
    predicted: LinearPlan
    measured: LinearPlan
    plan: LinearPlan
    predicted_seconds: float
    measured_seconds: float
    noise: float
    stored: bool
    note: str = ""

    @property
    def gain(self) -> float:
        """How many times faster the plan that runs is than the predicted one; 1.0 where that is kept."""
        return 1.0 if self.plan == self.predicted else self.predicted_seconds / self.measured_seconds


def tune_graph(graph_module: fx.GraphModule, *, threads: int, training: bool) -> fx.GraphModule:
    """Measure the layers of a graph tagged by ``find_tt_weights`` that nothing stored decides at their rows.

    The graph is not changed: the next pass finds the winners where they are stored.
    """
    for layer, rows in layers_of(graph_module, threads=threads, training=training):
        if (layer, rows) in _refused or tuned_plans.is_tuned(layer, rows):
            continue
        try:
            outcome = tune_layer(layer, rows)
        except torch.OutOfMemoryError:
            _log.warning("comera: no memory to tune %s at %d rows; the predicted plan runs", layer, rows)
            _refused.add((layer, rows))
            continue
        if not tuned_plans.is_tuned(layer, rows):
            _refused.add((layer, rows))
        note = f" ({outcome.note})" if outcome.note else ""
        _log.info("comera: tuned %s at %d rows: %s%s", layer, rows, outcome.plan.name, note)
    return graph_module


def layers_of(graph_module: fx.GraphModule, *, threads: int, training: bool) -> list[tuple[Layer, int]]:
    """The distinct linear layers of a tagged graph, with their rows (the hint of a symbolic number)."""
    uses = [n.meta.get(USE) for module in graph_modules(graph_module) for n in module.graph.nodes]
    linear = [use for use in uses if isinstance(use, TTUse) and use.kind == "linear"]
    found = [(layer_of(use, threads=threads, training=training), size_hint(rows_of(use.x))) for use in linear]
    return [pair for pair in dict.fromkeys(found) if pair[1] > 0]


def tune_layer(layer: Layer, rows: int) -> Outcome:
    """Measure the best few plans of a layer, and store the winner and what holds next to it.

    On a busy machine (the times of one plan spread by more than 25 %, or the process got less than 85 % of one
    processor) nothing is stored, with a warning.
    """
    ranges = layer.predicted()
    predicted = plan_at(rows, ranges)
    plans = _shortlist(layer, rows, ranges)
    timing = time_plans(layer, rows, plans)
    medians = {plan: timing.median(plan.encode()) for plan in plans}
    measured = min(medians, key=medians.__getitem__)
    plan, note, stored = measured, "", False
    if measured != predicted and timing.speedup(measured.encode(), predicted.encode()).low <= SURE:
        plan, note = predicted, "lead within the noise"
    if (fault := _fault(timing)) is not None:
        plan, note = predicted, f"not kept: {fault}"
        _log.warning(
            "comera: tuning of %s at %d rows is not kept: %s. Other programs are running, or there are more threads "
            "than free cores: stop them or use fewer threads, and tune again",
            *(layer, rows, fault),
        )
    else:
        low, high, neighbours = _span(layer, rows, plan, ranges)
        seconds = {p.encode(): s for p, s in medians.items()}
        found = Tuned(rows, plan, predicted, low, high, neighbours, seconds, timing.noise)
        stored = tuned_plans.store(layer, found)
        note = note if stored else "; ".join(filter(None, (note, "not on disk: it holds for this process")))
    times = medians[predicted], medians[measured]
    return Outcome(layer, rows, predicted, measured, plan, *times, timing.noise, stored, note)


def _fault(timing: Timing) -> str | None:
    """Why times are of no use."""
    if timing.noise > LARGEST_SPREAD:
        return f"times of one plan spread by {timing.noise:.0%} (quartiles over median; at most {LARGEST_SPREAD:.0%})"
    share = timing.share(1)
    if timing.processor and share < SMALLEST_SHARE:
        return f"the process got {share:.0%} of one processor (at least {SMALLEST_SHARE:.0%})"
    return None


def _shortlist(layer: Layer, rows: int, ranges: tuple[RowRange, ...]) -> list[LinearPlan]:
    """The plan that would run, the best few by prediction, and the plans next to it."""
    kind = layer.device_type, layer.threads, layer.dtype.itemsize, layer.training
    ranked = ranked_plans(layer.shape, layer.contracts, *kind, rows, layer.device)
    best = layer.seconds(ranked[0], rows)
    predicted = plan_at(rows, ranges)
    near = [found[0] for way in (-1, 1) if (found := _neighbour(rows, predicted, ranges, way))]
    asked = [plan for plan in (*ranked[:FEW], *near) if layer.seconds(plan, rows) <= WITHIN * best]
    return list(dict.fromkeys([predicted, *asked]))


def _neighbour(rows: int, plan: LinearPlan, ranges: tuple[RowRange, ...], way: int) -> tuple[LinearPlan, int] | None:
    """The plan predicted next to ``plan`` below (-1) or above (1) some rows, and where it may take over from it."""
    k = next(k for k, r in enumerate(ranges) if r.up_to is None or rows <= r.up_to)
    before, up_to = (ranges[k - 1].up_to or 0) if k else 0, ranges[k].up_to
    if ranges[k].plan != plan:  # another one was measured to be better here; the prediction may hold nearby
        return ranges[k].plan, max(before + 1, rows // 2) if way < 0 else min(2 * rows, up_to or 2 * rows)
    if way < 0:
        return (ranges[k - 1].plan, before) if k else None
    return None if up_to is None else (ranges[k + 1].plan, up_to + 1)


def _span(layer: Layer, rows: int, plan: LinearPlan, ranges: tuple[RowRange, ...]) -> tuple[int, int, tuple[Span, ...]]:
    """First and last rows that a plan holds for, and its neighbours where they were measured."""
    limits, neighbours = {-1: -(-rows // 2), 1: 2 * rows}, []
    largest = max(rows, _MOST_ELEMENTS // max(layer.shape.rows, layer.shape.cols))
    farthest = {-1: max(1, rows // REACH), 1: min(rows * REACH, largest)}
    for way in (-1, 1):
        found = _neighbour(rows, plan, ranges, way)
        if found is None or way * found[1] > way * farthest[way] or found[1] == rows:
            continue
        other, start = found
        last, lost = crossover(_lead(layer, plan, other), rows, start, farthest[way])
        if lost is None:
            limits[way] = (min if way < 0 else max)(limits[way], last)
            continue
        limits[way] = last
        low, high = sorted((last + way, lost))
        neighbours.append(Span(low, high, other))
    return limits[-1], limits[1], tuple(neighbours)


Lead = Callable[[int], float | None]


def _lead(layer: Layer, plan: LinearPlan, other: LinearPlan) -> Lead:
    """Logarithm of how many times faster ``plan`` is than ``other``, by rows; None where times are of no use."""

    def lead(rows: int) -> float | None:
        timing = time_plans(layer, rows, [plan, other], seconds=_PROBE_SECONDS)
        return math.log(timing.speedup(plan.encode(), other.encode()).median) if _fault(timing) is None else None

    return lead


def crossover(lead: Lead, rows: int, start: int, farthest: int) -> tuple[int, int | None]:
    """Where a plan that is ahead at ``rows`` loses its lead, by few measurements from ``start`` on.

    Args:
        lead: positive where the plan is ahead, negative where its neighbour is; None ends the search.
        rows: where the plan is ahead; not measured again.
        start: where the neighbour is predicted to take over: above or below ``rows``.
        farthest: no rows beyond this are measured.

    Returns:
        The last rows on the way that are the plan's, and the farthest at which its neighbour was measured ahead (None:
        nowhere). Between the nearest two measurements of either, the crossover lies where the lead is nil on a straight
        line in the logarithm of the rows.
    """
    inside: tuple[int, float | None] = (rows, None)
    outside: tuple[int, float] | None = None
    lost: int | None = None
    at: int | None = start
    for _ in range(_PROBES):
        if at is None or (value := lead(at)) is None:
            break
        if value > 0:
            inside = at, value
        else:
            outside = at, value
            lost = at if lost is None else lost
        at = _next(inside[0], None if outside is None else outside[0], farthest)
    return (inside[0] if outside is None else _between(inside, outside)), lost


def _next(inside: int, outside: int | None, farthest: int) -> int | None:
    """Where to measure next; None where the crossover is known well enough, or is not to be found."""
    if outside is None:
        further = min(2 * inside, farthest) if farthest > inside else max(inside // 2, farthest)
        return None if further == inside else further
    middle = math.isqrt(inside * outside)
    middle += middle == min(inside, outside)
    close = max(inside, outside) <= _CLOSE * min(inside, outside)
    return None if close or middle in (inside, outside) else middle


def _between(inside: tuple[int, float | None], outside: tuple[int, float]) -> int:
    """The last rows, from inside on, where a straight line through two leads is positive."""
    ahead, behind = inside[1], outside[1]
    # Where the plan has not been measured against this neighbour, half way.
    share = 0.5 if ahead is None else ahead / (ahead - behind)
    at = math.exp(math.log(inside[0]) + share * math.log(outside[0] / inside[0]))
    if inside[0] < outside[0]:
        return max(inside[0], min(math.floor(at), outside[0] - 1))
    return min(inside[0], max(math.ceil(at), outside[0] + 1))

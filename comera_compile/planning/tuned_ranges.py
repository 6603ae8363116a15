"""How measured plans change the predicted choice: each holds around the rows at which it was measured.

The rule. Where the rows lie within the span of a tuned plan, that plan runs; of two such spans, that of the nearer
tuned rows (by ratio). A span ends where a neighbouring plan was measured to become faster, and that neighbour holds as
far as it was measured ahead; without such a measurement a span is half to twice the rows. Everywhere else the
prediction stands. On a symbolic number of rows there are three ranges at most: the narrowest (by ratio) are given to a
neighbour, first those in which nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.row_ranges import RowRange, joined, plan_in

MOST_RANGES = 3
# Which of two plans to prefer at so many rows.
Prefer = Callable[[int, LinearPlan, LinearPlan], LinearPlan]


@dataclass(frozen=True)
class Span:
    """A plan measured to be best from ``low`` to ``high`` rows.

    Args:
        low, high: the first and the last number of rows, 1 <= low <= high.
        plan: what runs there.
        rows: where all plans were compared; None: the plan is a neighbour, compared with the best one only.
    """

    low: int
    high: int
    plan: LinearPlan
    rows: int | None = None

    def holds(self, rows: int) -> bool:
        """Whether a number of rows lies within the span."""
        return self.low <= rows <= self.high


def plan_at(rows: int, predicted: Sequence[RowRange], spans: Iterable[Span] = ()) -> LinearPlan:
    """The plan for one number of rows."""
    near = [span for span in spans if span.holds(rows)]
    if near:
        return min(near, key=lambda span: _distance(span, rows)).plan
    return plan_in(predicted, rows)


def _distance(span: Span, rows: int) -> tuple[bool, float, int]:
    """Neighbours come last, the narrowest of them first; of two as far, the lower one."""
    if span.rows is None:
        return True, span.high / span.low, span.low
    return False, max(rows, span.rows) / max(1, min(rows, span.rows)), span.rows


def tuned_ranges(predicted: Sequence[RowRange], spans: Sequence[Span], prefer: Prefer) -> tuple[RowRange, ...]:
    """Ranges of rows, ascending, at most three where spans change the predicted ones.

    Args:
        predicted: ranges from :func:`plans_by_rows`.
        spans: what was measured, in any order.
        prefer: the better of two plans by prediction, for a range that is given up.
    """
    if not spans:
        return tuple(predicted)
    ranges = joined([RowRange(end, plan_at(end, predicted, spans)) for end in _ends(predicted, spans)])
    ranges = [*ranges, RowRange(None, predicted[-1].plan)]
    ranges = joined(ranges)
    measured = [rows for span in spans for rows in ((span.low, span.high) if span.rows is None else (span.rows,))]
    while len(ranges) > MOST_RANGES:
        ranges = _without(_narrowest(ranges, measured), ranges, prefer)
    return tuple(ranges)


def _ends(predicted: Sequence[RowRange], spans: Sequence[Span]) -> list[int]:
    """Every number of rows after which another plan may run."""
    ends = {r.up_to for r in predicted if r.up_to is not None}
    ends |= {end for span in spans for end in (span.low - 1, span.high)}
    tuned = [span.rows for span in spans if span.rows is not None]
    ends |= {math.isqrt(a * b) for a in tuned for b in tuned if a < b}  # equally far from both
    return sorted(ends - {0})


def _narrowest(ranges: Sequence[RowRange], measured: Sequence[int]) -> int:
    """Position of the range to give up; never the last, which has no end."""

    def worth(k: int) -> tuple[bool, float]:
        first, last = _limits(ranges, k)
        return any(first <= rows <= last for rows in measured), (last + 1) / first

    return min(range(len(ranges) - 1), key=worth)


def _limits(ranges: Sequence[RowRange], k: int) -> tuple[int, int]:
    first = (ranges[k - 1].up_to or 0) + 1 if k else 1
    return first, ranges[k].up_to or first


def _without(k: int, ranges: Sequence[RowRange], prefer: Prefer) -> list[RowRange]:
    first, last = _limits(ranges, k)
    heir = ranges[k + 1].plan
    if k and prefer(math.isqrt(first * last), ranges[k - 1].plan, heir) == ranges[k - 1].plan:
        heir = ranges[k - 1].plan
    return joined([*ranges[:k], replace(ranges[k], plan=heir), *ranges[k + 1 :]])

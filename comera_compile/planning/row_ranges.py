"""Ranges of rows, each with the plan of one layer that runs there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from comera_compile.planning.linear_plan import LinearPlan

LARGEST_ROWS = 1 << 20  # stands for the end of the last range


@dataclass(frozen=True)
class RowRange:
    """A plan and the largest number of rows it is meant for (None: no limit)."""

    up_to: int | None
    plan: LinearPlan


def plan_in(ranges: Iterable[RowRange], rows: int) -> LinearPlan:
    """The plan of ascending ranges, the last without a limit, at so many rows."""
    return next(r.plan for r in ranges if r.up_to is None or rows <= r.up_to)


def joined(ranges: Sequence[RowRange]) -> list[RowRange]:
    """The same with neighbours of one plan as one range: no guard is needed between them."""
    return [r for r, after in zip(ranges, [*ranges[1:], None], strict=True) if after is None or r.plan != after.plan]

"""The rule by which measured plans change the predicted ranges."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from comera_compile.planning.choose import CPU_BOND_MULTIPLE
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.planning.row_ranges import RowRange
from comera_compile.planning.tuned_ranges import Span, plan_at, tuned_ranges
from comera_compile.tt.factorize import choose_shape

# Four plans of one layer; the rule never looks into them.
A, B, C, D = candidates(choose_shape(256, 256, format="tt", rank=16, order=3), "cols", CPU_BOND_MULTIPLE)[:4]
NAMES = {A: "A", B: "B", C: "C", D: "D"}
PREDICTED = (RowRange(40, A), RowRange(300, B), RowRange(None, C))


def first(rows: int, one: LinearPlan, other: LinearPlan) -> LinearPlan:
    """The plan that comes first in the alphabet."""
    return min(one, other, key=NAMES.__getitem__)


def shown(ranges: tuple[RowRange, ...]) -> list[tuple[int | None, str]]:
    return [(r.up_to, NAMES[r.plan]) for r in ranges]


def test_nothing_tuned_changes_nothing() -> None:
    assert tuned_ranges(PREDICTED, [], first) == PREDICTED
    assert [plan_at(n, PREDICTED) for n in (1, 40, 41, 300, 301)] == [A, A, B, B, C]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        # The measurement agrees with the prediction.
        ([Span(256, 1024, C, 512)], [(40, "A"), (255, "B"), (None, "C")]),
        # B holds from half of 40 rows on: below the predicted crossover.
        ([Span(20, 80, B, 40)], [(19, "A"), (300, "B"), (None, "C")]),
        # A neighbour that was measured to be faster moves the crossover of C from 300 to 500.
        ([Span(501, 2048, C, 1024), Span(300, 500, B)], [(40, "A"), (500, "B"), (None, "C")]),
        # Of A (5.4 octaves), B (1.3), D (2) and C, the narrowest untuned range, B, goes to the better neighbour.
        ([Span(100, 400, D, 200)], [(99, "A"), (400, "D"), (None, "C")]),
        # Spans that overlap part at the geometric middle of their rows.
        ([Span(1, 400, A, 100), Span(50, 800, C, 400)], [(200, "A"), (None, "C")]),
        # Up to two rows A was measured beside D: B, wider, has no measurement and goes.
        ([Span(3, 20, D, 10), Span(1, 2, A)], [(2, "A"), (20, "D"), (None, "C")]),
        # B holds beyond the predicted crossover.
        ([Span(150, 600, B, 300)], [(40, "A"), (600, "B"), (None, "C")]),
    ],
)
def test_by_hand(spans: list[Span], expected: list[tuple[int | None, str]]) -> None:
    assert shown(tuned_ranges(PREDICTED, spans, first)) == expected
    assert shown(tuned_ranges(PREDICTED, spans[::-1], first)) == expected  # the order does not matter


def test_four_tuned_plans_leave_three_ranges() -> None:
    spans = [Span(1, 8, A, 4), Span(9, 12, B, 10), Span(13, 100, C, 50), Span(101, 1000, D, 500)]
    found = tuned_ranges((RowRange(None, D),), spans, first)
    assert shown(found) == [(12, "A"), (100, "C"), (None, "D")]  # B was the narrowest and A is preferred to C
    # Where the rows are known, no plan is given up.
    assert [NAMES[plan_at(n, (RowRange(None, D),), spans)] for n in (4, 10, 50, 500)] == ["A", "B", "C", "D"]


def test_a_measurement_with_all_plans_outweighs_one_with_two() -> None:
    spans = [Span(10, 1000, A), Span(50, 200, B, 100)]
    assert [plan_at(n, PREDICTED, spans) for n in (49, 100, 201)] == [A, B, A]


def test_random_spans_keep_the_rule() -> None:
    draw = random.Random(0)
    for _ in range(60):
        spans = []
        for _ in range(draw.randint(1, 6)):
            rows = draw.randint(1, 400)
            low, high = draw.randint(max(1, rows // 4), rows), draw.randint(rows, 4 * rows)
            spans.append(Span(low, high, draw.choice([A, B, C, D]), draw.choice([rows, None])))
        found = tuned_ranges(PREDICTED, spans, first)
        limits = [r.up_to for r in found[:-1]]
        assert 1 <= len(found) <= 3 and found[-1].up_to is None
        assert limits == sorted(set(limits), key=lambda n: n or 0) and all(n is not None and n >= 1 for n in limits)
        assert all(one.plan != other.plan for one, other in pairwise(found))
        # Without a range given up, the ranges say of every number of rows what the rule says.
        rule = [plan_at(n, PREDICTED, spans) for n in range(1, 2001)]  # no span reaches further
        changes = sum(one != other for one, other in pairwise(rule))
        if changes <= 2:
            assert [plan_at(n, found) for n in range(1, 2001)] == rule

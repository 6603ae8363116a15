"""The benchmark of crossovers: which plans it times, where, and what its figures mean."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import crossovers
from benchmarks.crossovers import Line, Side, figures, sides
from benchmarks.linear_cases import Case
from comera_compile.paired_timing import Timing
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.planning.row_ranges import RowRange
from comera_compile.tuned_plans import Layer

A, B, C, D = candidates(Case(60, 48, 6, 10).shape, "cols", 8)[:4]


def test_each_plan_is_held_against_its_neighbour_inside_of_its_own_range() -> None:
    ranges = [RowRange(1, D), RowRange(40, A), RowRange(60, B), RowRange(None, C)]
    assert list(sides(ranges)) == [
        Side(40, 20, A, B),
        Side(40, 60, B, A),  # 80 rows are no longer B's
        Side(60, 41, B, C),  # 30 rows are not yet B's
        Side(60, 120, C, B),
    ]
    assert list(sides([RowRange(None, A)])) == []


def test_ratios_are_neighbour_over_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(768, 768, 32, 1)

    def timed(layer: Layer, rows: int, plans: list[LinearPlan], **limits: Any) -> Timing:
        plan = next(r.plan for r in layer.predicted() if r.up_to is None or rows <= r.up_to)
        assert plan == plans[0] and limits == {"rounds": 3, "seconds": 1.0}
        return Timing({plans[0].encode(): [1.0] * 3, plans[1].encode(): [2.0] * 3})

    monkeypatch.setattr(crossovers, "time_plans", timed)
    lines = crossovers.measure([case], rounds=3, seconds=1.0)
    assert len(lines) >= 2 and {line.ratio for line in lines} == {2.0}
    assert all(line.layer == "768x768_r32" and line.milliseconds == 1000.0 for line in lines)
    # by prediction each plan is the better one on its side, else it would not have been chosen
    assert all(line.predicted >= 1 for line in lines)
    crossovers.show(lines)


def test_figures_by_hand() -> None:
    lines = [Line("a", 40, 20, "A", "B", ratio, ratio, ratio, 1.2, 0.1) for ratio in (1.5, 0.96, 0.9, 1.3)]
    found = figures(lines)
    assert found["right"] == 0.75 and found["least_ratio"] == 0.9 and found["sides"] == 4
    assert math.isclose(found["median_ratio"], 1.13)


def test_layers_are_chosen_by_name_and_wrong_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert {case.rank for case in crossovers.parse(["--layers", "768x3072"]).cases} == {8, 16, 32, 64}
    with pytest.raises(SystemExit):
        crossovers.parse(["--layers", "r33"])
    assert "768x768_r32" in capsys.readouterr().err

"""Crossovers that all layers of a graph share: few, and where they cost least."""

from __future__ import annotations

from functools import cache

import pytest

from comera_compile.planning.choose import plans_by_rows
from comera_compile.planning.common_ranges import LayerRanges, common_ranges
from comera_compile.planning.cost import cost_by_rows, cpu_model
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.planning.row_ranges import RowRange
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.shape import TTShape

SHAPE = TTShape("tt", 8, 8, (4, 2), (2, 4), (1, 2, 3, 2, 1))
FIRST, SECOND, THIRD = candidates(SHAPE, "cols", 1)[:3]
# The encoder's layers, and others that a language model beside it might have.
SIZES = ((768, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 1024), (4096, 4096))


def layer(*limits: int, slope: float = 1.0) -> LayerRanges:
    """Plans that follow one another at these limits: each costs 100 where it is best, more the further from there."""
    plans = [FIRST, SECOND, THIRD][: len(limits) + 1]
    ends = [*limits, None]
    homes = {p: (low, high) for p, low, high in zip(plans, (1, *(n + 1 for n in limits)), ends, strict=True)}

    def cost(plan: LinearPlan, rows: int) -> float:
        low, high = homes[plan]
        away = max(0, low - rows, 0 if high is None else rows - high)
        return 100.0 + slope * min(away, 1000)

    return LayerRanges(tuple(RowRange(end, plan) for end, plan in zip(ends, plans, strict=True)), cost)


def limits_of(found: list[tuple[RowRange, ...]]) -> list[list[int]]:
    return [[r.up_to for r in ranges if r.up_to is not None] for ranges in found]


def test_what_is_few_enough_stays() -> None:
    # Three limits in all: every layer keeps its own choice. A crossover at a single row costs no compilation.
    layers = [layer(10, 40), layer(40), layer(1, 90)]
    assert common_ranges(layers) == [each.ranges for each in layers]


def test_the_limit_that_costs_least_goes() -> None:
    # 10 and 12: whichever goes, a layer runs two rows with the other plan, at a loss of 2 %; all others lie far apart.
    # Of the two layers the first is steeper, so it is the second that gives way.
    found = common_ranges([layer(10, 200, slope=2.0), layer(12, 500)])
    assert limits_of(found) == [[10, 200], [10, 500]]
    assert [r.plan for r in found[1]] == [FIRST, SECOND, THIRD]


def test_a_layer_may_lose_a_plan() -> None:
    # Two ranges for three plans: the one that matters least is met no more, and no empty range is left in its place.
    (found,) = common_ranges([layer(10, 12)], most=2)
    assert len(found) == 2 and found[-1].up_to is None
    assert (found[0].up_to, found[0].plan, found[1].plan) in {(10, FIRST, THIRD), (12, FIRST, THIRD)}
    (single,) = common_ranges([layer(10, 12)], most=1)
    assert len(single) == 1


def test_equal_layers_need_nothing() -> None:
    layers = [layer(10, 40)] * 5
    assert common_ranges(layers, most=3) == [layers[0].ranges] * 5


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_real_layers_lose_little(rank: int, training: bool) -> None:
    # Six sizes with up to ten crossovers become at most four ranges; by the predicted times no layer is slower by more
    # than 15 %, at any number of rows, than with its own; without gradients, where calls are most of it, 30 %.
    by_rows = cache(lambda plan: cost_by_rows(plan, cpu_model(2), 4, training=training))

    def cost(plan: LinearPlan, rows: int) -> float:
        return by_rows(plan)(rows).seconds

    def own(out: int, inner: int) -> LayerRanges:
        shape = choose_shape(out, inner, format="tt", rank=rank).with_scale(1.0)
        return LayerRanges(plans_by_rows(shape, "cols", "cpu", 2, 4, training), cost)

    layers = [own(*size) for size in SIZES]
    found = common_ranges(layers)
    limits = sorted({limit for each in limits_of(found) for limit in each if limit > 1})
    assert len(limits) <= 3
    for each, ranges in zip(layers, found, strict=True):
        common = LayerRanges(ranges, cost)
        for rows in {1, 2, 4096, *limits, *(n + 1 for n in limits), *each.limits, *(n + 1 for n in each.limits)}:
            assert cost(common.plan_at(rows), rows) <= (1.15 if training else 1.3) * cost(each.plan_at(rows), rows)

"""Which plan runs for how many rows."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from comera_compile.planning import choose
from comera_compile.planning.choose import plans_by_rows, ranked_plans
from comera_compile.planning.cost import CUDA_MODEL, DeviceModel, cpu_model, plan_cost
from comera_compile.planning.device_model import shipped_model
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.planning.row_ranges import RowRange
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.shape import TTShape

SQUARE = TTShape("tt", 768, 768, (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
WIDE = TTShape("tt", 768, 3072, (12, 8, 8), (12, 16, 16), (1, 12, 30, 30, 30, 16, 1))
SHAPES = {
    "768x768": SQUARE,
    "768x3072": WIDE,
    "3072x768": choose_shape(3072, 768, format="tt", rank=32),
    "padded prime": choose_shape(1009, 768, format="tt", rank=16),
    "order 1": choose_shape(96, 64, format="tt", rank=16, order=1),
    "order 2": choose_shape(512, 2048, format="tt", rank=8, order=2),
    "order 4": choose_shape(256, 256, format="tt", rank=16, order=4),
    "rank 1": choose_shape(512, 512, format="tt", rank=1),
    "full rank": choose_shape(256, 64, format="tt", rank=64, order=2),
}


def ranges(shape: TTShape, device: str = "cpu", threads: int = 2, training: bool = True) -> tuple[RowRange, ...]:
    return plans_by_rows(shape, "cols", device, threads, 4, training)


def plan_at(rows: int, found: tuple[RowRange, ...]) -> LinearPlan:
    return next(r.plan for r in found if r.up_to is None or rows <= r.up_to)


@pytest.fixture
def by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is the number of operations, whatever figures are shipped for real devices."""
    monkeypatch.setattr(choose, "shipped_model", lambda *_: DeviceModel(1.0, math.inf, 0.0, 0.0, 0.0))
    monkeypatch.setattr(choose, "CPU_BOND_MULTIPLE", 1)
    monkeypatch.setattr(choose, "plans_by_rows", plans_by_rows.__wrapped__)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranges_ascend_and_are_few(shape: TTShape, device: str) -> None:
    # torch goes eager after eight compilations of a function, so each crossover is dear.
    for threads, training in ((1, True), (2, False), (8, True)):
        found = ranges(shape, device, threads, training)
        limits = [r.up_to for r in found if r.up_to is not None]
        assert sum(n > 1 for n in limits) <= 2  # a single row is compiled apart anyway
        assert len(limits) == len(found) - 1 and found[-1].up_to is None
        assert limits == sorted(set(limits)) and all(n >= 1 for n in limits)
        assert all(a.plan != b.plan for a, b in pairwise(found))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_is_the_cheapest_at_both_ends(shape: TTShape, device: str) -> None:
    model, multiple = (CUDA_MODEL, 1) if device == "cuda" else (cpu_model(2), 16)
    found = ranges(shape, device)

    def seconds(plan: LinearPlan, rows: int) -> float:
        return plan_cost(plan, rows, model).seconds

    for rows in (1, 1 << 20):
        best = min(seconds(p, rows) for p in candidates(shape, "cols", multiple))
        assert seconds(plan_at(rows, found), rows) == best or len(found) == 3
    for low, high in pairwise(found):
        assert low.up_to is not None
        # Just below the crossover the lower plan wins, just above it loses, unless a range between them was given up.
        if len(found) < 3:
            assert seconds(low.plan, low.up_to) <= seconds(high.plan, low.up_to)
            assert seconds(low.plan, low.up_to + 1) >= seconds(high.plan, low.up_to + 1)


@pytest.mark.parametrize("shape", [SQUARE, WIDE], ids=["768x768", "768x3072"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_many_rows_merge_both_halves(shape: TTShape, device: str) -> None:
    for threads in (1, 2, 16):
        for rows in (4096, 1 << 20):
            assert plan_at(rows, ranges(shape, device, threads)).merged


@pytest.mark.parametrize("shape", [SQUARE, WIDE], ids=["768x768", "768x3072"])
def test_few_rows_leave_cores_apart(shape: TTShape) -> None:
    # Merging whole halves for one row would be some hundred times the work of the row.
    plan = plan_at(1, ranges(shape))
    assert not plan.merged and not plan.dense


@pytest.mark.usefixtures("by_operations")
@pytest.mark.parametrize(("shape", "crossover"), [(SQUARE, 44), (WIDE, 47)], ids=["768x768", "768x3072"])
def test_by_operations_few_rows_go_core_by_core(shape: TTShape, crossover: int) -> None:
    found = choose.plans_by_rows(shape, "cols", "cpu", 1, 4, False)
    assert plan_at(1, found).name == "core by core"
    # Merging both halves wins later than against core by core alone, since partial merges lie between.
    first = found[-1]
    assert first.plan.merged and found[-2].up_to is not None and found[-2].up_to >= crossover


@pytest.mark.usefixtures("by_operations")
def test_by_operations_a_bond_above_break_even_rebuilds_the_matrix() -> None:
    # M * N / (M + N) is 384 for 768 x 768 and 614.4 for 768 x 3072.
    for rows, cols, bond, dense in ((768, 768, 380, False), (768, 768, 388, True), (768, 3072, 620, True)):
        shape = TTShape("tt", rows, cols, (rows,), (cols,), (1, bond, 1))
        found = choose.plans_by_rows(shape, "cols", "cpu", 1, 4, True)
        assert plan_at(1 << 20, found).dense is dense
        assert plan_at(1, found).merged  # building W for one row is never worth it


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_bond_far_above_break_even_rebuilds_the_matrix_for_many_rows(device: str) -> None:
    shape = choose_shape(768, 768, format="tt", rank=700, order=2)
    assert shape.bond == 700
    assert plan_at(1 << 20, ranges(shape, device)).dense
    assert not plan_at(1, ranges(shape, device)).dense


def test_too_many_ranges_lose_those_that_matter_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_MAX_RANGES", 100)
    everything = plans_by_rows.__wrapped__(WIDE, "cols", "cpu", 2, 4, False)
    monkeypatch.setattr(choose, "_MAX_RANGES", 2)
    kept = plans_by_rows.__wrapped__(WIDE, "cols", "cpu", 2, 4, False)
    assert len(everything) > 2 and len(kept) == 2
    assert {r.up_to for r in kept} <= {r.up_to for r in everything}
    assert {r.plan for r in kept} <= {r.plan for r in everything}
    assert kept[-1].plan == everything[-1].plan  # of the two it is the one for many rows, which differ most


@pytest.mark.parametrize(("inner", "out"), [(768, 768), (768, 3072), (3072, 768), (4096, 4096)])
def test_no_number_of_rows_loses_much_by_the_ranges(inner: int, out: int) -> None:
    # At its limit a range costs as much as its neighbour, whatever lies between: what is lost shows at the other end,
    # where it can be nine times the time (4096 x 4096, rank 64, 6 rows).
    model = shipped_model("cpu", 2)
    for rank in (16, 64):
        shape = choose_shape(out, inner, format="tt", rank=rank)
        found = ranges(shape)
        for rows in sorted({round(2 ** (k / 2)) for k in range(2, 41)}):
            best = ranked_plans(shape, "cols", "cpu", 2, 4, True, rows)[0]
            costs = [plan_cost(p, rows, model, 4).seconds for p in (plan_at(rows, found), best)]
            assert costs[0] <= 1.1 * costs[1], (rank, rows)


@pytest.mark.parametrize("rows", [1, 32, 512])
def test_a_known_number_of_rows_has_the_cheapest_plan_for_it(rows: int) -> None:
    # There is nothing to guard, so no range need be given up.
    shape, kind = choose_shape(4096, 4096, format="tt", rank=64), ("cpu", 2, 4, True)
    (only,) = plans_by_rows(shape, "cols", *kind, rows=rows)
    assert only == RowRange(None, ranked_plans(shape, "cols", *kind, rows)[0])


def test_equal_layers_share_a_choice() -> None:
    # Callers pass every scale as 1.0; plans never carry one.
    assert all(r.plan.shape.scale == 1.0 for r in ranges(replace(SQUARE, scale=0.25)))
    before = plans_by_rows.cache_info().hits
    ranges(SQUARE)
    ranges(SQUARE)
    assert plans_by_rows.cache_info().hits > before


def test_choosing_is_fast() -> None:
    # A model has a handful of shapes and each is planned at compile time: some 30 ms, bounded for a busy machine.
    plans_by_rows.cache_clear()
    started = time.process_time()
    ranges(SQUARE)
    assert time.process_time() - started < 0.5

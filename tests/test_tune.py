"""Which plans are measured, which of them is kept, and where its neighbours take over: with made-up times."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from comera_compile import plan_timing, tune
from comera_compile.plan_timing import time_plans
from comera_compile.planning.choose import CPU_BOND_MULTIPLE, plan_from, plans_by_rows, ranked_plans
from comera_compile.planning.cost import plan_cost
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.planning.tuned_ranges import plan_at
from comera_compile.tt.factorize import choose_shape
from comera_compile.tune import crossover, tune_layer
from comera_compile.tuned_plans import Layer, ranges_for, stored
from tests.fake_times import Clock, cache, clock

__all__ = ["cache", "clock"]

LAYER = Layer(choose_shape(768, 768, format="tt", rank=32), "cols", "cpu", 2, torch.float32, True)
TINY = Layer(choose_shape(48, 60, format="tt", rank=6), "cols", "cpu", 2, torch.float32, True)


def predicted(rows: int) -> LinearPlan:
    return plan_at(rows, LAYER.predicted())


def test_ranked_plans_are_all_plans_cheapest_first() -> None:
    kind = LAYER.shape, "cols", "cpu", 2, 4, True
    for rows in (1, 100, 4096):
        found = ranked_plans(*kind, rows)  # type: ignore[arg-type]
        seconds = [plan_cost(p, rows, LAYER.device).seconds for p in found]
        assert seconds == sorted(seconds) and set(found) == set(candidates(LAYER.shape, "cols", CPU_BOND_MULTIPLE))
        flops = [plan_cost(p, rows, LAYER.device).flops for p in ranked_plans(*kind, rows, None, "flops")]  # type: ignore[arg-type]
        assert flops == sorted(flops)
    assert ranked_plans(*kind, 1)[0] == plans_by_rows(*kind)[0].plan  # type: ignore[arg-type]


def test_a_plan_is_read_back_for_its_own_layer_and_device() -> None:
    for plan in candidates(LAYER.shape, "cols", CPU_BOND_MULTIPLE):
        assert plan_from(plan.encode(), LAYER.shape, "cols", "cpu") == plan
        with pytest.raises(ValueError, match="not a plan of this layer"):  # padded bonds are for CPUs only
            plan_from(plan.encode(), LAYER.shape, "cols", "cuda")


def test_the_best_few_by_prediction_are_measured(clock: Clock) -> None:
    tune_layer(LAYER, 512)
    layer, rows, plans = clock.asked[0]
    ranked = ranked_plans(LAYER.shape, "cols", "cpu", 2, 4, True, 512, LAYER.device)
    assert (layer, rows) == (LAYER, 512) and plans[0] == predicted(512)
    best = LAYER.seconds(ranked[0], 512)
    near = [plan for plan in ranked[:4] if LAYER.seconds(plan, 512) <= 3 * best]
    assert set(near) <= set(plans) and len(plans) <= 7
    assert all(LAYER.seconds(plan, 512) <= 3 * best for plan in plans[1:])


def test_a_plan_that_is_ahead_is_kept(clock: Clock) -> None:
    ranked = ranked_plans(LAYER.shape, "cols", "cpu", 2, 4, True, 512, LAYER.device)
    wins = next(p for p in ranked if p != predicted(512))
    clock.law = lambda plan, rows: 1e-3 if plan == wins else 2e-3
    outcome = tune_layer(LAYER, 512)
    assert (outcome.predicted, outcome.measured, outcome.plan) == (predicted(512), wins, wins)
    assert outcome.gain == pytest.approx(2.0) and outcome.stored and outcome.note == ""
    [kept] = stored(LAYER)
    assert (kept.plan, kept.rows, kept.predicted) == (wins, 512, predicted(512))
    assert kept.seconds == {p.encode(): clock.law(p, 512) for p in clock.asked[0][2]}
    assert plan_at(512, ranges_for(LAYER, LAYER.predicted())) == wins


@pytest.mark.parametrize(("faster", "slower"), [(1.005, 1.0), (1.15, 1.35)])
def test_a_lead_within_the_noise_keeps_the_prediction(
    faster: float, slower: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half a percent decides nothing; nor do 15 % where in one round of three the plan is behind by as much.
    others = [p for p in candidates(LAYER.shape, "cols", CPU_BOND_MULTIPLE) if p != predicted(512)]
    clock.law = lambda plan, rows: 1e-3 / (faster if plan in others else 1.0)
    measured = clock.__call__

    def disturbed(*arguments, **settings):  # type: ignore[no-untyped-def]
        timing = measured(*arguments, **settings)
        for times in list(timing.seconds.values())[1:]:
            times[0] *= slower
        return timing

    monkeypatch.setattr(tune, "time_plans", disturbed)
    outcome = tune_layer(LAYER, 512)
    assert outcome.measured in others and outcome.plan == predicted(512)
    assert outcome.gain == 1.0 and outcome.note == "lead within the noise"
    assert [t.plan for t in stored(LAYER)] == [predicted(512)]  # so that it is not measured again


@pytest.mark.parametrize(
    ("noise", "processor", "message"),
    [(0.3, 0.0, "spread by 30%"), (0.0, 1e-3, "the process got ")],
    ids=["times spread", "no processor time"],
)
def test_a_busy_machine_keeps_nothing(
    noise: float, processor: float, message: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.prefer("rebuild W", "core by core")
    clock.noise, clock.processor = noise, processor
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        outcome = tune_layer(LAYER, 512)
    assert outcome.plan == predicted(512) and not outcome.stored and message in outcome.note
    assert message in caplog.text and "768x768 rank 32 at 512 rows" in caplog.text
    assert stored(LAYER) == [] and len(clock.asked) == 1  # no crossover is looked for


def test_without_a_place_on_disk_it_holds_for_the_process(cache: Path, clock: Clock) -> None:
    cache.write_text("a file, not a directory")
    outcome = tune_layer(LAYER, 512)
    assert not outcome.stored and "not on disk" in outcome.note and len(stored(LAYER)) == 1


@pytest.mark.parametrize("factor", [0.6, 0.75, 1.5, 2.5])
def test_the_crossover_moves_to_where_measured_times_are_equal(factor: float, clock: Clock) -> None:
    # Around the real predicted crossover the true one lies elsewhere: straight lines in the rows that meet there.
    low, high = LAYER.predicted()[-2:]
    assert low.up_to is not None
    true, rows = factor * low.up_to, 4 * low.up_to
    laws = {low.plan: lambda n: 1 + 2 * n / true, high.plan: lambda n: 2 + n / true}
    clock.law = lambda plan, n: 1e-3 * laws[plan](n) if plan in laws else 1.0
    tune_layer(LAYER, rows)
    ranges = ranges_for(LAYER, LAYER.predicted())
    [moved] = [a.up_to for a, b in pairwise(ranges) if (a.plan, b.plan) == (low.plan, high.plan)]
    assert moved is not None and moved == pytest.approx(true, rel=0.05)
    # Both plans were measured to be the better one on their side, near the crossover.
    probes = [n for _, n, plans in clock.asked if set(plans) == {low.plan, high.plan}]
    below, above = [n for n in probes if n <= moved], [n for n in probes if n > moved]
    assert max(below) >= moved / 1.5 and min(above) <= 1.5 * (moved + 1)


@pytest.mark.parametrize("true", [3.0, 47.0, 63.0, 130.0, 201.5, 700.0])
@pytest.mark.parametrize("start", [16, 64, 250])
def test_crossovers_are_found_on_either_side(true: float, start: int) -> None:
    asked: list[int] = []

    def lead(sign: int) -> Callable[[int], float]:
        def measured(rows: int) -> float:
            asked.append(rows)
            return sign * math.log(rows / true)

        return measured

    last, lost = crossover(lead(1), 1024, start, 2)  # ahead at many rows
    assert last == pytest.approx(true, rel=0.2, abs=1) and lost is not None and lost < last
    assert lost in asked and len(asked) <= 8
    last, lost = crossover(lead(-1), 1, start, 8192)  # ahead at few rows
    assert last == pytest.approx(true, rel=0.3, abs=1) and lost is not None and lost > last


def test_a_plan_that_never_loses_its_lead_holds_as_far_as_it_was_measured() -> None:
    assert crossover(lambda rows: 0.1, 1000, 500, 125) == (125, None)
    assert crossover(lambda rows: 0.1, 1000, 3000, 8000) == (8000, None)
    assert crossover(lambda rows: None, 1000, 500, 125) == (1000, None)  # times of no use: nothing is known


def test_real_times_are_of_every_plan_and_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_timing, "_MOST_REPEATS", 2)
    plans = candidates(TINY.shape, "cols", CPU_BOND_MULTIPLE)
    state = torch.random.get_rng_state()
    with torch.inference_mode():  # as some first calls are
        timing = time_plans(TINY, 10, plans, rounds=3, seconds=1.0)
    assert set(timing.seconds) == {p.encode() for p in plans} and timing.rounds == 3
    assert all(s > 0 for times in timing.seconds.values() for s in times) and timing.processor > 0
    assert torch.equal(torch.random.get_rng_state(), state)


def test_real_times_run_with_the_threads_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = plan_timing.measure

    def watched(*arguments, **settings):  # type: ignore[no-untyped-def]
        seen.append(torch.get_num_threads())
        return real(*arguments, **settings)

    monkeypatch.setattr(plan_timing, "measure", watched)
    one = Layer(TINY.shape, "rows", "cpu", 1, torch.float64, False)
    time_plans(one, 3, candidates(one.shape, "rows", CPU_BOND_MULTIPLE)[:2], rounds=2, seconds=1.0)
    assert seen == [1] and torch.get_num_threads() == 2


def test_what_is_timed_without_training_is_the_forward() -> None:
    plan = next(p for p in candidates(TINY.shape, "cols", CPU_BOND_MULTIPLE) if p.name == "core by core")
    given = torch.randn(TINY.shape.numel), torch.randn(10, 60), torch.randn(10, 48)
    forward, both = (plan_timing.traced(plan, *given, training=training) for training in (False, True))
    counts = [sum(n.target is torch.ops.aten.mm.default for n in g.graph.nodes) for g in (forward, both)]
    assert 0 < 3 * counts[0] == counts[1] or counts[0] < counts[1]
    [y] = forward(*given)
    assert y.shape == (10, 48) and not y.requires_grad

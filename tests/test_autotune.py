"""``comera.autotune`` and ``options={"tune": True}``: what is measured, when, and that winners run afterwards."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import comera_compile as comera
from comera_compile import plan_timing
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.tune import Outcome
from comera_compile.tuned_plans import stored
from tests import tiny_models as tiny
from tests.fake_times import Clock, cache, clock
from tests.tiny_models import Near

__all__ = ["cache", "clock"]

# Two layers of 32 x 48 and 48 x 32 with two modes a side: five plans, of which "rebuild W" is predicted for none.
UNLIKELY = "rebuild W"
ROWS = 6

TUNE_MODEL = """
import sys, torch
import comera_compile as comera
from comera_compile import tune
from tests import tiny_models as tiny
from tests.fake_times import Clock
clock = tune.time_plans = Clock()
clock.prefer("rebuild W")
tune.WITHIN = float("inf")
torch.set_num_threads(2)
torch.manual_seed(0)
tuning = comera.autotune(tiny.double(tiny.Mlp()), tiny.rows(int(sys.argv[1])), **tiny.TENSORIZE)
print(len(tuning.outcomes), tuning.stored)
"""


@pytest.fixture(autouse=True)
def all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow a plan is predicted to be, it is timed: the made-up times decide."""
    monkeypatch.setattr("comera_compile.tune.WITHIN", float("inf"))
    monkeypatch.setattr("comera_compile.tune.FEW", 10)


def autotune(model: nn.Module, *inputs: Any) -> comera.Tuning:
    return comera.autotune(model, *inputs, **tiny.TENSORIZE)


def compiled(model: nn.Module, rows: int = ROWS, **options: Any) -> list[str]:
    """Plan of each weight after a first compiled call."""
    torch._dynamo.reset()
    torch.compile(model, backend="comera", options=tiny.OPTIONS | options)(tiny.rows(rows))
    return [line.uses[0].plan for line in comera.report(model).tensorized]


def few_real_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real times take seconds on a busy machine: no crossovers, no repeats."""
    monkeypatch.setattr(plan_timing, "_MOST_REPEATS", 1)
    monkeypatch.setattr("comera_compile.tune.REACH", 1)


def mlp() -> nn.Module:
    return tiny.double(tiny.Mlp())


def test_each_distinct_layer_is_measured_once(clock: Clock) -> None:
    model = nn.Sequential(mlp(), mlp())  # two of each
    tuning = autotune(model, tiny.rows(2, 3))
    assert [(str(o.layer), o.rows) for o in tuning.outcomes] == [("32x48 rank 4", 6), ("48x32 rank 4", 6)]
    assert all(o.layer.training and o.layer.dtype == torch.float64 and o.layer.threads == 2 for o in tuning.outcomes)
    assert len({layer for layer, _, _ in clock.asked}) == 2


def test_the_forward_alone_is_tuned_without_gradients(clock: Clock) -> None:
    with torch.no_grad():
        tuning = autotune(mlp(), tiny.rows(ROWS))
    assert [o.layer.training for o in tuning.outcomes] == [False, False]


def test_graph_breaks_and_other_rows_are_seen(clock: Clock) -> None:
    tuning = autotune(tiny.double(tiny.Broken()), tiny.rows(4))
    assert len(tuning.outcomes) == 2
    assert {o.rows for o in autotune(tiny.double(tiny.Twice()), tiny.rows(4)).outcomes} == {4}


def test_winners_run_in_the_compiled_model(clock: Clock, assert_near: Near) -> None:
    model = mlp()
    assert UNLIKELY not in compiled(copy.deepcopy(model))
    far = compiled(copy.deepcopy(model), 100 * ROWS)
    clock.prefer(UNLIKELY)
    tuning = autotune(model, tiny.rows(ROWS))
    assert [o.plan.name for o in tuning.outcomes] == [UNLIKELY] * 2 and tuning.stored
    asked = len(clock.asked)
    assert compiled(model) == [UNLIKELY] * 2
    assert len(clock.asked) == asked  # without the option nothing is measured
    call = torch.compile(model, backend="comera", options=tiny.OPTIONS)
    tiny.assert_as_eager(call, model, [tiny.rows(ROWS)], assert_near)
    assert compiled(mlp(), 100 * ROWS) == far  # far from the rows that were tuned


def test_other_objectives_are_not_tuned(clock: Clock) -> None:
    clock.prefer(UNLIKELY)
    autotune(mlp(), tiny.rows(ROWS))
    assert UNLIKELY not in compiled(mlp(), objective="flops")


def test_a_dynamic_batch_changes_plans_at_a_measured_crossover(clock: Clock, assert_near: Near) -> None:
    # The unlikely plan is the fastest from 17 rows on, as far as is measured: to eight times the 34 rows.
    clock.law = lambda plan, rows: 1e-3 if (plan.name == UNLIKELY) == (rows >= 17) else 2e-3
    model = mlp()
    autotune(model, tiny.rows(34))
    counter = tiny.Counter()
    call = torch.compile(model, backend="comera", options=counter.options, dynamic=True)
    call(tiny.rows(34))
    first = counter.count
    for rows in (34, 17, 68, 20, 140, 270):
        tiny.assert_as_eager(call, model, [tiny.rows(rows)], assert_near)
        assert [line.uses[0].plan for line in comera.report(model).tensorized] == [UNLIKELY] * 2
    assert counter.count == first
    for rows in (14, 8, 5):
        tiny.assert_as_eager(call, model, [tiny.rows(rows)], assert_near)
        assert UNLIKELY not in [line.uses[0].plan for line in comera.report(model).tensorized]
    assert counter.count == first + 1


def test_tune_measures_once_and_not_again(clock: Clock) -> None:
    clock.prefer(UNLIKELY)
    assert compiled(mlp(), tune=True) == [UNLIKELY] * 2
    asked = len(clock.asked)
    assert asked >= 2
    assert compiled(mlp(), tune=True) == [UNLIKELY] * 2
    assert compiled(mlp(), ROWS + 1, tune=True) == [UNLIKELY] * 2  # within the rows that the winner holds for
    assert len(clock.asked) == asked
    compiled(mlp(), 100 * ROWS, tune=True)
    assert len(clock.asked) > asked
    assert compiled(mlp()) == [UNLIKELY] * 2


def test_tune_on_a_busy_machine_runs_the_prediction_and_does_not_try_again(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.prefer(UNLIKELY)
    clock.noise = 0.5
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        assert UNLIKELY not in compiled(mlp(), tune=True)
    assert "spread by 50%" in caplog.text
    asked = len(clock.asked)
    compiled(mlp(), tune=True)
    assert len(clock.asked) == asked == 2


def test_tune_without_memory_runs_the_prediction(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object, **settings: object) -> None:
        raise torch.OutOfMemoryError("not enough")

    monkeypatch.setattr("comera_compile.tune.time_plans", full)
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        assert UNLIKELY not in compiled(mlp(), tune=True)
    assert "no memory to tune 32x48 rank 4 at 6 rows" in caplog.text


@pytest.mark.usefixtures("cache")
def test_tune_with_real_times(assert_near: Near, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever wins on this machine, and however busy it is: compiling measures, and the result is right.
    few_real_times(monkeypatch)
    model = mlp()
    call = torch.compile(model, backend="comera", options=tiny.OPTIONS | {"tune": True})
    with torch.autocast("cpu", enabled=False):
        call(tiny.rows(ROWS))
    tiny.assert_as_eager(call, model, [tiny.rows(ROWS)], assert_near)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("form", ["dense", "packed", "compiled"])
def test_the_model_is_unchanged(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Objects, values, gradients, buffers, mode, the random numbers of its training: with real times.
    few_real_times(monkeypatch)
    model = tiny.double(nn.Sequential(tiny.Mlp(), nn.BatchNorm1d(tiny.WIDTH), nn.Dropout()))
    call: Any = model
    if form == "packed":
        comera.tensorize(model, **tiny.TENSORIZE)
    elif form == "compiled":
        call = torch.compile(model, backend="comera", options=tiny.OPTIONS)
        call(tiny.rows(ROWS)).pow(2).mean().backward()
    before, x, modes = tiny.snapshot(model), tiny.rows(ROWS), [m.training for m in model.modules()]
    state = torch.random.get_rng_state()
    tuning = autotune(call, x)
    assert len(tuning.outcomes) == 2 and all(o.predicted_seconds >= o.measured_seconds > 0 for o in tuning.outcomes)
    tiny.assert_unchanged(before, model)
    assert modes == [m.training for m in model.modules()]
    assert torch.equal(state, torch.random.get_rng_state()) and torch.get_num_threads() == 2


def test_the_table(clock: Clock) -> None:
    clock.prefer(UNLIKELY)
    head, rule, *lines = str(autotune(mlp(), tiny.rows(ROWS))).splitlines()
    assert head.split()[:2] == ["layer", "rows"] and set(rule) == {"-"} and len(lines) == 2
    assert all(part in lines[0] for part in ("32x48 rank 4", " 6 ", UNLIKELY, "2.000", "1.000", "2.00x", "0%"))
    assert "no layer" in str(comera.autotune(nn.Linear(4, 4), torch.randn(2, 4)))


def test_a_busy_machine_shows_in_the_table(clock: Clock) -> None:
    clock.noise = 0.4
    tuning = autotune(mlp(), tiny.rows(ROWS))
    assert not tuning.stored and str(tuning).count("not kept: times of one plan spread by 40%") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tune": "yes"}, "tune must be True or False, got 'yes'"),
        ({"tune": 1}, "tune must be True or False, got 1"),
        ({"tune": True, "objective": "flops"}, "objective must be 'time' with it, got 'flops'"),
        ({"tunes": True}, "did you mean 'tune'"),
    ],
)
def test_impossible_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(comera.OptionError, match=message):
        comera.Backend(**options)


def test_autotune_refuses_what_it_cannot_tune(clock: Clock) -> None:
    with pytest.raises(comera.OptionError, match="unknown option 'rang'"):
        comera.autotune(mlp(), tiny.rows(2), rang=3)
    with pytest.raises(comera.OptionError, match="objective must be 'time'"):
        comera.autotune(mlp(), tiny.rows(2), objective="bytes")
    with pytest.raises(comera.OptionError, match=r"expects an nn\.Module, got function"):
        comera.autotune(lambda x: x, tiny.rows(2))  # type: ignore[arg-type]
    assert clock.asked == []


def test_two_processes_tune_one_model_at_once(clock: Clock) -> None:
    # At different rows of the same layers: each adds to the entries that the other writes.
    root = Path(__file__).resolve().parents[1]
    each = [
        subprocess.Popen([sys.executable, "-c", TUNE_MODEL, str(rows)], cwd=root, stdout=subprocess.PIPE, text=True)
        for rows in (6, 3000)
    ]
    assert [p.communicate(timeout=300)[0] for p in each] == ["2 True\n"] * 2
    layers = [o.layer for o in autotune(mlp(), tiny.rows(100)).outcomes]
    for layer in layers:
        found = {t.rows: t.plan.name for t in stored(layer)}
        assert found.keys() == {6, 100, 3000} and found[6] == found[3000] == UNLIKELY
    assert compiled(mlp()) == [UNLIKELY] * 2 and compiled(mlp(), 3000) == [UNLIKELY] * 2


def test_outcomes_hold_values(clock: Clock) -> None:
    [first, _] = autotune(mlp(), tiny.rows(ROWS)).outcomes
    assert isinstance(first, Outcome) and isinstance(first.plan, LinearPlan)
    assert first.plan == first.predicted and first.gain == 1.0  # equal times decide nothing

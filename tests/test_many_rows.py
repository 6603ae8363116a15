"""A layer that meets every number of rows is compiled a few times and never runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import many_rows
from benchmarks.many_rows import MOST, Residual, Sequences, orders, sweep
from benchmarks.six_encoders import Sizes
from comera_compile.planning.choose import plans_by_rows
from comera_compile.tt.factorize import choose_shape

OPTIONS: dict[str, Any] = {"rank": 24, "min_elements": 1000, "inner": "aot_eager"}
SIZES = Sizes(width=256, hidden=512, heads=4)
# Wide enough for crossovers between 1 and 4096 rows, as the second test makes sure.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(256, 256),
    "two sizes": lambda: Residual(256, 512),
    "an encoder": lambda: Sequences(SIZES),
}


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        ("one layer", True),
        pytest.param("one layer", False, marks=pytest.mark.slow),
        pytest.param("two sizes", True, marks=pytest.mark.slow),
        pytest.param("an encoder", False, marks=pytest.mark.slow),
        pytest.param("an encoder", True, marks=pytest.mark.slow),
    ],
)
def test_at_most_six_compilations_and_never_eager(kind: str, training: bool) -> None:
    # One for the first number of rows, one for a single row (torch makes 0 and 1 constants), the others by ranges.
    # Every call is served by a compiled graph; where torch gives up compiling, it raises here.
    rows = orders(4096, 60, seed=0)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        found = sweep(MODELS[kind](), 256, rows, training=training, dtype=torch.float32, **OPTIONS)
    assert found.compilations <= MOST and found.served == len(rows) == 60


def test_crossovers_of_all_layers_together_are_few() -> None:
    # Rank 64, forward alone: the three sizes of the encoder have seven ranges between them. Each number of rows below
    # lies in another, or at an end. Were each crossover a guard, torch would give up after eight compilations.
    rows = [1000, 800, 1, 3, 5, 6, 72, 73, 95, 96, 143, 144, 255, 256, 4096]
    model = Sequences(Sizes())
    found = sweep(model, 768, rows, training=False, dtype=torch.float32, rank=64, inner="aot_eager")
    assert found.compilations <= MOST and found.served == len(rows)


def test_plans_do_change_with_the_rows() -> None:
    # Else the test above would be one of a single plan.
    for out in (256, 512):
        shape = choose_shape(out, 256, format="tt", rank=24).with_scale(1.0)
        limits = [r.up_to for r in plans_by_rows(shape, "cols", "cpu", torch.get_num_threads(), 4, True)]
        assert len(limits) > 1 and all(1 <= n < 4096 for n in limits if n is not None)


def test_eager_calls_are_noticed() -> None:
    # The count that the claim rests on: with one compilation allowed, torch runs the other numbers of rows eagerly.
    rows = orders(4096, 12, seed=0)
    with torch._dynamo.config.patch(recompile_limit=1):
        found = sweep(nn.Linear(256, 256), 256, rows, dtype=torch.float32, **OPTIONS)
    assert found.compilations == 1 and found.served < len(rows)


def test_rows_come_in_random_order_with_both_ends() -> None:
    every = orders(50, 50, seed=0)
    assert sorted(every) == list(range(1, 51)) and every != sorted(every)
    some = orders(4096, 60, seed=1)
    assert len(set(some)) == 60 and {1, 4096} <= set(some) and some != orders(4096, 60, seed=2)


def test_the_benchmark_says_whether_the_claim_holds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_rows, "MODELS", {"small": lambda: (nn.Linear(400, 400), 400)})
    many_rows.main(many_rows.parse(["--count=9", "--largest=64", "--inner=aot_eager", "--models=small"]))
    *table, last = capsys.readouterr().out.splitlines()
    assert last.startswith("RESULT ") and '"ok": true' in last and '"eager_calls": 0' in last
    assert table[-1].split()[:2] == ["small", "9"]


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_every_number_of_rows_of_a_real_layer(training: bool) -> None:
    rows = orders(4096, 4096, seed=0)
    options = {"rank": 32, "inner": "aot_eager"}
    found = sweep(nn.Linear(768, 768), 768, rows, training=training, dtype=torch.float32, **options)
    assert found.compilations <= MOST and found.served == 4096

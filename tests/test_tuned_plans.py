"""Tuned plans on disk: found again by what they fit, never lost, and never trusted blindly."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comera_compile import calibrate, tuned_plans, user_cache
from comera_compile.planning.choose import CPU_BOND_MULTIPLE, plans_by_rows
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.planning.row_ranges import RowRange
from comera_compile.planning.tuned_ranges import Span
from comera_compile.tt.factorize import choose_shape
from comera_compile.tuned_plans import Layer, Tuned, is_tuned, ranges_for, store, stored
from tests.fake_times import cache

__all__ = ["cache"]
pytestmark = pytest.mark.usefixtures("cache")

LAYER = Layer(choose_shape(256, 256, format="tt", rank=16), "cols", "cpu", 2, torch.float32, True)
PLANS = candidates(LAYER.shape, "cols", CPU_BOND_MULTIPLE)
OTHER = candidates(choose_shape(256, 512, format="tt", rank=16), "cols", CPU_BOND_MULTIPLE)

# Stores its measurements one after the other, and says when each is there.
WRITER = """
import sys, torch
from tests.test_tuned_plans import LAYER, tuned
from comera_compile.tuned_plans import store
print("ready", flush=True)
for rows in range(int(sys.argv[1]), int(sys.argv[2]), 2):
    assert store(LAYER, tuned(rows))
    print(rows, flush=True)
"""


def tuned(rows: int, plan: LinearPlan = PLANS[0], **changes: Any) -> Tuned:
    made = Tuned(
        rows, plan, PLANS[1], -(-rows // 2), 2 * rows, (), {plan.encode(): 1e-3, PLANS[1].encode(): 2e-3}, 0.01
    )
    return replace(made, **changes)


def start(first: int, end: int) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", WRITER, str(first), str(end)]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)


def ready(*writers: subprocess.Popen[str]) -> None:
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"


def test_what_is_stored_is_found() -> None:
    measured = tuned(64, neighbours=(Span(17, 31, PLANS[2]),))
    assert stored(LAYER) == [] and not is_tuned(LAYER, 64)
    assert store(LAYER, measured)
    assert stored(LAYER) == [measured]
    assert [is_tuned(LAYER, n) for n in (31, 32, 64, 128, 129)] == [False, True, True, True, False]


def test_other_rows_are_kept_and_equal_ones_replaced() -> None:
    for each in (tuned(64), tuned(512, PLANS[2]), tuned(64, PLANS[3])):
        store(LAYER, each)
    assert stored(LAYER) == [tuned(64, PLANS[3]), tuned(512, PLANS[2])]


@pytest.mark.parametrize(
    "change",
    [{"contracts": "rows"}, {"threads": 1}, {"dtype": torch.float64}, {"training": False}, {"shape": OTHER[0].shape}],
)
def test_another_layer_has_an_entry_of_its_own(change: dict[str, Any]) -> None:
    store(LAYER, tuned(64))
    assert stored(replace(LAYER, **change)) == []


def test_another_device_torch_or_version_has_an_entry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store(LAYER, tuned(64))
    for module, name, value in (
        (calibrate, "device_name", lambda device_type: "another processor"),
        (torch, "__version__", "9.9.9"),
        (tuned_plans, "VERSION", 99),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert stored(LAYER) == []
    assert stored(LAYER) == [tuned(64)]


def test_ranges_with_known_and_symbolic_rows() -> None:
    predicted = (RowRange(40, PLANS[1]), RowRange(None, PLANS[2]))
    assert ranges_for(LAYER, predicted) == predicted
    store(LAYER, tuned(100))
    assert ranges_for(LAYER, predicted, 60) == (RowRange(None, PLANS[0]),)
    assert ranges_for(LAYER, predicted, 49) == (RowRange(None, PLANS[2]),)
    store(LAYER, tuned(8, PLANS[3]))
    assert ranges_for(LAYER, predicted, 8) == (RowRange(None, PLANS[3]),)
    symbolic = ranges_for(LAYER, predicted)
    assert len(symbolic) == 3 and symbolic[-1].plan == PLANS[2] and PLANS[0] in [r.plan for r in symbolic]


def test_two_processes_at_once_lose_nothing() -> None:
    # Both add to one entry: without a lock between reading and writing each would undo the other's additions.
    writers = [start(1, 80), start(2, 80)]
    ready(*writers)
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert [t.rows for t in stored(LAYER)] == list(range(1, 80))


def test_a_killed_process_loses_nothing_that_it_stored(cache: Path) -> None:
    for attempt in range(2):
        writer = start(1, 100_000)
        ready(writer)
        time.sleep(0.2 * (attempt + 1))
        writer.send_signal(signal.SIGKILL)
        assert writer.stdout is not None
        said = [int(line) for line in writer.stdout.read().split("\n")[:-1]]
        assert writer.wait() == -signal.SIGKILL
        found = [t.rows for t in stored(LAYER)]
        assert set(said) <= set(found) and len(found) <= len(said) + 1
        began = time.monotonic()
        assert store(LAYER, tuned(2)) and is_tuned(LAYER, 2)  # the dead one's lock is free
        assert time.monotonic() - began < user_cache._LOCK_SECONDS
        user_cache.clear()


def test_a_stopped_process_does_not_hold_others_for_ever(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_cache, "_LOCK_SECONDS", 0.05)
    with user_cache._locked(cache / "plans"):
        assert store(LAYER, tuned(64))
    assert stored(LAYER) == [tuned(64)]


def nonsense(**changes: Any) -> dict[str, Any]:
    return {"64": {**tuned_plans._to_json(tuned(64)), **changes}}


NONSENSE: dict[str, Any] = {
    "unknown plan": nonsense(plan="by magic"),
    "no text": nonsense(plan=3),
    "plan of another shape": nonsense(plan=OTHER[0].encode()),
    "plan of the other side": nonsense(plan=candidates(LAYER.shape, "rows", CPU_BOND_MULTIPLE)[0].encode()),
    "groups that are none": nonsense(plan=PLANS[0].encode().replace(" 3 ", " 7 ", 1)),
    "a huge padding": nonsense(plan=PLANS[0].encode().replace(f" {CPU_BOND_MULTIPLE} |", " 1000000007 |", 1)),
    "rows that descend": nonsense(rows=[128, 32]),
    "a span elsewhere": nonsense(rows=[1000, 2000]),
    "rows of another kind": nonsense(rows="all"),
    "a fraction of a row": nonsense(rows=[0.5, 128]),
    "seconds that are none": nonsense(seconds={PLANS[0].encode(): "fast"}),
    "seconds beyond measure": nonsense(seconds={PLANS[0].encode(): 10**400}),
    "a wrong neighbour": nonsense(neighbours=[[1, 2, "by magic"]]),
    "missing parts": {"64": {"plan": PLANS[0].encode()}},
    "no object": {"64": None},
    "no number of rows": {"many": tuned_plans._to_json(tuned(64))},
    "no table": [1, 2],
    "nothing": None,
}


@pytest.mark.parametrize("held", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_ignored_with_one_warning(held: Any, caplog: pytest.LogCaptureFixture) -> None:
    user_cache.store("plans", LAYER.key, {"tuned": held})
    predicted = plans_by_rows(LAYER.shape, "cols", "cpu", 2, 4, True)
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        assert [ranges_for(LAYER, predicted) for _ in range(3)] == [predicted] * 3
    [record] = caplog.records
    assert "256x256 rank 16" in record.getMessage() and "the predicted one runs" in record.getMessage()
    # What is stored next takes its place.
    assert store(LAYER, tuned(100)) and stored(LAYER) == [tuned(100)]


def test_nonsense_beside_good_measurements_spoils_none() -> None:
    held = {"32": tuned_plans._to_json(tuned(32)), **nonsense(plan="by magic")}
    user_cache.store("plans", LAYER.key, {"tuned": held})
    assert stored(LAYER) == [tuned(32)]
    store(LAYER, tuned(500))
    assert stored(LAYER) == [tuned(32), tuned(500)]


def test_a_damaged_file_means_the_predicted_plan(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    store(LAYER, tuned(64))
    [path] = cache.glob("plans/*.json")
    path.write_bytes(bytes(range(256)))
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        assert stored(LAYER) == []
    assert "damaged" in caplog.text
    assert store(LAYER, tuned(64)) and stored(LAYER) == [tuned(64)]


def test_without_a_cache_it_holds_for_this_process(cache: Path) -> None:
    cache.write_text("a file, not a directory")
    assert not store(LAYER, tuned(64)) and not store(LAYER, tuned(512))
    assert [t.rows for t in stored(LAYER)] == [64, 512]
    json.dumps(tuned_plans._unsaved)

"""The example's own arithmetic, and the whole of it in its short form."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from code_lm.comparing import bits_at, busy_note, compare, compare_rates
from code_lm.data import draw_starts, source_files, split, windows
from code_lm.machine import OthersWatch
from code_lm.model import ByteGPT
from code_lm.settings import Settings, parse
from code_lm.training import Point, Run, schedule

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_code_lm.py"


def run(side: str, compile_seconds: float, *points: tuple[int, float, float]) -> Run:
    return Run(side, 1e-3, 100, compile_seconds, 10.0, 50.0, points=[Point(*point) for point in points])


def test_no_file_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    # A held-out figure is worth something only when the files are others and the split is the same on both sides.
    for name in [f"m{i}.py" for i in range(60)] + ["site-packages/other.py", "sub/dist-packages/other.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    train, held_out = split(source_files(tmp_path))
    assert len(held_out) == 3 and len(train) == 57 and not set(train) & set(held_out)
    assert not [path for path in train + held_out if path.name == "other.py"]
    assert split(source_files(tmp_path)) == (train, held_out)


def test_target_is_the_byte_after_its_input() -> None:
    stream = torch.arange(100, dtype=torch.uint8)
    starts = draw_starts(stream, 1000, 7, torch.Generator().manual_seed(0))
    inputs, targets = windows(stream, starts, 7)
    assert torch.equal(targets, inputs + 1) and torch.equal(inputs[:, 0], starts)
    # The very first and the very last byte are reached, and no index lies outside.
    assert inputs.min() == 0 and targets.max() == 99


def test_a_model_that_knows_nothing_takes_eight_bits_a_byte() -> None:
    model = ByteGPT(blocks=1, width=16, heads=2, context=8)
    torch.nn.init.zeros_(model.head.weight)
    data = torch.randint(0, 256, (2, 9))
    assert model(data[:, :-1], data[:, 1:]).item() / math.log(2) == pytest.approx(8, abs=1e-5)


def test_the_model_does_not_see_the_future() -> None:
    # The loss of one position must have no gradient with respect to later inputs.
    model = ByteGPT(blocks=2, width=16, heads=2, context=8)
    inputs = torch.arange(8)[None]
    seen = model.embedding(inputs).detach().requires_grad_()
    x = seen + model.position
    for block in model.blocks:
        x = block(x)
    x[0, 4].sum().backward()
    grad = seen.grad
    assert grad is not None
    assert grad[0, :5].abs().sum(-1).min() > 0 and not grad[0, 5:].any()


def test_schedule_warms_up_and_comes_down() -> None:
    shares = [schedule(i / 1000) for i in range(1001)]
    assert max(shares) == pytest.approx(1, abs=0.02) and 0.07 <= shares.index(max(shares)) / 1000 <= 0.09
    assert 0 < shares[0] < 0.01 and shares[-1] == pytest.approx(0.05)


def test_bits_between_two_points_lie_on_their_line() -> None:
    done = run("dense", 0, (0, 0.0, 8.0), (10, 5.0, 4.0), (20, 10.0, 3.0))
    for step, bits in ((0, 8.0), (5, 6.0), (10, 4.0), (15, 3.5), (20, 3.0), (99, 3.0)):
        assert bits_at(done, step, lambda point: point.step) == pytest.approx(bits)


def test_equal_steps_and_equal_time_end_where_the_shorter_side_ends() -> None:
    dense = run("dense", 10, (0, 0.0, 8.0), (10, 20.0, 4.0))
    comera = run("comera", 20, (0, 0.0, 8.0), (40, 20.0, 4.0))
    bits = compare(dense, comera, Settings())["bits_per_byte"]
    assert bits["equal_steps"] == {"at": 10, "dense": 4.0, "comera": 7.0}
    assert bits["equal_time"] == {"at": 20.0, "dense": 4.0, "comera": 4.0}
    # Dense is done at second 30; comera then has trained for 10 of its 20 seconds.
    assert bits["equal_time_with_compile"] == {"at": 30.0, "dense": 4.0, "comera": 6.0}


def test_times_taken_on_a_busy_machine_are_marked() -> None:
    # Two programs on the same cores slow each other by ten times and more, and not evenly.
    quiet, busy = run("dense", 0, (0, 0.0, 8.0)), run("comera", 0, (0, 0.0, 8.0))
    quiet.others_share, busy.others_share = 0.02, 0.4
    assert busy_note(quiet, quiet) == [] and "40%" in busy_note(quiet, busy)[0]


def test_the_share_of_others_leaves_out_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    # In ten seconds two cores worked for 15, of which this process had 5: others had 10 of 20.
    readings = iter([(100.0, 40.0, 7.0), (110.0, 55.0, 12.0)])
    monkeypatch.setattr(OthersWatch, "read", staticmethod(lambda: next(readings)))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert OthersWatch().share() == pytest.approx(0.5)


def test_best_rates_are_those_of_the_lowest_final_bits() -> None:
    def tried(side: str, *bits: float) -> list[Run]:
        rates = (1e-4, 2e-4, 5e-4)
        return [Run(side, lr, 1, 0, points=[Point(0, 0, 8), Point(9, 9, b)]) for lr, b in zip(rates, bits, strict=True)]

    result = compare_rates({"dense": tried("dense", 5, 3, 4), "comera": tried("comera", 5, 4, 3)})
    assert result["best"] == {"dense": 2e-4, "comera": 5e-4} and result["ratio"] == pytest.approx(2.5)


def test_numbers_that_cannot_work_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--width", "500", "--heads", "8"], "multiple of --heads 8"),
        (["--rank", "0"], "--rank must be above 0"),
    ):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("width", "heads"), [(768, 12), (512, 8), (256, 4), (500, 5), (40, 1)])
def test_heads_are_as_many_as_the_width_has_room_for(width: int, heads: int) -> None:
    # One for every 64, fewer where that does not divide the width (500 / 7), at least one.
    assert parse(["--width", str(width)]).settings.heads == heads


def test_what_is_given_overrides_the_short_form() -> None:
    settings = parse(["--short", "--steps", "7"]).settings
    assert settings.steps == 7 and settings.width == 256


# CI runs the short form as a stage of its own.
@pytest.mark.slow
def test_short_form_runs_through(tmp_path: Path) -> None:
    # The only test that sees the example as a person does: both sides must learn, and comera with fewer parameters.
    command = [sys.executable, str(SCRIPT), "--short", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    bits = result["bits_per_byte"]["equal_steps"]
    assert 3 < bits["dense"] < 6 and 3 < bits["comera"] < 6
    assert result["parameter_ratio"]["comera"] > 2
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "after 30 steps each" in (tmp_path / "table.txt").read_text()

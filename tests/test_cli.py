"""The command ``comera``: what it prints, what it stores, how it ends."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from comera_compile import calibrate as module
from comera_compile import user_cache
from comera_compile.calibrate import calibrated_model
from comera_compile.cli import main
from comera_compile.errors import CalibrationError
from comera_compile.planning.device_model import cpu_model
from comera_compile.tt.factorize import choose_shape
from comera_compile.tuned_plans import Layer, stored
from tests.fake_times import Clock, cache, clock
from tests.small_calibration import small

__all__ = ["cache", "clock", "small"]

ROOT = Path(__file__).resolve().parents[1]


def test_the_installed_command_is_this_function() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    name, _, function = scripts["comera"].partition(":")
    assert getattr(importlib.import_module(name), function) is main


def test_calibrate_stores_and_says_what_it_found(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--threads", "1", "--dtype", "float64", "--seconds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "calibrated on" in printed and "1 threads" in printed and str(small) in printed
    assert calibrated_model("cpu", 1, torch.float64) != cpu_model(1)
    assert calibrated_model("cpu", 1, torch.float32) == cpu_model(1)  # another dtype was not measured


@pytest.mark.usefixtures("small")
def test_calibrate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--threads", "1", "--seconds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)  # one object and nothing else
    model = calibrated_model("cpu", 1, torch.float32)
    assert found["peak_gflops"] == model.flops_per_second / 1e9
    assert found["x_by_half_gflops"] == pytest.approx(
        2 * 512 * 32 * 768 / model.product_seconds(1, 512, 32, 768, 4, False, True) / 1e9
    )
    assert found["stored"] is True and found["key"] == user_cache.entries()[0].key


def test_a_refused_calibration_ends_with_1_and_its_reason(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(*arguments: object) -> None:
        raise CalibrationError("times spread by 80%")

    monkeypatch.setattr("comera_compile.cli.calibrate", busy)
    assert main(["calibrate"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == "comera calibrate: times spread by 80%\n"
    assert not small.exists()


def test_a_calibration_that_cannot_be_stored_ends_with_1(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small.write_text("a file, not a directory")
    assert main(["calibrate", "--threads", "1", "--seconds", "1"]) == 1
    assert "NOT stored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["calibrate", "--threads", "0"], 1, "threads must be an int of at least 1, got 0"),
        (["calibrate", "--seconds", "99"], 1, "seconds must be a number from 1 to 30, got 99.0"),
        (["calibrate", "--dtype", "int8"], 2, "invalid choice: 'int8'"),
        (["calibrate", "--threads", "two"], 2, "invalid int value: 'two'"),
        (["tune", "--layer", "768", "--rows", "2"], 1, "in and out features such as 768x3072, got '768'"),
        (["tune", "--layer", "0x5", "--rows", "2"], 1, "in and out features such as 768x3072, got '0x5'"),
        (["tune", "--layer", "64x64", "--rows", "0"], 1, "rows must be positive, got [0]"),
        (["tune", "--layer", "64x64", "--rows", "2", "--rank", "0"], 1, "rank must be a positive int"),
        (
            ["tune", "--layer", "64x64", "--rows", "2", "--threads", "0"],
            1,
            "threads must be an int of at least 1, got 0",
        ),
        (["tune", "--layer", "64x64"], 2, "the following arguments are required: --rows"),
        (["cache", "--list", "--clear"], 2, "not allowed with argument"),
        (["melt"], 2, "invalid choice: 'melt'"),
        ([], 2, "the following arguments are required: command"),
    ],
)
@pytest.mark.usefixtures("small")
def test_wrong_command_lines(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        ended = main(arguments)
    except SystemExit as end:
        ended = int(end.code or 0)
    assert ended == code
    assert message in capsys.readouterr().err


@pytest.fixture
def made_up(small: Path, clock: Clock) -> Clock:
    """Times of plans are made up."""
    clock.prefer("rebuild W")
    return clock


def test_tune_stores_what_a_model_then_finds(made_up: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layer", "768x3072", "3072x768", "--rank", "16", "--rows", "32", "512"]
    assert main(["tune", *sizes, "--threads", "1", "--dtype", "float64"]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "predicted best" in head and "measured best" in head and "gain" in head
    assert [line.split("  ")[0] for line in lines] == ["768x3072 rank 16"] * 2 + ["3072x768 rank 16"] * 2
    assert [key.partition("torch")[2].split(" | ")[1:4] for key in keys()] == [["float64", "training", "cols"]] * 2
    shape = choose_shape(3072, 768, format="tt", rank=16)  # what the backend chooses for nn.Linear(768, 3072)
    layer = Layer(shape, "cols", "cpu", 1, torch.float64, True)
    assert [t.rows for t in stored(layer)] == [32, 512]


def keys() -> list[str]:
    return [entry.key or "" for entry in user_cache.entries()]


def test_tune_other_kinds_of_layers(made_up: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--layer", "768x3072", "--rows", "32", "--conv1d", "--inference", "--threads", "2"]) == 0
    assert "768x3072 rank 32 (inference)" in capsys.readouterr().out
    layer = Layer(choose_shape(768, 3072, format="tt", rank=32), "rows", "cpu", 2, torch.float32, False)
    assert [t.rows for t in stored(layer)] == [32] and len(keys()) == 1


def test_tune_on_a_busy_machine_ends_with_1(made_up: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    made_up.noise = 0.5
    assert main(["tune", "--layer", "768x768", "--rows", "32"]) == 1
    assert "not kept: times of one plan spread by 50%" in capsys.readouterr().out and keys() == []


def test_cache_lists_clears_and_names_its_directory(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user_cache.store("plans", "a layer", {"plan": 1})
    damaged = user_cache.store("calibration", "a device", {})
    assert damaged is not None
    damaged.write_text("garbage")
    assert main(["cache"]) == 0
    listed = capsys.readouterr().out
    assert "a layer" in listed and f"damaged: {damaged}" in listed and "2 entries" in listed
    assert main(["cache", "--list"]) == 0
    assert capsys.readouterr().out == listed
    assert main(["cache", "--path"]) == 0
    assert capsys.readouterr().out == f"{small}\n"
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == "2 entries deleted\n" and user_cache.entries() == []


def test_clearing_forgets_the_calibration(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = module.calibration_key("cpu", 1, torch.float32)
    user_cache.store("calibration", key, cpu_model(7).to_json())
    assert calibrated_model("cpu", 1, torch.float32) == cpu_model(7)
    assert main(["cache", "--clear"]) == 0
    calibrated_model.cache_clear()  # as in a new process
    assert calibrated_model("cpu", 1, torch.float32) == cpu_model(1)


def test_it_runs_as_a_program(small: Path) -> None:
    command = [sys.executable, "-m", "comera_compile.cli", "cache", "--path"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{small}\n"), done.stderr

"""A calibration measures what it says, is refused where the machine is busy, and is found again by those it fits."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comera_compile import calibrate as module
from comera_compile import device_timing, user_cache
from comera_compile.calibrate import calibrate, calibrated_model, calibration_key
from comera_compile.device_timing import (
    BATCH,
    ORDERS,
    STREAM,
    Copy,
    Kernel,
    Operands,
    Product,
    Run,
    Timed,
    Timings,
    Wrapper,
    fill,
    measure,
    product_grid,
)
from comera_compile.errors import CalibrationError, OptionError
from comera_compile.planning.device_model import FORMS, cpu_model
from comera_compile.planning.kernel_times import KernelTimes
from tests.small_calibration import SIZES, small

__all__ = ["small"]


def law(timed: Timed) -> float:
    """Seconds of a made-up device, different for each size and form."""
    if isinstance(timed, Wrapper):
        return 5e-6
    if isinstance(timed, Kernel):
        return 4e-5 if timed.name == "call" else 1e-3 * (1 + timed.bond)  # of four calls
    if isinstance(timed, Copy):
        return 1e-9 * timed.numel * (0.1 if timed.order == STREAM else 1 + ORDERS.index(timed.order))
    form = 1 + FORMS.index(timed.form)
    return 1e-6 * form * max(1, timed.batch) * timed.m**0.9 * timed.n**0.5 * timed.k**0.7


def made_up(spread: float = 0.0, share: float = 1.0) -> Any:
    """Stands for ``measure``: three rounds whose quartiles lie ``spread`` apart over their median."""

    def measured(runs: Mapping[Timed, Run], seconds: float, synchronize: Run, threads: int) -> Timings:
        return Timings({t: [law(t) * (1 - spread), law(t), law(t) * (1 + spread)] for t in runs}, share)

    return measured


@pytest.mark.parametrize("form", [*FORMS, "tt"])
@pytest.mark.parametrize("batch", [0, 3])
def test_what_is_timed_is_the_product_it_is_named_for(form: str, batch: int) -> None:
    operands = Operands("cpu", torch.float64, 4096)
    m, n, k = 5, 7, 11
    operands.run(Product(batch, form, m, n, k))()
    lead = [batch] if batch else []

    def operand(memory: torch.Tensor, rows: int, cols: int, transposed: bool) -> torch.Tensor:
        shape = [*lead, cols, rows] if transposed else [*lead, rows, cols]
        matrix = memory[: math.prod(shape)].reshape(shape)
        return matrix.transpose(-1, -2) if transposed else matrix

    left, right = operand(operands.left, m, k, form[0] == "t"), operand(operands.right, k, n, form[1] == "t")
    expected = left @ right
    assert torch.equal(operands.out[: expected.numel()].view(expected.shape), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_timed_is_a_copy_into_another_order(order: tuple[int, ...]) -> None:
    operands = Operands("cpu", torch.float32, 4096)
    operands.run(Copy(2048, order))()
    expected = operands.left[:2048].view(4, 16, 32).permute(order).reshape(-1)
    assert torch.equal(operands.out[:2048], expected)


def test_every_run_is_timed_once_a_round_and_three_rounds_at_least() -> None:
    calls = {"a": 0, "b": 0}

    def run(name: str) -> None:
        calls[name] += 1

    keys = {"a": Product(0, "nn", 1, 1, 1), "b": Product(0, "nt", 1, 1, 1)}
    timings = measure({keys[n]: lambda n=n: run(n) for n in calls}, 0.0, lambda: None)  # type: ignore[misc]
    assert timings.rounds == 3 and all(len(times) == 3 for times in timings.seconds.values())
    assert all(count > 3 for count in calls.values())  # short runs are repeated within a round


def test_a_measurement_that_takes_far_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def tick() -> float:
        now[0] += 5.0
        return now[0]

    monkeypatch.setattr(device_timing.time, "perf_counter", tick)
    with pytest.raises(CalibrationError, match="3 rounds take more than 3 times"):
        measure({Copy(k, (0,)): lambda: None for k in range(20)}, 20.0, lambda: None)
    assert now[0] < 100  # it did not wait for its rounds


def test_spread_is_the_range_of_quartiles_over_the_median() -> None:
    # Five rounds: quartiles are the second and the fourth. Of the runs the upper quartile counts: one odd run does not.
    steady = [1.0, 1.0, 1.0, 1.0, 1.0]
    times = [steady, steady, [8.0, 9.0, 10.0, 11.0, 50.0], [1.0, 2.0, 3.0, 4.0, 5.0], [4.0, 9.0, 10.0, 11.0, 12.0]]
    timings = Timings({Copy(k, (0,)): t for k, t in enumerate(times)})
    assert timings.spread == pytest.approx(0.2)
    assert list(timings.median.values()) == [1.0, 1.0, 10.0, 3.0, 10.0]


def test_the_grid_holds_what_is_short_enough() -> None:
    grid = product_grid(SIZES, 16 * 16 * 64)
    assert (16, 16, 64) in grid and (64, 1, 64) in grid and (64, 16, 16) in grid
    assert (64, 64, 16) not in grid and len(grid) == 27 - 4  # three of two 64s and a 16, and the cube of 64


def test_what_was_not_timed_gets_the_rate_of_the_next_smaller_product() -> None:
    times = {p: 1e-6 * math.prod(p) for p in product_grid(SIZES, 16 * 16 * 64)}
    times[16, 16, 64] *= 3
    filled = dict(zip(itertools.product(SIZES, repeat=3), fill(times, SIZES), strict=True))
    assert all(filled[p] == s for p, s in times.items())
    assert filled[64, 64, 16] == pytest.approx(4 * times[16, 64, 16])
    assert filled[16, 64, 64] == pytest.approx(4 * times[16, 16, 64])


@pytest.mark.usefixtures("small")
def test_the_model_predicts_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", made_up())
    model = calibrate(threads=1)
    for form, (m, n, k) in itertools.product(FORMS, itertools.product(SIZES, repeat=3)):
        transposed = form[0] == "t", form[1] == "t"
        expected = law(Product(0, form, m, n, k))
        assert model.product_seconds(1, m, n, k, 4, *transposed) == pytest.approx(expected + 5e-6, rel=1e-3)
        # A batch that was measured is given back: one launch, no less for its matrices than measured.
        batch = law(Product(BATCH, form, m, n, k))
        assert model.product_seconds(BATCH, m, n, k, 4, *transposed) == pytest.approx(batch + 5e-6, rel=1e-3)
    assert model.launch_seconds == pytest.approx(6e-6)
    copied = [model.copy_seconds(4 * 1024, kind) for kind in range(3)]  # elements of four bytes
    assert copied == pytest.approx([6024e-9, 7048e-9, 8072e-9])
    assert model.bytes_per_second == pytest.approx(2 * 4 / 0.1e-9)
    assert model.kernels is not None and model.kernels.call_seconds == 1e-5
    for bond in (8, 16, 32, 64, 128):  # what was timed is given back: 384 rows through 768 x 768, each way
        forward, both = (model.kernels.apply_seconds(384, 768, 768, bond, training=t) for t in (False, True))
        assert forward == pytest.approx(law(Kernel("forward", bond)) / 4)
        assert both - forward == pytest.approx(law(Kernel("backward", bond)) / 4)


def test_operators_have_the_rates_of_the_bonds_next_to_theirs() -> None:
    times = KernelTimes(1e-6, ((8, 1e9), (16, 3e9)), ((8, 1e9),), ((8, 1e9), (16, 3e9)))
    work = 2 * 100 * (30 + 70)  # FLOPs of 100 rows and a bond of one
    for bond, rate in ((1, 1e9), (8, 1e9), (12, 2e9), (16, 3e9), (64, 3e9)):
        seconds = times.apply_seconds(100, 30, 70, bond, training=False)
        assert seconds == pytest.approx(2e-6 + work * bond / rate)
        trained = times.apply_seconds(100, 30, 70, bond, training=True)
        assert trained - seconds == pytest.approx(1e-6 + 2 * work * bond / 1e9)
    assert times.merge_seconds(4000, 12, training=True) == pytest.approx(2e-6 + 2e-6)
    assert times.takes(128, 4) and not times.takes(129, 4) and not times.takes(8, 2)
    assert KernelTimes.from_json(json.loads(json.dumps(times.to_json()))) == times
    for wrong in ({"call_seconds": 0.0}, {"merge": ((8, math.inf),)}, {"forward": ((8, -1.0),)}, {"backward": ()}):
        with pytest.raises(ValueError, match="must be positive"):
            replace(times, **wrong)  # type: ignore[arg-type]


def test_a_calibration_is_stored_and_found_again(small: Path) -> None:
    threads = torch.get_num_threads()
    assert calibrated_model("cpu", 1, torch.float32) == cpu_model(1)
    model = calibrate(threads=1, seconds=1)
    assert torch.get_num_threads() == threads
    assert calibrated_model("cpu", 1, torch.float32) == model != cpu_model(1)
    calibrated_model.cache_clear()  # as in another process
    again = calibrated_model("cpu", 1, torch.float32)
    assert again == model and again.source == model.source
    # Real times: 64 x 64 x 64 takes longer than 1 x 1 x 1 and less than a millisecond; rates are plausible.
    assert model.launch_seconds <= model.product_seconds(1, 64, 64, 64, 4) < 1e-3
    assert 1e8 < model.flops_per_second < 1e13 and 1e7 < model.bytes_per_second < 1e12
    assert model.kernels is not None and 1e-7 < model.kernels.call_seconds < 1e-3
    tables = model.kernels.forward, model.kernels.backward, model.kernels.merge
    assert [len(rates) for rates in tables] == [5, 5, 4]
    assert all(1e8 < rate < 1e13 for rates in tables for _, rate in rates)
    assert len(list(small.rglob("*.json"))) == 1


def test_a_calibration_holds_for_its_device_torch_threads_and_dtype(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure", made_up())
    calibrate(threads=1)
    assert calibrated_model("cpu", 2, torch.float32) == cpu_model(2)
    assert calibrated_model("cpu", 1, torch.float64) == cpu_model(1)
    keys = {calibration_key("cpu", 1, torch.float32)}
    monkeypatch.setattr(torch, "__version__", "99.0")
    keys.add(calibration_key("cpu", 1, torch.float32))
    monkeypatch.setattr(module, "device_name", lambda device_type: "another processor")
    keys.add(calibration_key("cpu", 1, torch.float32))
    monkeypatch.setattr(module, "VERSION", 99)
    keys.add(calibration_key("cpu", 1, torch.float32))
    assert len(keys) == 4
    calibrated_model.cache_clear()
    assert calibrated_model("cpu", 1, torch.float32) == cpu_model(1)


@pytest.mark.usefixtures("small")
def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_SPREAD", 0.25)
    monkeypatch.setattr(module, "SMALLEST_SHARE", 0.85)
    monkeypatch.setattr(module, "measure", made_up(spread=0.4))
    threads = torch.get_num_threads()
    with pytest.raises(CalibrationError, match=r"spread by 40%.*at most 25%.*stop them or pass fewer threads"):
        calibrate(threads=1)
    assert user_cache.entries() == []  # nothing of it is kept
    assert torch.get_num_threads() == threads
    monkeypatch.setattr(module, "measure", made_up(share=0.6))
    with pytest.raises(CalibrationError, match=r"got 60% of the time of their threads \(at least 85%\)"):
        calibrate(threads=1)
    monkeypatch.setattr(module, "measure", made_up(spread=0.2, share=0.9))
    assert calibrate(threads=1).products


def test_nothing_is_measured_unless_asked(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(module, "measure", refuse)
    assert calibrated_model("cpu", 2, torch.float32) == cpu_model(2)
    assert not small.exists()


@pytest.mark.usefixtures("small")
def test_a_stored_value_that_is_no_model_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    key = calibration_key("cpu", 1, torch.float32)
    user_cache.store("calibration", key, {"flops_per_second": "fast"})
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        assert calibrated_model("cpu", 1, torch.float32) == cpu_model(1)
        assert calibrated_model("cpu", 1, torch.float32) == cpu_model(1)
    [record] = caplog.records
    assert key in record.getMessage() and "calibrate again" in record.getMessage()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
        ({"threads": 0}, "threads must be an int of at least 1, got 0"),
        ({"threads": 2.0}, "threads must be an int of at least 1, got 2.0"),
        ({"threads": 1 << 20}, "threads must be at most the"),
        ({"dtype": torch.int8}, "dtype must be one of float32, float64, bfloat16, float16, got torch.int8"),
        ({"seconds": 0}, "seconds must be a number from 1 to 30, got 0"),
        ({"seconds": math.nan}, "seconds must be a number from 1 to 30, got nan"),
    ],
)
def test_impossible_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        calibrate(**arguments)
    assert message in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device() -> None:
    with pytest.raises(OptionError, match="finds no CUDA device"):
        calibrate("cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("small")
def test_a_gpu_can_be_calibrated() -> None:
    model = calibrate("cuda", seconds=1)
    assert calibrated_model("cuda", 1, torch.float32) == model
    # Waiting for the device is part of every time: below a microsecond nothing was waited for.
    assert model.launch_seconds > 5e-7


@pytest.mark.usefixtures("small")
def test_a_stored_calibration_is_json_of_moderate_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", made_up())
    for name in ("SIZES", "BATCHED_SIZES", "COPIES"):
        monkeypatch.setattr(module, name, getattr(device_timing, name))
    monkeypatch.setattr(module, "_CAPACITY", 1 << 24)
    text = json.dumps(calibrate(threads=1).to_json())
    assert len(text) < 200_000  # read in every process that plans

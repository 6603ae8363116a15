"""Predicted times: what was measured is given back, and what lies between or beyond follows a rule."""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import replace

import pytest

from comera_compile.planning.device_model import (
    CUDA_MODEL,
    FORMS,
    DeviceModel,
    ProductTimes,
    cpu_model,
    shipped_model,
)

SIZES = (1, 8, 64, 512)


def law(m: float, n: float, k: float) -> float:
    """Seconds that are a power of each size: straight lines in log space."""
    return float(1e-6 * m**0.9 * n**0.5 * k**0.7)


def table(factor: float = 1.0) -> ProductTimes:
    grid = itertools.product(SIZES, repeat=3)
    return ProductTimes(SIZES, tuple(math.log2(factor * law(m, n, k)) for m, n, k in grid))


MODEL = DeviceModel(
    1e11,
    1e10,
    1e-6,
    1e-7,
    0.0,
    copies=(
        ((1024.0, 1e-6), (65536.0, 2e-6)),
        ((1024.0, 2e-6), (65536.0, 32e-6), (1048576.0, 1e-3)),
        ((1024.0, 3e-6), (65536.0, 90e-6)),
    ),
    products=tuple(table(1 + form) for form in range(3)),
    batched=tuple(table(10 * (1 + form)) for form in range(3)),
    source="a test",
)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 512, 64), (512, 512, 512), (30, 100, 7), (511, 2, 360)])
def test_between_measured_sizes_time_follows_straight_lines_in_log_space(sizes: tuple[int, int, int]) -> None:
    # A power law is such a line: interpolation must give it back exactly, on the grid and between.
    assert MODEL.product_seconds(1, *sizes, 4) == pytest.approx(law(*sizes))


def test_any_table_is_given_back_on_its_grid() -> None:
    values = [-20 + math.sin(37 * k) for k in range(64)]
    rough = ProductTimes(SIZES, tuple(values))
    found = [math.log2(rough.seconds(*point)) for point in itertools.product(SIZES, repeat=3)]
    assert found == pytest.approx(values)


def test_beyond_the_grid_the_rate_stays() -> None:
    at_edge = MODEL.product_seconds(1, 512, 64, 8, 4)
    assert MODEL.product_seconds(1, 100 * 512, 64, 8, 4) == pytest.approx(100 * at_edge)
    every = MODEL.product_seconds(1, 512, 512, 512, 4)
    assert MODEL.product_seconds(1, 1024, 2048, 512, 4) == pytest.approx(8 * every)
    # Sizes whose product passes 2^63.
    assert MODEL.product_seconds(1, 1 << 30, 1 << 30, 1 << 30, 4) == pytest.approx(every * 2.0 ** (3 * 21))


def test_beyond_the_grid_a_product_streams_its_operands_at_least() -> None:
    # Measured in a cache: 512 x 1 x 8 at some rate; a million rows of it do not fit one, a thousand do.
    slow = replace(MODEL, bytes_per_second=1e6)
    rows = 1 << 20
    assert slow.product_seconds(1, rows, 1, 8, 2) == pytest.approx(2 * (rows * 8 + 8 + rows) / 1e6)
    assert slow.product_seconds(1, 1024, 1, 8, 2) == MODEL.product_seconds(1, 1024, 1, 8, 2)
    # Sizes that were measured have nothing to add.
    assert slow.product_seconds(40, 512, 512, 512, 2) == MODEL.product_seconds(40, 512, 512, 512, 2)


def test_each_form_has_its_own_times() -> None:
    for form, name in enumerate(FORMS):
        seconds = MODEL.product_seconds(1, 64, 64, 64, 4, name[0] == "t", name[1] == "t")
        assert seconds == pytest.approx((1 + form) * law(64, 64, 64))
    # Both transposed: "tn" is three times "nn" here, and "nt" is twice "nn".
    assert MODEL.product_seconds(1, 64, 64, 64, 4, True, True) == pytest.approx(6 * law(64, 64, 64))


def test_a_batch_takes_a_launch_and_its_matrices() -> None:
    for batch in (2, 6, 36):
        assert MODEL.product_seconds(batch, 8, 8, 8, 4) == pytest.approx(1e-6 + batch * 10 * law(8, 8, 8))


@pytest.mark.parametrize("model", [MODEL, cpu_model(2), CUDA_MODEL], ids=["measured", "cpu", "cuda"])
@pytest.mark.parametrize("sizes", [(0, 8, 8, 8), (1, 0, 8, 8), (1, 8, 0, 8), (1, 8, 8, 0)])
def test_nothing_to_multiply_is_a_launch(model: DeviceModel, sizes: tuple[int, int, int, int]) -> None:
    assert model.product_seconds(*sizes, 4) == model.launch_seconds


def test_copies_between_and_beyond_measured_sizes() -> None:
    assert [MODEL.copy_seconds(n) for n in (1024, 65536, 1 << 20)] == pytest.approx([2e-6, 32e-6, 1e-3])
    assert MODEL.copy_seconds(8192) == pytest.approx(8e-6)  # halfway in log space between 2 and 32 microseconds
    assert MODEL.copy_seconds(10 << 20) == pytest.approx(1e-2)  # at the rate of the largest
    assert MODEL.copy_seconds(0) == MODEL.copy_seconds(1) == pytest.approx(2e-6)  # a launch
    assert [MODEL.copy_seconds(65536, kind) for kind in range(3)] == pytest.approx([2e-6, 32e-6, 90e-6])


def test_copies_that_were_not_measured_stream_twice_their_bytes() -> None:
    model = replace(cpu_model(1), bytes_per_second=1e6, copy_launch_seconds=1e-3, copy_factors=(1.0, 2.0, 5.0))
    assert [model.copy_seconds(10_000, kind) for kind in range(3)] == pytest.approx([0.02, 0.04, 0.1])
    assert model.copy_seconds(10) == 1e-3


def test_shipped_figures_follow_the_stated_formula() -> None:
    model = DeviceModel(1e9, 1e6, 1e-3, 1e-4, 10.0)
    assert model.product_seconds(1, 100, 30, 40, 4) == max(2 * 100 * 30 * 40 / 7.5e8, 4 * 8200 / 1e6)
    assert model.product_seconds(1, 2, 2, 2, 4) == 1e-3
    assert model.product_seconds(5, 2, 2, 2, 4) == pytest.approx(1e-3 + 5e-4)
    assert shipped_model("cuda", 4) == CUDA_MODEL and shipped_model("cpu", 4) == cpu_model(4)


def test_json_gives_an_equal_model() -> None:
    for model in (MODEL, cpu_model(3), CUDA_MODEL):
        again = DeviceModel.from_json(json.loads(json.dumps(model.to_json())))
        assert again == model and hash(again) == hash(model) and again.source == model.source


DAMAGED = {
    "empty": {},
    "a rate of zero": {"flops_per_second": 0},
    "no number": {"launch_seconds": float("nan")},
    "a text": {"bytes_per_second": "fast"},
    "one size of copies": {"copies": [[[1024.0, 1e-6]]] * 3},
    "copies out of order": {"copies": [[[2048.0, 1e-6], [1024.0, 1e-6]]] * 3},
    "a kind of copies missing": {"copies": MODEL.to_json()["copies"][:2]},
    "a factor missing": {"copy_factors": [1.0, 1.0]},
    "a form missing": {"products": MODEL.to_json()["products"][:2]},
    "times missing": {"products": [[SIZES, [0.0] * 63]] * 3},
    "times without end": {"batched": [[SIZES, [math.inf] * 64]] * 3},
    "a grid without 1": {"batched": [[(2, 8, 64, 512), [0.0] * 64]] * 3},
    "a grid out of order": {"batched": [[(1, 8, 8, 512), [0.0] * 64]] * 3},
    "one kind of products": {"batched": []},
    "tables of nothing": {"products": 7},
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED.keys())
def test_what_is_no_model_is_refused(change: dict[str, object]) -> None:
    # A cache file may hold anything; only a ValueError says "calibrate again".
    value = {**MODEL.to_json(), **change} if change else {}
    with pytest.raises(ValueError):
        DeviceModel.from_json(value)


def test_models_compare_by_their_figures() -> None:
    # Plans are cached by model: equal figures share an entry wherever they came from, others must not.
    same = replace(MODEL, source="elsewhere")
    assert same == MODEL and hash(same) == hash(MODEL)
    assert replace(MODEL, launch_seconds=2e-6) != MODEL
    assert replace(MODEL, products=MODEL.batched) != MODEL


def test_a_prediction_takes_microseconds() -> None:
    # A search asks for thousands. About 2 microseconds; the bar leaves room for a busy machine.
    sizes = [(m, n, k) for m in range(1, 300, 7) for n in (8, 30, 768) for k in (16, 360)]
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for m, n, k in sizes:
            MODEL.product_seconds(1, m, n, k, 4)
        best = min(best, time.perf_counter() - start)
    assert best / len(sizes) < 2e-5


def test_places_of_many_row_numbers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comera_compile.planning.device_model._MOST_PLACES", 50)
    times = table()
    for m in range(1, 500):
        assert times.seconds(m, 1, 1) == pytest.approx(law(m, 1, 1))
    assert len(times._places) <= 51

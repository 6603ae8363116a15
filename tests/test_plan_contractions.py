"""Which plan a use gets: by its rows, on a symbolic number of rows through one guard a crossover."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_compile.calibrate import calibrated_model
from comera_compile.passes import plan_contractions as the_pass
from comera_compile.planning.choose import plans_by_rows
from comera_compile.planning.linear_plan import candidates
from comera_compile.planning.lookup_plan import LookupPlan
from comera_compile.planning.row_ranges import RowRange
from comera_compile.planning.uses import PLAN, USE
from tests.packed_modules import Capture, Holder, assert_as_eager, linear, shape_of

WIDTH = 24
# Ranges of the pretended choice below: few rows, some, many.
SMALL, MIDDLE = 8, 32


@pytest.fixture
def three_ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Crossovers at 8 and 32 rows, for a shape so small that the real choice would not have them."""
    names = ["core by core", "merge 2 | 1+1", "merge both halves"]

    def choose(shape, contracts, *settings):  # type: ignore[no-untyped-def]
        plans = {p.name: p for p in candidates(shape, contracts, 16)}
        return tuple(RowRange(up_to, plans[n]) for up_to, n in zip((SMALL, MIDDLE, None), names, strict=True))

    monkeypatch.setattr(the_pass, "plans_by_rows", choose)
    return names


def x(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        ((8, WIDTH), 0),  # the limit belongs to the lower range
        ((9, WIDTH), 1),
        ((2, 4, WIDTH), 0),  # rows are all dimensions but the last
        ((4, 8, WIDTH), 1),
        ((3, 11, WIDTH), 2),
        ((WIDTH,), 0),  # a vector is one row
        ((0, WIDTH), 0),
    ],
)
def test_the_rows_choose(size: tuple[int, ...], plan: int, three_ranges: list[str]) -> None:
    capture = Capture()
    assert_as_eager(capture, linear(WIDTH, WIDTH), x(*size))
    assert [p.name for p in capture.plans] == [three_ranges[plan]]


def test_uses_of_one_weight_are_planned_each_for_itself(three_ranges: list[str]) -> None:
    model = Holder(lambda w, a, b: F.linear(a, w).sum() + F.linear(b, w).sum(), WIDTH, WIDTH)
    capture = Capture()
    assert_as_eager(capture, model, x(2, WIDTH), x(50, WIDTH))
    assert [p.name for p in capture.plans] == [three_ranges[0], three_ranges[2]]


def test_each_range_of_a_dynamic_batch_is_compiled_once(three_ranges: list[str]) -> None:
    model, capture = linear(WIDTH, WIDTH), Capture()
    for rows in (5, 6, 8, 9, 32, 20, 33, 700, 7, 31, 100, 2):
        assert_as_eager(capture, model, x(rows, WIDTH), dynamic=True)
    # In the order in which they were met; every later batch finds its range compiled.
    assert [p.name for p in capture.plans] == three_ranges


def test_a_batch_that_becomes_dynamic_costs_one_more_compilation(three_ranges: list[str]) -> None:
    # As users meet it: the first batch size is compiled as a constant, the second as a symbol.
    model, capture = linear(WIDTH, WIDTH), Capture()
    for rows in (10, 12, 14, 31, 4, 6, 50, 60, 10, 5, 90):
        assert_as_eager(capture, model, x(rows, WIDTH))
    assert [p.name for p in capture.plans] == [three_ranges[k] for k in (1, 1, 0, 2)]


def test_a_dynamic_sequence_counts_into_the_rows(three_ranges: list[str]) -> None:
    model, capture = linear(WIDTH, WIDTH), Capture()
    for batch, length in ((2, 3), (3, 2), (4, 2), (5, 3), (3, 10), (7, 9), (2, 4), (4, 8)):
        assert_as_eager(capture, model, x(batch, length, WIDTH), dynamic=True)
    assert [p.name for p in capture.plans] == three_ranges


def test_layers_cross_over_together(three_ranges: list[str]) -> None:
    # Equal layers add no guards: three ranges for the whole stack, not three to the power of layers.
    model = nn.Sequential(*(layer for _ in range(3) for layer in (linear(WIDTH, WIDTH), nn.ELU())))
    capture = Capture()
    for rows in (5, 20, 40, 6, 21, 41):
        assert_as_eager(capture, model, x(rows, WIDTH), dynamic=True)
    assert len(capture.graphs) == 3 and len(capture.plans) == 9


def test_real_crossovers_are_kept() -> None:
    # No pretended ranges: the two plans around a real crossover of 256 x 256 at rank 24, one row apart.
    model = linear(256, 256, rank=24, order=3)
    settings = ("cpu", torch.get_num_threads(), 8, True)
    ranges = plans_by_rows(shape_of(model).with_scale(1.0), "cols", *settings)
    assert len(ranges) > 1
    capture = Capture()
    for low in ranges[:-1]:
        assert low.up_to is not None
        for rows in (low.up_to, low.up_to + 1):
            assert_as_eager(capture, model, x(rows, 256), dynamic=True)
    assert capture.plans == [r.plan for r in ranges]


def test_settings_reach_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def choose(*settings):  # type: ignore[no-untyped-def]
        asked.append(settings)
        return plans_by_rows(*settings)

    monkeypatch.setattr(the_pass, "plans_by_rows", choose)
    threads = torch.get_num_threads()
    model = linear(WIDTH, WIDTH)
    shape = shape_of(model).with_scale(1.0)  # layers that differ in scale share a plan
    common, last = (shape, "cols", "cpu", threads, 8), (calibrated_model("cpu", threads, torch.float64), "time", 3)
    runs: list[tuple[Callable[[], object], tuple[object, ...]]] = [
        (lambda: Capture().compile(model)(x(3, WIDTH)), (*common, True, *last)),
        (lambda: no_grad(model), (*common, False, *last)),
        (lambda: frozen(model), (*common, False, *last)),
    ]
    for run, expected in runs:
        torch._dynamo.reset()
        asked.clear()
        run()
        assert asked == [expected]


def no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        Capture().compile(model)(x(3, WIDTH))


def frozen(model: nn.Module) -> None:
    model.requires_grad_(False)
    Capture().compile(model)(x(3, WIDTH).requires_grad_())


def test_lookups_have_one_plan_for_any_number_of_ids() -> None:
    model = Holder(lambda w, ids: F.embedding(ids, w), 40, 12, format="ttm")
    capture = Capture()
    for count in (3, 5, 100):
        assert_as_eager(capture, model, torch.randint(40, (count,)), dynamic=True)
    assert len(capture.graphs) == 1
    (node,) = (n for n in capture.nodes if USE in n.meta)
    plan = node.meta[PLAN]
    assert isinstance(plan, LookupPlan) and plan.shape == shape_of(model).with_scale(1.0)

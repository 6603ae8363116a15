"""``comera.report``: every matrix by name, with its form, reason, sizes and what runs for it."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn

import comera_compile as comera
from comera_compile import plan_record, tuned_plans
from comera_compile.planning.device_model import DeviceModel
from tests import tiny_models as tiny
from tests.saving_models import OPTIONS as SAVING
from tests.saving_models import Gpt, packed, really_saved, words


class Zoo(nn.Module):
    """One weight of each kind that is converted or stays dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, tiny.WIDTH)
        self.used = nn.Linear(tiny.WIDTH, 48)
        self.small = nn.Linear(48, 4)
        self.frozen = nn.Linear(48, tiny.WIDTH).requires_grad_(False)
        self.kept = nn.Linear(48, tiny.WIDTH)
        self.image = nn.Conv1d(tiny.WIDTH, 20, 3)
        self.memory = nn.GRUCell(tiny.WIDTH, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.small(self.used(self.table(ids)))


def compiled_mlp(**options: object) -> tuple[nn.Module, torch.Tensor]:
    """A compiled model and its first output, on six rows."""
    model = tiny.double(tiny.Mlp())
    call = torch.compile(model, backend="comera", options=tiny.OPTIONS | options)
    return model, call(tiny.rows(6))


def reasons(report: comera.Report) -> dict[str, str]:
    return {line.decision.name: line.decision.reason for line in report.lines}


def test_names_are_the_models_own() -> None:
    # Every matrix in the model's order, no biases or norms; the compiled wrapper leaves no trace in the names.
    model = Zoo()
    wrapped = torch.compile(model, backend="comera")
    expected = [name for name, p in model.named_parameters() if p.dim() > 1]
    for convert in (False, True):
        if convert:
            comera.tensorize(wrapped, **tiny.TENSORIZE)
        for subject in (model, wrapped):
            assert [line.decision.name for line in comera.report(subject).lines] == expected


def test_every_dense_weight_has_its_reason() -> None:
    # Users ask first why a layer was left out: each answer names the cause.
    why = reasons(comera.report(comera.tensorize(Zoo(), **tiny.TENSORIZE, exclude="kept")))
    assert why["small.weight"] == "192 elements are fewer than min_elements=500"
    assert why["frozen.weight"] == "frozen (requires_grad is False)"
    assert why["kept.weight"] == "excluded by 'kept'"
    assert why["image.weight"] == "3-dimensional"
    assert why["memory.weight_ih"] == "GRUCell is not rewritten"
    assert why["used.weight"].startswith("untrained: rank 4 keeps ")


def test_an_untouched_model_says_so() -> None:
    # Before any call there is nothing to tell but the sizes.
    report = comera.report(tiny.Mlp())
    assert set(reasons(report).values()) == {"not looked at yet"}
    assert report.tensorized == () and report.numel == report.dense_numel == 2 * 48 * tiny.WIDTH


def test_parameter_counts() -> None:
    # Before: what the dense model had. Now: what an optimizer really holds, shared weights once.
    model = tiny.Tied()
    dense = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    comera.tensorize(model, **tiny.TENSORIZE, exclude="body.fc2")
    report = comera.report(model)
    packed = sum(m._parameters["weight"].numel() for m in (model.embed, model.body.fc1))
    assert report.dense_numel == dense == 60 * tiny.WIDTH + 2 * 48 * tiny.WIDTH
    assert report.numel == packed + 48 * tiny.WIDTH
    assert [line.decision.name for line in report.tensorized] == ["embed.weight", "body.fc1.weight"]


def test_one_weight_by_name() -> None:
    # The KeyError of a wrong name lists the right ones.
    report = comera.report(comera.tensorize(tiny.Mlp(), **tiny.TENSORIZE))
    shape = report["fc1.weight"].decision.shape
    assert shape is not None and (shape.rows, shape.cols, shape.bond) == (48, tiny.WIDTH, 4)
    with pytest.raises(KeyError, match=r"'fc1' is not among the matrices: fc1\.weight, fc2\.weight"):
        report["fc1"]


def test_a_compiled_call_fills_in_the_plan() -> None:
    # Rows of the call, work and saved bytes of its plan: none before, at least x h and h y of a rank-4 product after.
    model, _ = compiled_mlp()
    for name in ("fc1.weight", "fc2.weight"):
        (use,) = comera.report(model)[name].uses
        assert use.plan and use.rows == "6"
        assert use.flops is not None and use.flops >= 3 * 2 * 6 * 4 * (48 + tiny.WIDTH)
        assert use.saved_bytes is not None and use.saved_bytes >= 6 * 4 * 8
    assert comera.report(comera.tensorize(tiny.Mlp(), **tiny.TENSORIZE))["fc1.weight"].uses == ()


def test_the_newest_graph_is_shown() -> None:
    # After the batch size changed, the plan of the old one would mislead.
    model = tiny.double(tiny.Mlp())
    call = torch.compile(model, backend="comera", options=tiny.OPTIONS, dynamic=False)
    for batch in (6, 9):
        call(tiny.rows(batch))
        assert comera.report(model)["fc1.weight"].uses[0].rows == str(batch)


def test_two_uses_of_one_weight() -> None:
    # Both are listed; the table shows the first and how many more there are.
    model = tiny.double(tiny.Twice())
    torch.compile(model, backend="comera", options=tiny.OPTIONS)(tiny.rows(4))
    line = comera.report(model)["fc.weight"]
    assert [use.rows for use in line.uses] == ["4", "4"]
    assert "(+1 more)" in str(comera.report(model))


class Unplanned(tiny.Mlp):
    """Also uses a weight in a way that no plan covers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.fc1.weight.square().mean()


def test_an_unplanned_use_is_shown() -> None:
    # The dense matrix is rebuilt for it in every call: a user must see that, and which operation it was.
    model = tiny.double(Unplanned())
    torch.compile(model, backend="comera", options=tiny.OPTIONS)(tiny.rows(4))
    plans = [use.plan for use in comera.report(model)["fc1.weight"].uses]
    assert len(plans) == 2 and "rebuild W for square" in plans
    assert not any("rebuild W" in use.plan for use in comera.report(model)["fc2.weight"].uses)


def test_the_text_holds_every_column() -> None:
    # One line a weight under the heads, each cell below its head, and the sums at the end.
    model, _ = compiled_mlp(exclude="fc2")
    text = str(comera.report(model))
    head, rule, first, second, foot, *_ = text.splitlines()
    columns = ("weight", "form", "parameters", "modes", "ranks", "kept", "plan", "rows")
    columns += ("MFLOP", "saved KiB", "vs dense", "why")
    starts = [head.index(name) for name in columns]
    assert starts == sorted(starts) and set(rule) == {"-"}
    cells = dict(
        zip(columns, (first[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)), strict=True)
    )
    line = comera.report(model)["fc1.weight"]
    shape, use = line.decision.shape, line.uses[0]
    assert shape is not None
    assert (cells["weight"], cells["form"], cells["rows"], cells["plan"]) == ("fc1.weight", "tt", "6", use.plan)
    assert cells["parameters"] == f"1,536 -> {shape.numel}"
    assert cells["modes"] == "8x6 | 4x8" and cells["ranks"] == "4,4,4"
    assert cells["kept"].endswith("%") and cells["why"] == line.decision.reason
    assert float(cells["MFLOP"]) == pytest.approx((use.flops or 0) / 1e6, abs=0.05)
    assert float(cells["saved KiB"]) == pytest.approx((use.saved_bytes or 0) / 1024, abs=0.5)
    assert cells["vs dense"] == f"{line.over_dense:.2g}x"
    assert second.split()[:3] == ["fc2.weight", "dense", "1,536"] and second.endswith("excluded by 'fc2'")
    now = 1536 + shape.numel
    assert foot.startswith(f"1 of 2 matrices are tensor trains; 3,072 parameters before, {now:,} now (")


def timed_by(monkeypatch: pytest.MonkeyPatch, device: DeviceModel) -> None:
    """Plans are chosen and told by these figures."""
    for module in (plan_record, tuned_plans):
        monkeypatch.setattr(module, "calibrated_model", lambda *_: device)


ORDER_1 = {"layers": {"fc1": {"modes": ((48,), (tiny.WIDTH,))}}, "exclude": "fc2"}


@pytest.mark.parametrize("training", [True, False])
def test_predicted_times_by_hand(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Time is operations. 48 x 32 as two cores of rank 4, which is padded to 8: 8 * (48 + 32) products a row, dense
    # 48 * 32. A training step has three of each: forward, and a gradient of both operands.
    timed_by(monkeypatch, DeviceModel(1.0, math.inf, 0.0, 0.0, 0.0))
    model = tiny.double(tiny.Mlp())
    call = torch.compile(model, backend="comera", options=tiny.OPTIONS | ORDER_1)
    with torch.set_grad_enabled(training):
        call(tiny.rows(600))
    line = comera.report(model)["fc1.weight"]
    (use,), times = line.uses, 3 if training else 1
    assert use.plan == "merge both halves" and use.rows_hint == 600
    assert use.seconds == times * 2 * 600 * 8 * (48 + 32)
    assert use.dense_seconds == times * 2 * 600 * 48 * 32
    assert line.over_dense == 2.4 and comera.report(model).better_dense == ()


def test_layers_that_are_better_dense_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Time is products: two cores take two, forward, and four backward; dense takes one and two. The line says how much
    # faster, at how many rows, and what to do, after which there is nothing left to say.
    timed_by(monkeypatch, DeviceModel(1e30, math.inf, 1.0, 0.0, 0.0))

    def report(**options: object) -> comera.Report:
        model = tiny.double(tiny.Mlp())
        torch.compile(model, backend="comera", options=tiny.OPTIONS | ORDER_1 | options)(tiny.rows(600))
        return comera.report(model)

    found = report()
    assert [line.decision.name for line in found.better_dense] == ["fc1.weight"]
    assert [line for line in str(found).splitlines() if "faster dense" in line] == [
        "fc1.weight: 2x faster dense at 600 rows (predicted, without the optimizer): exclude='fc1', or a lower rank"
    ]
    remedied = report(exclude=["fc1", "fc2"])
    assert remedied.better_dense == () and "faster dense" not in str(remedied)


def test_merges_of_equal_layers_are_shared_in_the_prediction() -> None:
    # Two layers of one plan merge their cores in one step: each is charged half of it, so less than a layer alone.
    class Pair(tiny.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(tiny.WIDTH, 48)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.fc2(self.again(x))

    alone, together = (compiled_on(model(), 30)["fc1.weight"].uses[0] for model in (tiny.Mlp, Pair))
    assert alone.plan != "rebuild W"  # of which each layer has its own
    assert together.plan == alone.plan and together.dense_seconds == alone.dense_seconds
    assert together.seconds is not None and alone.seconds is not None and together.seconds < alone.seconds


def compiled_on(model: nn.Module, count: int) -> comera.Report:
    tiny.double(model)
    torch.compile(model, backend="comera", options=tiny.OPTIONS)(tiny.rows(count))
    return comera.report(model)


def test_no_prediction_for_lookups_and_unplanned_uses() -> None:
    # A gather is no product: dense is not 'faster' or 'slower' there, and nothing is advised.
    model = tiny.Tied()
    torch.compile(model, backend="comera", options=tiny.OPTIONS)(torch.randint(0, 60, (2, 5)))
    assert comera.report(model)["embed.weight"].over_dense is None
    unplanned = tiny.double(Unplanned())
    torch.compile(unplanned, backend="comera", options=tiny.OPTIONS)(tiny.rows(4))
    assert comera.report(unplanned)["fc1.weight"].over_dense is None
    assert comera.report(tiny.Mlp())["fc1.weight"].over_dense is None


@pytest.mark.parametrize("options", [{}, {"saved": "min"}, {"saved_bytes": 10**9}])
def test_what_the_graph_saves(options: dict[str, object]) -> None:
    # Predicted when the graph was cut, and what autograd then holds.
    model = packed(Gpt(blocks=1))
    ids = words()
    loss = torch.compile(model, backend="comera", options=SAVING | options)(ids)
    report = comera.report(model)
    (graph,) = report.graphs
    assert graph.saved is not None and graph.saved.total == really_saved(loss, model, ids)
    assert str(report).splitlines()[-1] == f"graph 1: {graph.saved}"


def test_a_graph_that_others_cut_says_so() -> None:
    # saved="all" leaves the cut to the inner compiler, and evaluation has none: no number rather than a wrong one.
    for options, recorded in (({"saved": "all"}, True), ({}, False)):
        model = packed(Gpt(blocks=1))
        with torch.set_grad_enabled(recorded):
            torch.compile(model, backend="comera", options=SAVING | options)(words())
        report = comera.report(model)
        assert [graph.saved for graph in report.graphs] == [None]
        assert "is not known here" in str(report).splitlines()[-1]


def test_after_deepcopy() -> None:
    # The copy's weights are other objects: form and sizes are known from the module, plans are not its own.
    model, _ = compiled_mlp()
    twin = comera.report(copy.deepcopy(model))
    assert twin.numel == comera.report(model).numel and twin.dense_numel == 2 * 48 * tiny.WIDTH
    assert set(reasons(twin).values()) == {"copied or loaded in this form"}
    assert all(line.uses == () for line in twin.lines)


def test_after_loading() -> None:
    # A whole pickled model and a state dict loaded into a dense model both show what they hold.
    model = comera.tensorize(tiny.Mlp(), **tiny.TENSORIZE)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    unpickled = torch.load(file, weights_only=False)
    resumed = comera.tensorize(tiny.Mlp(), state_dict=model.state_dict())
    shapes = [line.decision.shape for line in comera.report(model).lines]
    assert [line.decision.shape for line in comera.report(unpickled).lines] == shapes
    assert [line.decision.shape for line in comera.report(resumed).lines] == shapes
    assert set(reasons(comera.report(resumed)).values()) == {"loaded from a checkpoint"}


def test_after_densify() -> None:
    # Back to dense: nothing of the former form is claimed.
    model = comera.densify(comera.tensorize(tiny.Mlp(), **tiny.TENSORIZE))
    report = comera.report(model)
    assert report.tensorized == () and report.numel == report.dense_numel
    assert set(reasons(report).values()) == {"not looked at yet"}


def test_a_model_without_matrices() -> None:
    # An empty table, not an error.
    report = comera.report(nn.LayerNorm(8))
    assert report.lines == () and "0 of 0 matrices" in str(report)

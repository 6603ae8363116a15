"""``comera.explain``: every stage of one compilation, of a copy; the model itself is not touched."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comera_compile as comera
from tests import tiny_models as tiny
from tests.saving_models import Gpt, packed, words


def explain(model: nn.Module, *inputs: Any, **kwargs: Any) -> comera.Explanation:
    """With the tests' small sizes."""
    return comera.explain(model, *inputs, options=tiny.TENSORIZE, **kwargs)


@pytest.fixture
def shown() -> comera.Explanation:
    """Of a two-layer MLP on six rows; by FLOPs, since in time nothing beats a dense matrix of this size."""
    return comera.explain(tiny.double(tiny.Mlp()), tiny.rows(6), options=tiny.TENSORIZE | {"objective": "flops"})


def test_traced_and_rewritten_graphs(shown: comera.Explanation) -> None:
    # One graph: Dynamo's shows the marker for each weight, the rewritten one the functions that run its plan.
    (traced,), (rewritten,) = shown.traced, shown.rewritten
    assert traced.count("comera.tt_weight") == 2 and traced.count("linear(") == 2
    assert "comera.tt_weight" not in rewritten and "linear(" not in rewritten
    assert rewritten.count("apply_operands(") == 2 and rewritten.count("merge_cores(") == 2


def test_what_runs_is_pairwise_products(shown: comera.Explanation) -> None:
    # Two weights of four applied cores each; an einsum would hide the order that the plan has chosen.
    (forward,), (backward,) = shown.forward, shown.backward
    assert forward.count("aten.mm.default(") == 8
    assert backward.count("aten.mm.default(") >= 15  # two a forward product, less the input's gradient, plus biases
    for graph in (forward, backward):
        assert "einsum" not in graph and "comera.tt_weight" not in graph and "aten.addmm" not in graph
        assert "f64[48, 32]" not in graph and "f64[32, 48]" not in graph  # no dense matrix, nor its gradient


def test_plans_list_all_steps(shown: comera.Explanation) -> None:
    # The same plan for both: what is merged, applied, differentiated, and kept for the backward.
    assert len(shown.plans) == 2
    first = shown.plans[0]
    assert first.startswith("linear [6 rows] tt cols")
    parts = [part for part in ("merge (batch-free", "forward:", "backward:", "saved:") if part in first]
    assert len(parts) == 4 and [first.index(p) for p in parts] == sorted(first.index(p) for p in parts)
    body = first[first.index("forward:") :]
    for made in ("y[t,m1,m2] = ", "dx[t,n1,n2] = ", "dA1[", "dA2[", "dB1[", "dB2["):
        assert made in body, made
    assert first.count("MFLOP") == 14 and "KiB besides x" in first.splitlines()[-2]


def test_the_text_has_all_parts(shown: comera.Explanation) -> None:
    # Each stage under its heading, numbered, in the order of the work.
    text = str(shown)
    heads = ["plans 1 of 2", "plans 2 of 2"]
    heads += [f"{name} graph 1 of 1" for name in ("traced", "rewritten", "forward", "backward")]
    positions = [text.index(f"== {head} ==") for head in heads]
    assert positions == sorted(positions)
    assert all(part in text for part in (*shown.plans, *shown.traced, *shown.rewritten, *shown.backward))


@pytest.mark.parametrize("form", ["dense", "packed", "compiled"])
def test_the_model_is_unchanged(form: str) -> None:
    # Classes, objects, storages, values, gradients, buffers, mode, bit by bit, in each form a model may have; and the
    # random numbers of its training.
    model = tiny.double(nn.Sequential(tiny.Mlp(), nn.BatchNorm1d(tiny.WIDTH), nn.Dropout()))
    call: Any = model
    if form == "packed":
        comera.tensorize(model, **tiny.TENSORIZE)
    elif form == "compiled":
        call = torch.compile(model, backend="comera", options=tiny.OPTIONS)
        call(tiny.rows(6)).pow(2).mean().backward()
    before, reported, x = tiny.snapshot(model), str(comera.report(model)), tiny.rows(6)
    state = torch.get_rng_state()
    shown = explain(call, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(shown.plans) == 2 and len(shown.traced) == 1
    tiny.assert_unchanged(before, model)
    assert model.training and str(comera.report(model)) == reported


def test_no_optimizer_or_average_is_touched() -> None:
    # An averaged copy of the model would be converted along with it; here nothing is.
    model = tiny.double(tiny.Mlp())
    average = torch.optim.swa_utils.AveragedModel(model)
    before = tiny.snapshot(average)
    explain(model, tiny.rows(6))
    tiny.assert_unchanged(before, average)


def test_a_graph_break_gives_several_graphs() -> None:
    # One entry a graph, each with one weight.
    shown = explain(tiny.double(tiny.Broken()), tiny.rows(6))
    for stage in (shown.traced, shown.rewritten, shown.forward, shown.backward):
        assert len(stage) == 2
    assert [text.count("comera.tt_weight") for text in shown.traced] == [1, 1]
    assert "== traced graph 2 of 2 ==" in str(shown)


def test_without_gradients_there_is_no_backward() -> None:
    # What an evaluation runs: one graph, and no gradients to plan for.
    with torch.no_grad():
        shown = explain(tiny.double(tiny.Mlp()).eval(), tiny.rows(6))
    assert len(shown.forward) == 1 and shown.backward == []


def test_a_use_without_a_plan_shows_the_rebuild() -> None:
    # Reading the report one sees that something is slow; here one sees why.
    class Squared(tiny.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.fc1.weight.square().mean()

    (rewritten,) = explain(tiny.double(Squared()), tiny.rows(6)).rewritten
    assert rewritten.count("rebuild_dense(") == 1 and "comera.tt_weight" not in rewritten


def test_lookups_and_attention_have_plans_too() -> None:
    # Each kind of plan says what it is.
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(60, tiny.WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids).unflatten(-1, (4, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    plans = explain(tiny.double(Reader()), torch.randint(0, 60, (2, 7))).plans
    assert [plan.split()[0] for plan in plans] == ["lookup", "attention"]
    assert plans[0].startswith("lookup [14 ids]") and plans[1].startswith("attention (2, 4, 7, 8)")


def test_keyword_arguments_reach_the_model() -> None:
    # transformers' models are called by keyword.
    class Named(tiny.Mlp):
        def forward(self, *, hidden: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(hidden) * scale

    shown = explain(tiny.double(Named()), hidden=tiny.rows(6), scale=0.5)
    assert len(shown.plans) == 2 and "0.5" in shown.forward[0]


def test_options_are_those_of_the_backend() -> None:
    # A dense model is shown as these options would convert it.
    model = tiny.double(tiny.Mlp())
    settings = tiny.TENSORIZE | {"layers": {"fc1": {"rank": 3}}, "exclude": "fc2"}
    shown = comera.explain(model, tiny.rows(6), options=settings)
    assert len(shown.plans) == 1 and "1x3x3x3x1" in shown.plans[0]
    assert shown.traced[0].count("comera.tt_weight") == 1
    assert comera.explain(model, tiny.rows(6)).plans == []  # by default these weights are too small


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rnk": 3}, comera.OptionError, "did you mean 'rank'"),
        ({"rank": 0}, comera.OptionError, "rank must be"),
        ({"layers": {"nope": {"rank": 2}}}, comera.OptionError, "'nope' matches no weight"),
        ({"modes": ((2, 2), (2, 2))}, comera.ShapeError, r"fc1\.weight: modes"),
    ],
)
def test_wrong_options_raise_what_the_backend_raises(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    # Not wrapped in a message about Dynamo, whether found before or while tracing.
    with pytest.raises(error, match=message):
        comera.explain(tiny.Mlp(), tiny.rows(6, dtype=torch.float32), options=tiny.TENSORIZE | options)


class TwoInputs(tiny.Mlp):
    """A model called as ``model(x, y)``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) + y


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_inputs_in_one_tuple_are_refused_with_the_right_call(kind: type) -> None:
    # What torch.export and others take; here it would end in a TypeError about a missing argument of forward.
    model, x = tiny.double(TwoInputs()), tiny.rows(6)
    held = {"x": x, "y": x} if kind is dict else kind((x, x))
    remedy = r"explain\(model, \*\*inputs\)" if kind is dict else r"explain\(model, \*inputs\)"
    with pytest.raises(comera.OptionError, match=rf"one {kind.__name__} of 2: .*explain\(model, x, y\).*{remedy}"):
        explain(model, held)
    with pytest.raises(comera.OptionError, match="one tuple of 1"):
        explain(tiny.double(tiny.Mlp()), (x,))
    assert len(explain(model, x, x).plans) == 2  # the remedy


def test_other_wrong_calls_raise_what_the_model_raises() -> None:
    # A list of three for two arguments has another cause, which the model's own error names.
    model, x = tiny.double(TwoInputs()), tiny.rows(6)
    for inputs in ((x,), ([x, x, x],)):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
            explain(model, *inputs)
    with pytest.raises(comera.OptionError, match=r"explain expects an nn\.Module .* got function"):
        comera.explain(lambda x: x, x)  # type: ignore[arg-type]


def test_a_model_that_takes_a_tuple_gets_it() -> None:
    class Pair(tiny.Mlp):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return super().forward(pair[0]) + pair[1]

    x = tiny.rows(6)
    assert len(explain(tiny.double(Pair()), (x, x)).plans) == 2


def test_what_only_the_graph_shows_raises_as_well() -> None:
    # A write to the dense matrix would be lost; the backend refuses it, and so does a look at it.
    class Writes(tiny.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.fc1.weight.mul_(0.5)
            return super().forward(x)

    with pytest.raises(comera.CompileError, match="writes in place"):
        explain(tiny.double(Writes()), tiny.rows(6))


@torch._dynamo.config.patch(recompile_limit=2)
def test_explaining_often_does_not_use_up_compilations() -> None:
    # torch stops compiling a function after a few variants; looking at a model must not make it run eagerly later.
    count = tiny.Counter()
    model = tiny.double(tiny.Mlp())
    for _ in range(3):
        assert len(explain(model, tiny.rows(6)).traced) == 1
    torch.compile(model, backend="comera", options=count.options)(tiny.rows(6))
    assert count.count == 1 and len(tiny.packed_names(model)) == 2


def test_the_cut_that_is_shown_is_the_one_that_runs() -> None:
    # With a limit the forward hands less over; what it no longer hands over is made again in the backward.
    model, ids = packed(Gpt(blocks=1)), words()
    free, limited = (comera.explain(model, ids, options={"saved": saved}) for saved in ("all", "min"))
    assert limited.forward[0] != free.forward[0]
    free_again, limited_again = (each.backward[0].count("comera.wide.default(") for each in (free, limited))
    assert free_again == 0 < limited_again


def test_each_linear_plan_is_held_against_the_cheapest() -> None:
    [plan] = explain(tiny.double(tiny.Mlp()), tiny.rows(6)).plans[:1]
    [line] = [text for text in plan.splitlines() if "the cheapest plan" in text]
    ours, least = (float(n.replace(",", "")) for n in re.findall(r"([\d,.]+) us", line))
    assert 0.97 * least <= ours < 2 * least  # of six rows and tiny cores: a few launches more or less
    assert "is proven to cost" in line

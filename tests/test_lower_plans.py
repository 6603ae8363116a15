"""The rewritten graph: which operations are gone and which are there, and that it computes what eager code does."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_compile import torch_private
from comera_compile.codegen.lower_plans import GRAPH_FUNCTIONS, rebuild_dense
from comera_compile.codegen.run_plan import apply_operands, merge_cores
from comera_compile.passes import plan_contractions
from comera_compile.planning.linear_plan import candidates
from comera_compile.planning.row_ranges import RowRange
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.marker import tt_weight
from tests.packed_modules import Capture, Holder, Stack, assert_as_eager, linear, outcome, pack

WIDTH = 24


def x(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``always(name)``: every linear use gets the plan of that name."""

    def set_plan(name: str) -> None:
        def choose(shape, contracts, *settings):  # type: ignore[no-untyped-def]
            return (RowRange(None, next(p for p in candidates(shape, contracts, 16) if p.name == name)),)

        monkeypatch.setattr(plan_contractions, "plans_by_rows", choose)

    return set_plan


class Conv1D(nn.Module):
    """The linear layer of GPT-2: weight of (inputs, outputs), one addmm over flattened rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, 36, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(36, dtype=torch.float64))
        pack(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], 36)


def test_a_linear_layer_becomes_a_merge_and_an_application() -> None:
    capture = Capture()
    assert_as_eager(capture, linear(WIDTH, 36), x(2, 3, WIDTH))
    assert capture.markers == capture.count(F.linear, torch._C._nn.linear, rebuild_dense) == 0
    assert capture.count(merge_cores) == capture.count(apply_operands) == 1


def test_conv1d() -> None:
    capture = Capture()
    assert_as_eager(capture, Conv1D(), x(2, 3, WIDTH))
    assert capture.count(torch.addmm, rebuild_dense) == capture.markers == 0
    assert [p.contracts for p in capture.plans] == ["rows"]


def test_every_plan_runs_in_a_graph(always: Callable[[str], None]) -> None:
    model = Stack(linear(WIDTH, WIDTH), linear(WIDTH, WIDTH))
    for name in ("core by core", "merge 2 | 1+1", "merge both halves", "rebuild W"):
        always(name)
        capture = Capture()
        assert_as_eager(capture, model, x(5, WIDTH))
        assert [p.name for p in capture.plans] == [name, name]
        torch._dynamo.reset()


def test_equal_layers_are_merged_in_one_call_with_their_own_scales() -> None:
    layers = (linear(WIDTH, WIDTH, scale=scale) for scale in (0.5, 1.5, 2.5))
    capture = Capture()
    assert_as_eager(capture, Stack(*layers), x(5, WIDTH))
    (merge,) = (n for n in capture.nodes if n.target is merge_cores)
    assert merge.args[1] == (0.5, 1.5, 2.5) and len(merge.args) == 2 + 3
    # Unbound over its layers: the gradient of an indexing would be a sum of padded zeros.
    assert capture.count(torch.unbind) == len(capture.plans[0].operands)


def test_different_layers_are_merged_apart() -> None:
    # Other sizes, other ranks, a frozen weight among trained ones.
    layers = [linear(WIDTH, 36), linear(36, WIDTH), linear(WIDTH, WIDTH, rank=3), linear(WIDTH, WIDTH)]
    frozen = linear(WIDTH, WIDTH)
    frozen.requires_grad_(False)
    capture = Capture()
    assert_as_eager(capture, Stack(*layers, frozen), x(5, WIDTH))
    assert capture.count(merge_cores) == capture.count(apply_operands) == 5
    assert frozen._parameters["weight"].grad is None  # type: ignore[union-attr]


def test_a_shared_weight_is_merged_once() -> None:
    layer = linear(WIDTH, WIDTH)
    capture = Capture()
    assert_as_eager(capture, Stack(layer, layer, layer), x(5, WIDTH))
    (merge,) = (n for n in capture.nodes if n.target is merge_cores)
    assert len(merge.args) == 2 + 1 and capture.count(apply_operands) == 3


def test_dense_rebuilds_are_made_one_at_a_time(always: Callable[[str], None]) -> None:
    # All of them at once would take the memory of the dense model.
    always("rebuild W")
    layer = linear(WIDTH, WIDTH)
    capture = Capture()
    assert_as_eager(capture, Stack(layer, linear(WIDTH, WIDTH), layer), x(5, WIDTH))
    order = [n.target for n in capture.nodes if n.target in (merge_cores, apply_operands)]
    assert order == 3 * [merge_cores, apply_operands]


def test_a_bias_may_come_from_another_planned_use() -> None:
    model = Holder(lambda w, v, x: torch.addmm(F.linear(v, w), x, w.t()), WIDTH, WIDTH)
    capture = Capture()
    assert_as_eager(capture, model, x(WIDTH), x(5, WIDTH))
    assert capture.count(apply_operands) == 2


def test_packed_vectors_that_the_graph_computes() -> None:
    # Functional calls with updated parameters: the second vector exists only after the first was used.
    layout = choose_shape(WIDTH, WIDTH, format="tt", rank=4, order=2).encode()
    layer = linear(WIDTH, WIDTH)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed = nn.Parameter(layer._parameters["weight"].detach().clone())  # type: ignore[union-attr]

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, tt_weight(self.packed * 0.5, layout))
            return F.linear(y, tt_weight(self.packed * 0.25, layout)) + F.linear(x, tt_weight(self.packed, layout))

    capture = Capture()
    assert_as_eager(capture, Inner(), x(5, WIDTH))
    assert capture.count(apply_operands) == 3 and capture.markers == 0


def test_an_unused_weight_leaves_nothing_behind() -> None:
    model = Holder(lambda w, x: [x * 2, w.T, F.linear(x, w)][0], WIDTH, WIDTH)
    capture = Capture()
    assert_as_eager(capture, model, x(5, WIDTH))
    assert capture.markers == capture.count(merge_cores, apply_operands, rebuild_dense) == 0


def test_every_call_of_a_lowered_graph_is_known_to_the_disk_cache() -> None:
    model = Stack(linear(WIDTH, 36), linear(36, WIDTH))
    capture = Capture()
    capture.compile(model)(x(5, WIDTH))
    ours = {n.target for n in capture.nodes if str(getattr(n.target, "__module__", "")).startswith("comera_compile")}
    assert ours <= set(GRAPH_FUNCTIONS)
    assert capture.count(merge_cores) and all(f.__module__.startswith("comera_compile") for f in GRAPH_FUNCTIONS)


def test_graphs_stay_in_order() -> None:
    # Merges come after all inputs of the graph and before what uses them; placeholders stay together at the top.
    model = Stack(*(linear(WIDTH, WIDTH) for _ in range(2)), linear(WIDTH, 36), Conv1DTail())
    capture = Capture()
    assert_as_eager(capture, model, x(5, WIDTH))
    kinds = [n.op for n in capture.graphs[0].graph.nodes]
    last = max(k for k, op in enumerate(kinds) if op == "placeholder")
    assert set(kinds[: last + 1]) == {"placeholder"}
    capture.graphs[0].graph.lint()


class Conv1DTail(nn.Module):
    """A product with the weight itself at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(36, WIDTH, dtype=torch.float64))
        pack(self)

    def forward(self, x: Tensor) -> Tensor:
        return operator.matmul(x, self.weight)


def test_aot_graphs_hold_planned_products_only(always: Callable[[str], None]) -> None:
    # What Inductor gets: products, views, copies and sums. No einsum, no autograd function is left; this package's own
    # operators merge the cores and take the rows through both halves.
    always("merge both halves")
    seen: set[str] = set()

    def record(graph: torch.fx.GraphModule) -> None:
        seen.update(str(n.target) for n in graph.graph.nodes if n.op == "call_function")

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        Capture()(graph, inputs)
        return torch_private.compile_recording(graph, inputs, record, record)

    model = linear(WIDTH, WIDTH)
    ours = dict(outcome(torch.compile(model, backend=backend), model, [x(5, WIDTH)]))
    assert ours.keys() == {"output", "input 0", "weight", "bias"}
    allowed = "mm bmm view permute transpose t clone cat mul add stack split unsqueeze squeeze select constant_pad_nd"
    allowed += " as_strided reshape full new_ones expand detach ones unbind _unsafe_view slice sum split_with_sizes"
    assert {name.split(".")[1] for name in seen if name.startswith("aten.")} <= set(allowed.split())
    own = {name.split(".")[1] for name in seen if "comera" in name}
    assert own == {"merge", "merge_backward", "narrow", "wide", "skinny_backward"}

"""Dropout inside of a bridge: which elements are dropped, that gradients know them, where it is found in a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import comera_compile as comera
from comera_compile.codegen.apply_bridge import apply_bridge
from comera_compile.codegen.cpu import bridge_kernels as kernels
from tests.chosen_plans import choose_plans, lowered
from tests.test_bridge_kernels import BARS, TORCH, Operands, draw

SEED = torch.tensor([0x1234_5678_9ABC_DEF0])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def factors(rows: int, width: int, p: float, seed: Tensor = SEED, dtype: torch.dtype = torch.float64) -> Tensor:
    """What each element is multiplied with: a bridge of ones to the unit matrix shows it."""
    ones = torch.ones(rows, 1, dtype=dtype), torch.ones(1, width, dtype=dtype)
    return kernels.bridge(*ones, None, None, None, None, torch.eye(width, dtype=dtype), "none", p, seed)


def run(operands: Operands, grad: Tensor, activation: str, p: float) -> list[Tensor]:
    made = kernels.bridge(*operands, activation, p, SEED), *kernels.backward(grad, *operands, activation, p, SEED)
    return [t for t in made if t is not None]


def truth(operands: Operands, grad: Tensor, activation: str, p: float) -> list[Tensor]:
    leaves = [None if t is None else t.double().requires_grad_() for t in operands]
    h, second, bias, h_gate, second_gate, bias_gate, first = leaves
    assert h is not None and second is not None and bias is not None and first is not None
    wide = h @ second + bias
    if h_gate is not None and second_gate is not None and bias_gate is not None:
        wide = TORCH[activation](h_gate @ second_gate + bias_gate) * wide
    else:
        wide = TORCH[activation](wide)
    result = wide * factors(h.shape[0], second.shape[1], p) @ first.t()
    return [result, *torch.autograd.grad(result, [t for t in leaves if t is not None], grad.double())]


def test_an_element_is_dropped_with_the_probability_asked_for() -> None:
    rows, width = 1000, 640
    for p in (0.1, 0.5, 0.9):
        made = factors(rows, width, p)
        assert made.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
        dropped = (made == 0).double()
        # Of independent draws: the share, and how it varies between rows and between columns, within 5 deviations.
        one = (p * (1 - p)) ** 0.5
        assert abs(dropped.mean() - p) <= 5 * one / (rows * width) ** 0.5
        for axis, many in ((0, rows), (1, width)):
            others = dropped.shape[1 - axis]
            assert abs(dropped.mean(axis).std() * many**0.5 / one - 1) <= 5 / (2 * others) ** 0.5


def test_rows_columns_and_seeds_know_nothing_of_each_other() -> None:
    rows, width, p = 500, 600, 0.3
    centred = [(factors(rows, width, p, SEED + k) == 0).double() - p for k in (0, 1, 1 << 32)]
    for one, other in itertools.combinations_with_replacement(centred, 2):
        for a, b, many in ((one, other, width), (one.t(), other.t(), rows)):
            correlation = a @ b.t() / many / (p * (1 - p))
            if one is other:
                correlation.fill_diagonal_(0)
            # the largest of some 10^5 that are about normal: 4.4 deviations
            assert correlation.abs().max() <= 6.5 / many**0.5


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("activation", TORCH)
def test_gradients_drop_what_the_result_has_dropped(activation: str, dtype: torch.dtype) -> None:
    # more rows and columns than a block has, and tails of both
    for gate, p in itertools.product((False, True), (0.1, 0.6)):
        operands, grad = draw((101, 230, 8, 3, 5), dtype, gate=gate)
        for made, right in zip(run(operands, grad, activation, p), truth(operands, grad, activation, p), strict=True):
            assert made.shape == right.shape and made.dtype == dtype
            assert (made.double() - right).abs().max() <= BARS[dtype] * right.abs().max(), made.shape


@pytest.mark.parametrize("dtype", BARS)
def test_neither_threads_nor_dtype_change_what_is_dropped(dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    alone = factors(100, 300, 0.4) == 0
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        assert torch.equal(factors(100, 300, 0.4, dtype=dtype) == 0, alone)


def test_all_or_nothing() -> None:
    operands, grad = draw((10, 40, 8, 3, 5), torch.float64)
    everything = run(operands, grad, "gelu", 1.0)
    assert all(t.abs().max() == 0 for t in everything)
    nothing = kernels.bridge(*operands, "gelu", 0.0, None)
    assert torch.equal(nothing, kernels.bridge(*operands, "gelu"))


def test_numbers_that_are_none_stay_so_even_where_they_are_dropped() -> None:
    # as in torch, which multiplies by zero
    nan = torch.full((4, 1), float("nan"))
    made = kernels.bridge(nan, torch.ones(1, 30), None, None, None, None, torch.eye(30), "none", 0.5, SEED)
    assert made.isnan().all() and F.dropout(nan, 0.5).isnan().all()


def test_what_is_refused() -> None:
    operands, _ = draw((3, 10, 2, 2, 2), torch.float64)
    for p, seed, text in (
        (1.5, SEED, "a probability, 0 to 1, got 1.5"),
        (float("nan"), SEED, "a probability"),
        (0.5, None, "dropout 0.5 needs one int64 seed, got none"),
        (0.0, SEED, "needs no seed"),
        (0.5, SEED.double(), "got \\[1\\] of torch.float64"),
        (0.5, torch.cat([SEED, SEED]), "got \\[2\\]"),
    ):
        with pytest.raises(ValueError, match=text):
            kernels.bridge(*operands, "gelu", p, seed)


# -- in a model --------------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    """As transformers have it: dropout in front of the second linear."""

    def __init__(self, p: float, *, gated: bool = False, in_place: bool = False) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(24, 40), nn.Linear(24, 40), nn.Linear(40, 24)
        self.dropout, self.gated = nn.Dropout(p, in_place), gated

    def forward(self, x: Tensor) -> Tensor:
        made = F.silu(self.gate(x)) * self.up(x) if self.gated else F.gelu(self.up(x))
        y: Tensor = self.down(self.dropout(made))
        return y


def prepared(model: nn.Module) -> nn.Module:
    return comera.tensorize(model.double(), rank=4, init="random", min_elements=0)


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    options = {"rank": 4, "init": "random", "min_elements": 0, "inner": "aot_eager"}
    made: nn.Module = torch.compile(model, backend="comera", options=options)
    return made


@pytest.fixture
def _merged(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_plans(monkeypatch, "merge both halves")


def bridges(graphs: list[torch.fx.GraphModule]) -> int:
    return sum(n.target is apply_bridge for graph in graphs for n in graph.graph.nodes)


@pytest.mark.usefixtures("_merged")
@pytest.mark.parametrize("gated", [False, True])
def test_in_evaluation_it_is_no_obstacle(gated: bool) -> None:
    model, x = prepared(FeedForward(0.4, gated=gated)).eval(), torch.randn(2, 5, 24, dtype=torch.float64)
    with lowered() as graphs:
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-11, atol=1e-11)
    assert bridges(graphs) == 1


@pytest.mark.usefixtures("_merged")
@pytest.mark.parametrize("gated", [False, True])
def test_in_training_it_runs_from_bond_to_bond(gated: bool) -> None:
    torch.manual_seed(0)
    model, x = prepared(FeedForward(0.4, gated=gated)), torch.randn(2, 5, 24, dtype=torch.float64)
    with lowered() as graphs:
        call = compiled(model)
        many = torch.stack([call(x).detach() for _ in range(400)])
    assert bridges(graphs) == 1
    assert "and dropout" in comera.report(model)["down.weight"].uses[0].plan
    assert not torch.equal(many[0], many[1])
    right = model.eval()(x).detach()
    # the mean is what nothing dropped gives: 240 means of 400, each within 5 of its deviations
    assert ((many.mean(0) - right).abs() <= 5 * many.std(0) / 400**0.5).all()


@pytest.mark.usefixtures("_merged")
def test_torchs_generator_decides_and_a_checkpoint_repeats_it() -> None:
    model, x = prepared(FeedForward(0.4)), torch.randn(2, 5, 24, dtype=torch.float64)
    call, made = compiled(model), []
    for through in (False, False, True):
        torch.manual_seed(3)
        model.zero_grad()
        y = checkpoint(call, x, use_reentrant=False) if through else call(x)
        y.square().sum().backward()
        made.append([y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for other in made[1:]:
        assert len(other) == 5 and all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


@pytest.mark.usefixtures("_merged")
def test_in_place_or_read_twice_it_is_left_alone() -> None:
    class Twice(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            made = F.gelu(self.up(x))
            y: Tensor = self.down(self.dropout(made)) + made.mean()
            return y

    for model in (FeedForward(0.0, in_place=True), Twice(0.0)):
        x = torch.randn(2, 5, 24, dtype=torch.float64)
        model = prepared(model)
        with lowered() as graphs:
            torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-11, atol=1e-11)
        assert bridges(graphs) == 0


@pytest.mark.usefixtures("_merged")
def test_without_kernels_torch_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", lambda *_: None)
    model, x = prepared(FeedForward(0.4)), torch.randn(2, 5, 24, dtype=torch.float64)
    with lowered() as graphs:
        torch.manual_seed(3)
        ours = compiled(model)(x)
    assert bridges(graphs) == 1
    torch.manual_seed(3)
    torch.testing.assert_close(ours, model(x), rtol=1e-11, atol=1e-11)

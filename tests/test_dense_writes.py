"""Writes in place to the dense weight of a packed layer: they reach the cores or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import comera_compile as comera
from comera_compile.errors import CompileError, WeightError
from tests import tiny_models as tiny

Near = Callable[..., None]


@pytest.fixture
def model() -> nn.Module:
    """A tensorized model in float64."""
    return comera.tensorize(tiny.double(tiny.Mlp()), **tiny.TENSORIZE)


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    call: Callable[..., Tensor] = torch.compile(model, backend="comera", options=tiny.OPTIONS)
    return call


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "zero_": lambda fc: fc.weight.zero_(),
    "mul_": lambda fc: fc.weight.mul_(0.5),
    "imul": lambda fc: fc.weight.__imul__(2.0),
    "data.copy_": lambda fc: fc.weight.data.copy_(fc.weight.detach() * 3),
    "data =": lambda fc: setattr(fc.weight, "data", fc.weight.detach() * -1),
    "row of zeros": lambda fc: fc.weight.__setitem__(slice(0, 48), 0.0),
    "through a view": lambda fc: fc.weight.view(-1).mul_(0.25),
    "through the transpose": lambda fc: fc.weight.t().mul_(0.25),
    "through a chunk of a low-rank change": lambda fc: [part.mul_(2) for part in fc.weight.chunk(1)],
    "copy_ of a low-rank matrix": lambda fc: fc.weight.copy_(torch.ones_like(fc.weight)),
    "nn.init.constant_": lambda fc: nn.init.constant_(fc.weight, 0.1),
    "foreach": lambda fc: torch._foreach_mul_([fc.weight], 0.5),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_an_in_place_write_that_fits_reaches_the_cores(model: nn.Module, write: str, assert_near: Near) -> None:
    # The truth: the same write on a plain dense layer of the same values.
    plain = nn.Linear(tiny.WIDTH, 48).double()
    with torch.no_grad():
        plain.weight.copy_(model.fc1.weight)
        WRITES[write](plain)
        WRITES[write](model.fc1)
    assert_near(model.fc1.weight.detach(), plain.weight.detach(), 1e3)
    assert_near(compiled(model.fc1)(x := tiny.rows(3)), nn.functional.linear(x, plain.weight, model.fc1.bias), 1e3)


def test_initialising_anew_draws_new_cores(model: nn.Module) -> None:
    # nn.init gives a full-rank random matrix: untrained, so cores of its size are drawn, as at conversion.
    before = model.fc1._parameters["weight"].detach().clone()
    nn.init.normal_(model.fc1.weight, std=0.3)
    assert not torch.equal(before, model.fc1._parameters["weight"])
    drawn = model.fc1.weight.detach().std().item()  # of 224 core entries: it varies by tens of percent
    assert 0.15 < drawn < 0.6
    model.fc1.reset_parameters()  # uniform of standard deviation 0.1
    assert 0.05 < model.fc1.weight.detach().std().item() < 0.2
    nn.init.trunc_normal_(model.fc1.weight, std=0.02)  # in several operations
    assert 0.01 < model.fc1.weight.detach().std().item() < 0.04


UNFIT: dict[str, Callable[[nn.Linear], object]] = {
    "one row": lambda fc: fc.weight.__setitem__(0, torch.linspace(-1, 1, tiny.WIDTH, dtype=torch.float64)),
    "identity": lambda fc: nn.init.eye_(fc.weight),
    "an element": lambda fc: fc.weight[3].__setitem__(5, 100.0),
    "NaN": lambda fc: fc.weight.fill_(float("nan")),
    # Values that are given are not to be replaced by other random ones, however random they look.
    "copy_ of random numbers": lambda fc: fc.weight.copy_(torch.randn(fc.weight.shape, dtype=torch.float64)),
    "data of random numbers": lambda fc: setattr(fc.weight, "data", torch.randn(fc.weight.shape, dtype=torch.float64)),
}


@pytest.mark.parametrize("write", list(UNFIT))
def test_an_in_place_write_that_does_not_fit_is_refused(model: nn.Module, write: str) -> None:
    # Cores of low rank cannot hold it: refused with the remedy, and nothing is half written.
    before = tiny.snapshot(model)
    with torch.no_grad(), pytest.raises(WeightError, match=r"densify|NaN"):
        UNFIT[write](model.fc1)
    tiny.assert_unchanged(before, model)


def test_an_in_place_write_under_autograd_is_refused_as_for_any_leaf(model: nn.Module) -> None:
    before = tiny.snapshot(model)
    with pytest.raises(RuntimeError, match="leaf"):
        model.fc1.weight.mul_(2)
    tiny.assert_unchanged(before, model)


def test_a_small_write_leaves_cores_near_where_they_were(model: nn.Module) -> None:
    # Another decomposition of nearly the same matrix would make the optimizer's moments, and an EMA of the cores,
    # meaningless. One part in a thousand of change in the weight is about that in the cores.
    before = model.fc1._parameters["weight"].detach().clone()
    with torch.no_grad():
        model.fc1.weight.mul_(1.001)
    after = model.fc1._parameters["weight"].detach()
    assert 0 < (after - before).norm() < 0.01 * before.norm()


def test_a_write_inside_compiled_code_is_refused() -> None:
    # There the dense matrix is a temporary of the graph: the write would vanish without a trace.
    model = comera.tensorize(tiny.double(tiny.Mlp()), **tiny.TENSORIZE)

    @torch.compile(backend="comera", options=tiny.OPTIONS)
    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.fc1.weight.mul_(0.5)
        return model(x)

    before = tiny.snapshot(model)
    with pytest.raises(CompileError, match="in place"):
        call(tiny.rows(3))
    tiny.assert_unchanged(before, model)

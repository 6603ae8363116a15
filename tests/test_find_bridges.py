"""Linear, pointwise function, linear: which run from bond to bond, which are left alone, and that both are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import comera_compile as comera
from comera_compile.codegen.apply_bridge import apply_bridge
from tests.chosen_plans import choose_plans, lowered

OPTIONS = {"rank": 4, "init": "random", "min_elements": 0, "inner": "aot_eager"}


class Chain(nn.Module):
    """Two linears of 24 and 40 columns, a gate beside the first, and what is done with them."""

    def __init__(self, between: Callable[[Chain, Tensor], Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.between = between
        self.up, self.gate = nn.Linear(24, 40, bias=bias), nn.Linear(24, 40, bias=bias)
        self.down = nn.Linear(40, 24, bias=bias)
        self.calls = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, x)


TAKEN: dict[str, Callable[[Chain, Tensor], Tensor]] = {
    "relu": lambda m, x: m.down(F.relu(m.up(x))),
    "relu of a tensor": lambda m, x: m.down(m.up(x).relu()),
    "relu in place": lambda m, x: m.down(F.relu(m.up(x), inplace=True)),
    "gelu": lambda m, x: m.down(F.gelu(m.up(x))),
    "gelu by tanh": lambda m, x: m.down(F.gelu(m.up(x), approximate="tanh")),
    "silu": lambda m, x: m.down(F.silu(m.up(x))),
    "gated": lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)),
    "gated, the other way round": lambda m, x: m.down(m.up(x) * F.gelu(m.gate(x))),
    "gated by another input": lambda m, x: m.down(torch.sigmoid(m.gate(x.cos())) * m.up(x)),
    "residual": lambda m, x: x + m.down(F.gelu(m.up(x))),
}


def _written(m: Chain, x: Tensor) -> Tensor:
    u = m.up(x)
    m.calls.add_(1.0)
    return m.down(F.gelu(u)) * m.calls


def _without_gradient(m: Chain, x: Tensor) -> Tensor:
    with torch.no_grad():
        u = m.up(x)
    return m.down(F.gelu(u))


LEFT: dict[str, Callable[[Chain, Tensor], Tensor]] = {
    "the wide tensor is read twice": lambda m, x: m.down(F.gelu(u := m.up(x))) + u.sum(),
    "the function's result is read twice": lambda m, x: m.down(g := F.gelu(m.up(x))) + g.sum(),
    "something is written to in between": _written,
    "gradients are off for the first": _without_gradient,
    "a gate that is broadcast": lambda m, x: m.down(F.silu(m.gate(x[:1, :1])) * m.up(x)),
    "a function that is not known": lambda m, x: m.down(F.elu(m.up(x))),
    "another shape in between": lambda m, x: m.down(F.gelu(m.up(x).flatten(0, -2))),
    "a gate of no function": lambda m, x: m.down(m.gate(x) * m.up(x)),
    "a scaled function": lambda m, x: m.down(2.0 * F.gelu(m.up(x))),
}


def _in_place(write: Callable[[Tensor], object]) -> Callable[[Chain, Tensor], Tensor]:
    """x is changed once the first linear has read it."""

    def between(m: Chain, x: Tensor) -> Tensor:
        x = 1.0 * x
        u = m.up(x)
        write(x)
        return m.down(F.gelu(u)) + x

    return between


@torch.library.custom_op("comera_tests::double_it", mutates_args=("x",))
def _double_it(x: Tensor) -> None:
    x.mul_(2)


def _halve_in_a_checkpoint(x: Tensor) -> None:
    checkpoint(lambda t: t.mul_(0.5) + 1, x, use_reentrant=False)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "a method": lambda x: x.mul_(2),
    "a function told to, by name": lambda x: F.relu(x, inplace=True),
    "a function told to, by position": lambda x: F.leaky_relu(x, 0.5, True),
    "a module told to": nn.ELU(inplace=True),
    "out": lambda x: torch.add(x, 1, out=x),
    "an operator of the user's": _double_it,
    "the body of a checkpoint": _halve_in_a_checkpoint,
}


@pytest.fixture(autouse=True)
def _merged(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_plans(monkeypatch, "merge both halves")


def run(model: Chain, x: Tensor) -> tuple[list[Tensor], list[Tensor], int]:
    """Output and gradients compiled, the same in eager mode with the same cores, and bridges in the graph."""
    comera.tensorize(model, rank=4, init="random", min_elements=0)
    with lowered() as graphs:
        sides = [_step(torch.compile(model, backend=comera.Backend(**OPTIONS)), model, x), _step(model, model, x)]
    return sides[0], sides[1], sum(n.target is apply_bridge for graph in graphs for n in graph.graph.nodes)


def _step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model.get_buffer("calls").zero_()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.backward(torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1)))
    grads = [leaf.grad, *(p.grad for p in model.parameters())]
    return [y.detach(), *(g for g in grads if g is not None)]


def assert_same(ours: list[Tensor], right: list[Tensor]) -> None:
    assert len(ours) == len(right)
    for a, b in zip(ours, right, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= 1e-11 * b.abs().max()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", TAKEN)
def test_known_chains_run_from_bond_to_bond(name: str, bias: bool) -> None:
    torch.manual_seed(0)
    ours, right, found = run(Chain(TAKEN[name], bias=bias).double(), torch.randn(2, 3, 24, dtype=torch.float64))
    assert found == 1
    assert_same(ours, right)


@pytest.mark.parametrize("name", LEFT)
def test_other_chains_are_left_alone(name: str) -> None:
    torch.manual_seed(0)
    ours, right, found = run(Chain(LEFT[name]).double(), torch.randn(2, 3, 24, dtype=torch.float64))
    assert found == 0
    assert_same(ours, right)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_x_is_read_before_it_is_written_to(write: Callable[[Tensor], object]) -> None:
    # Run with the second linear, the first would read what was written. Eager training would refuse it.
    torch.manual_seed(0)
    model = comera.tensorize(Chain(_in_place(write)).double(), rank=4, init="random", min_elements=0)
    x = torch.randn(2, 3, 24, dtype=torch.float64)
    with torch.no_grad():
        assert_same([torch.compile(model, backend=comera.Backend(**OPTIONS))(x)], [model(x)])


def test_a_function_that_does_not_write_is_no_obstacle() -> None:
    torch.manual_seed(0)
    found = run(Chain(_in_place(lambda x: F.relu(x, inplace=False))).double(), torch.randn(2, 3, 24).double())
    assert found[2] == 1

"""A graph that is one tensor-train linear: run without the inner compiler, right, and only where that is all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import comera_compile as comera
from comera_compile import torch_private

OPTIONS: dict[str, Any] = {"rank": 4, "init": "random", "min_elements": 0}
Compiled = Callable[..., Any]


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the inner compilers that graphs are handed to, all run operation by operation."""
    seen: list[str] = []
    inner = torch_private.compile_inner

    def spy(name: str, *arguments: Any) -> Compiled:
        seen.append(name)
        return inner("aot_eager", *arguments)

    monkeypatch.setattr(torch_private, "compile_inner", spy)
    return seen


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Product(nn.Module):
    """``x W``, a weight that meets its rows, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 24))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Called(nn.Module):
    """A linear of 24 to 40 columns and what is done with it."""

    def __init__(self, call: Callable[[Called, Tensor], Tensor]) -> None:
        super().__init__()
        self.call, self.fc = call, nn.Linear(24, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def compiled(layer: nn.Module, **options: Any) -> Compiled:
    torch._dynamo.reset()
    made: Compiled = torch.compile(layer, backend="comera", options={**OPTIONS, **options})
    return made


def check(layer: nn.Module, x: Tensor, bar: float) -> None:
    """Value and gradients of a compiled layer against the products of its dense matrix in float64.

    The gradient of the packed vector is what the marker op makes of the dense matrix's gradient.
    """
    call = compiled(layer)
    call(x.detach())
    grad = torch.randn(call(x).shape, dtype=x.dtype)
    x.grad = None
    layer.zero_grad()
    y = call(x)
    y.backward(grad)
    ours = [y.detach(), x.grad, *(None if p.grad is None else p.grad.clone() for p in layer.parameters())]
    wide, wide_x = layer.double(), x.detach().double().requires_grad_(x.requires_grad)
    wide.zero_grad()
    right = wide(wide_x)
    right.backward(grad.double())
    exact = [right.detach(), wide_x.grad, *(p.grad for p in wide.parameters())]
    for one, other in zip(ours, exact, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.shape == other.shape and one.dtype == x.dtype
            assert (one.double() - other).abs().max() <= bar * other.abs().max() if other.numel() else True


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(24, 40),
    "without bias": lambda: nn.Linear(36, 30, bias=False),
    "prime sizes": lambda: nn.Linear(23, 37),
    "rows of the weight": Product,
}


@pytest.mark.parametrize("dtype, bar", [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("lead", [(7,), (2, 3), (1, 1, 5), (0,), ()])
def test_values_and_gradients(
    kind: str, dtype: torch.dtype, bar: float, lead: tuple[int, ...], handed_on: list[str]
) -> None:
    layer = LAYERS[kind]().to(dtype)
    width = next(iter(layer.parameters())).shape[0 if kind == "rows of the weight" else 1]
    check(layer, torch.randn(*lead, width, dtype=dtype, requires_grad=True), bar)
    assert handed_on == []


def test_strided_rows_and_gradients(handed_on: list[str]) -> None:
    layer = nn.Linear(24, 40)
    call, x = compiled(layer), torch.randn(24, 9).t().requires_grad_()
    y = call(x)
    (made,) = torch.autograd.grad(y, x, torch.ones(()).expand(9, 40))
    torch.testing.assert_close(made, torch.ones(9, 40) @ layer.weight.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        y.detach(), F.linear(x.detach(), layer.weight, layer.bias).detach(), rtol=1e-5, atol=1e-5
    )
    assert handed_on == []


def test_only_the_gradients_that_are_wanted(handed_on: list[str]) -> None:
    layer, x = nn.Linear(24, 40), torch.randn(5, 24)
    layer.bias.requires_grad_(False)
    compiled(layer)(x).sum().backward()
    assert layer.bias.grad is None and x.grad is None and handed_on == []
    assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)


def test_without_gradients(handed_on: list[str]) -> None:
    layer, x = nn.Linear(24, 40), torch.randn(5, 24)
    call = compiled(layer)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = call(x)
            torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-5)
            assert not y.requires_grad
    assert handed_on == []


ELSEWHERE: dict[str, Callable[[Called, Tensor], Any]] = {
    "something behind it": lambda m, x: m.fc(x).relu(),
    "something before it": lambda m, x: m.fc(x * 2),
    "twice": lambda m, x: m.fc(x) @ m.fc.weight,
    "two results": lambda m, x: (m.fc(x), m.fc(x)),
    "the weight as well": lambda m, x: (m.fc(x), m.fc.weight),
    "a view of its input": lambda m, x: (m.fc(x), x[1:]),
    "written to": lambda m, x: m.fc(x).add_(1),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_graph_with_more_in_it_is_handed_on(kind: str, handed_on: list[str]) -> None:
    model, x = Called(ELSEWHERE[kind]), torch.randn(5, 24)
    made = compiled(model)(x)
    expected = model(x)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert handed_on == ["inductor"]


@pytest.mark.parametrize(
    "options", [{"saved": "min"}, {"saved_bytes": 10**6}, {"inner_options": {"max_autotune": False}}]
)
def test_what_only_the_inner_compiler_does(options: dict[str, Any], handed_on: list[str]) -> None:
    compiled(nn.Linear(24, 40), **options)(torch.randn(5, 24))
    assert handed_on == ["inductor"]


def test_other_inputs_are_handed_on(handed_on: list[str]) -> None:
    x = torch.randn(5, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(nn.Linear(24, 40))(x).dtype == torch.bfloat16
    compiled(nn.Linear(24, 40).bfloat16())(x.bfloat16())
    frozen = nn.Linear(24, 40)
    comera.tensorize(frozen, **OPTIONS)
    compiled(frozen.requires_grad_(False))(x).sum().backward()
    assert x.grad is not None and handed_on == ["inductor"] * 3
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled(nn.Linear(24, 40))(x)
    assert handed_on == ["inductor"] * 4


def test_backwards_and_writes_as_in_eager(handed_on: list[str]) -> None:
    layer, x = nn.Linear(24, 40), torch.randn(5, 24, requires_grad=True)
    call = compiled(layer)
    y = call(x).sum()
    y.backward(retain_graph=True)
    once = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    y.backward()
    for parameter, grad in zip(layer.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    (first,) = torch.autograd.grad(call(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    rows = torch.randn(5, 24)
    y = call(rows)
    rows.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert handed_on == []


def test_inside_a_checkpoint(handed_on: list[str]) -> None:
    layer, x = nn.Linear(24, 40), torch.randn(5, 24, requires_grad=True)
    call = compiled(layer)
    call(x).pow(2).sum().backward()
    plain = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    checkpoint(call, x, use_reentrant=False).pow(2).sum().backward()
    for parameter, grad in zip(layer.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    assert handed_on == []


def test_any_number_of_rows_in_two_compilations(handed_on: list[str]) -> None:
    layer = nn.Linear(24, 40)
    call = compiled(layer)
    torch._dynamo.utils.counters.clear()
    for rows in (3, 5, 17, 300, 2):
        x = torch.randn(rows, 24)
        torch.testing.assert_close(call(x), layer(x), rtol=1e-5, atol=1e-5)
    # One more where a crossover of plans lies between them.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_report(handed_on: list[str]) -> None:
    layer = nn.Linear(24, 40)
    compiled(layer)(torch.randn(5, 24, requires_grad=True))
    shown = comera.report(layer)
    (use,) = shown["weight"].uses
    assert use.plan == "merge both halves, alone: without the inner compiler"
    bond = 8  # of 4, filled up to a vector
    assert shown.graphs[0].saved is not None
    assert (shown.graphs[0].saved.planned, shown.graphs[0].saved.rest) == (4 * bond * (5 + 24 + 40), 0)


@pytest.mark.usefixtures("threads")
def test_threads_give_nearly_the_same_and_always_the_same(handed_on: list[str]) -> None:
    layer, x = nn.Linear(96, 120), torch.randn(100, 96)
    call = compiled(layer)
    made: dict[int, list[Tensor]] = {}
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        layer.zero_grad()
        y = call(x)
        y.pow(2).sum().backward()
        now = [y.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
        for one, other in zip(now, made.setdefault(threads, now), strict=True):
            assert torch.equal(one, other)
    for other in made.values():
        for one, two in zip(made[1], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)

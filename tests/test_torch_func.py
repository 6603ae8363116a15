"""Transforms of ``torch.func`` over a model of tensor trains: what they give for the same matrices in dense layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp

import comera_compile as comera

OPTIONS: dict[str, Any] = {"rank": 4, "init": "random", "min_elements": 0}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)).double()


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    """A model of tensor trains, and the same matrices in ordinary layers."""
    torch.manual_seed(0)
    ours, dense = comera.tensorize(network(), **OPTIONS), network()
    dense.load_state_dict(comera.dense_state_dict(ours))
    return ours, dense


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).double()


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": lambda m, x: torch.vmap(m)(x),
    "jacrev": lambda m, x: jacrev(m)(x[0]),
    "jacfwd": lambda m, x: jacfwd(m)(x[0]),
    "hessian": lambda m, x: hessian(lambda v: m(v).square().sum())(x[0]),
    "jvp": lambda m, x: jvp(m, (x,), (x.cos(),)),
    "grad": lambda m, x: grad(lambda v: m(v).square().sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_see_the_dense_matrices(name: str, pair: tuple[nn.Module, nn.Module], x: Tensor) -> None:
    ours, dense = (TRANSFORMS[name](model, x) for model in pair)
    torch.testing.assert_close(ours, dense)


def test_gradients_of_each_sample_are_those_of_its_own_backward(pair: tuple[nn.Module, nn.Module], x: Tensor) -> None:
    model, _ = pair

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        y: Tensor = functional_call(model, parameters, (row,))
        return y.square().sum()

    each = torch.vmap(grad(loss), (None, 0))(dict(model.named_parameters()), x)
    for k, row in enumerate(x):
        model.zero_grad()
        model(row).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(each[name][k], parameter.grad)


def test_several_sets_of_cores_at_once(pair: tuple[nn.Module, nn.Module], x: Tensor) -> None:
    model, _ = pair
    sets = {name: torch.stack([p, 2 * p]).detach() for name, p in model.named_parameters()}
    both = torch.vmap(lambda one: functional_call(model, one, (x,)))(sets)
    for k in range(2):
        torch.testing.assert_close(both[k], functional_call(model, {n: s[k] for n, s in sets.items()}, (x,)))


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_vmap_over_a_compiled_layer(kind: str, inner: str) -> None:
    # Dynamo leaves the transformed call to eager mode, after it was called and compiled without a transform.
    layer: nn.Module = nn.Linear(24, 40) if kind == "linear" else nn.Embedding(60, 12)
    given = torch.randn(2, 3, 24) if kind == "linear" else torch.arange(6).view(2, 3)
    torch._dynamo.reset()
    call = torch.compile(layer, backend="comera", options={**OPTIONS, "inner": inner})
    call(given[0])
    torch.testing.assert_close(torch.vmap(call)(given), layer(given), rtol=1e-4, atol=1e-4)

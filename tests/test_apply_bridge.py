"""A feed-forward block by the Functions narrow, bridge and wide: gradients, what is frozen, tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comera_compile.codegen.apply_bridge import Bridge, Narrow, Wide

narrow: Any = Narrow.apply
bridge: Any = Bridge.apply
wide: Any = Wide.apply


def feed_forward(x: Tensor, gate: bool, first: Tensor, *others: Tensor) -> Tensor:
    second, bias, second_gate, bias_gate, inner, outer, outer_bias = others
    h = narrow(x, first)
    gates = (narrow(x, first), second_gate, bias_gate) if gate else (None, None, None)
    made: Tensor = wide(bridge(h, second, bias, *gates, inner, "gelu"), outer, outer_bias)
    return made.view(*x.shape[:-1], outer.shape[1])


def weights(inputs: int, width: int) -> list[Tensor]:
    shapes = (3, inputs), (3, width), (width,), (3, width), (width,), (4, width), (4, inputs), (inputs,)
    return [torch.randn(s, dtype=torch.float64).div_(s[0] ** 0.5).requires_grad_() for s in shapes]


@pytest.mark.parametrize("gate", [False, True])
def test_gradcheck(gate: bool) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    made = weights(5, 18)
    assert torch.autograd.gradcheck(lambda x, *w: feed_forward(x, gate, *w), (x, *made))
    # nor is anything wrong where x, a bias or a whole layer is not trained
    for frozen in (made[2], made[-1], made[5]):
        frozen.requires_grad_(False)
        assert torch.autograd.gradcheck(lambda *w: feed_forward(x.detach(), gate, *w), tuple(made))
        frozen.requires_grad_(True)


@pytest.mark.parametrize("gate", [False, True])
def test_functions_are_traced_with_symbolic_rows(gate: bool) -> None:
    made = weights(24, 50)
    compiled = torch.compile(lambda x: feed_forward(x, gate, *made), dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(2, rows, 24, dtype=torch.float64, requires_grad=True)
        results = []
        for function in (compiled, lambda x: feed_forward(x, gate, *made)):
            y = function(x)
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, *(made if gate else made[:3])])])
        for ours, right in zip(*results, strict=True):
            assert (ours - right).abs().max() <= 1e-12 * right.abs().max()


def test_the_same_as_layers_of_torch() -> None:
    x, (first, second, bias, second_gate, bias_gate, inner, outer, outer_bias) = (
        torch.randn(2, 3, 5).double(),
        weights(5, 18),
    )
    h = x @ first.t()
    gated = torch.nn.functional.gelu(h @ second_gate + bias_gate) * (h @ second + bias)
    plain = torch.nn.functional.gelu(h @ second + bias)
    for gate, made in ((True, gated), (False, plain)):
        ours = feed_forward(x, gate, first, second, bias, second_gate, bias_gate, inner, outer, outer_bias)
        torch.testing.assert_close(ours, made @ inner.t() @ outer + outer_bias, rtol=1e-12, atol=1e-12)

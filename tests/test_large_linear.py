"""A linear layer of 4096 x 4096 never holds a tensor of the size of its matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from comera_compile import pipeline, torch_private
from comera_compile.passes import plan_contractions
from comera_compile.planning.linear_plan import candidates
from comera_compile.planning.row_ranges import RowRange
from comera_compile.tt.packing import cores_of, halves
from tests.packed_modules import pack, shape_of

SIZE, RANK = 4096, 8


@pytest.fixture(scope="module")
def layer() -> nn.Module:
    return pack(nn.Linear(SIZE, SIZE), rank=RANK, order=3)


class Recorder:
    """A Dynamo backend that keeps the forward and backward graphs that Inductor would get."""

    def __init__(self) -> None:
        self.forward: list[fx.GraphModule] = []
        self.backward: list[fx.GraphModule] = []

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        pipeline.run(graph_module)
        return torch_private.compile_recording(graph_module, inputs, self.forward.append, self.backward.append)

    def largest(self) -> int:
        """Elements of the largest tensor of any node of both graphs, inputs and outputs included."""
        assert len(self.forward) == len(self.backward) == 1
        values = [node.meta.get("val") for g in (*self.forward, *self.backward) for node in g.graph.nodes]
        flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,))]
        sizes = [v.numel() for v in flat if isinstance(v, torch.Tensor)]
        assert len(sizes) > 20  # the graphs do carry values
        return max(sizes)


def train(layer: nn.Module, x: Tensor) -> tuple[Recorder, list[Tensor]]:
    """One forward and backward: the graphs, and output and gradients."""
    recorder = Recorder()
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = torch.compile(layer, backend=recorder)(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return recorder, [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("rows", [(4,), (1,), (4, 16), (4, 128)], ids=str)
def test_no_tensor_has_the_size_of_the_matrix(layer: nn.Module, rows: tuple[int, ...]) -> None:
    recorder, _ = train(layer, torch.randn(*rows, SIZE))
    assert recorder.largest() < SIZE * SIZE // 4  # x of 512 rows is the largest by far


def test_results_and_gradients_are_right(layer: nn.Module) -> None:
    # The truth in float64 from the two halves: 4096 x 8 and 8 x 4096.
    x = torch.randn(4, SIZE)
    _, found = train(layer, x)
    packed, bias = (layer._parameters[k] for k in ("weight", "bias"))
    assert packed is not None and bias is not None
    shape = shape_of(layer)
    leaves = [t.detach().double().requires_grad_() for t in (x, packed, bias)]
    left, right = halves(cores_of(leaves[1], shape), shape)
    y = leaves[0] @ right.T @ left.T + leaves[2]
    expected = [y.detach(), *torch.autograd.grad(y.sum(), leaves)]
    by_name = dict(zip([n for n, _ in layer.named_parameters()], found[2:], strict=True))
    for ours, truth in zip([*found[:2], by_name["weight"], by_name["bias"]], expected, strict=True):
        assert (ours - truth).norm() <= 1e-4 * truth.norm()


def test_a_rebuilt_matrix_would_be_seen(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    # The check above can fail: under the plan that rebuilds W the graphs do hold it.
    def choose(shape, contracts, *settings):  # type: ignore[no-untyped-def]
        return (RowRange(None, candidates(shape, contracts, 16)[-1]),)

    monkeypatch.setattr(plan_contractions, "plans_by_rows", choose)
    recorder, _ = train(layer, torch.randn(4, SIZE))
    assert recorder.largest() == SIZE * SIZE

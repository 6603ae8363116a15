"""Tiny modules with packed weights, and a Dynamo backend that shows graphs after each pass.

The truth for a rewritten graph is the same function run eagerly: there each weight is rebuilt by the marker op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from comera_compile import pipeline
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.uses import PLAN, USE, TTUse
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.marker import MARKERS
from comera_compile.tt.shape import Format, TTShape
from comera_compile.weights.tt_module import install, shapes_of


def pack(
    module: nn.Module,
    key: str = "weight",
    *,
    format: Format = "tt",
    rank: int = 4,
    scale: float = 0.75,
    **settings: Any,
) -> nn.Module:
    """Give a dense parameter random cores, in place: two modes a side if not said otherwise."""
    parameter = module._parameters[key]
    assert parameter is not None
    rows, cols = parameter.shape
    shape = choose_shape(rows, cols, format=format, rank=rank, **{"order": 2, **settings}).with_scale(scale)
    parameter.data = torch.randn(shape.numel, dtype=parameter.dtype)
    install(module, key, shape)
    return module


def shape_of(module: nn.Module, key: str = "weight") -> TTShape:
    """Shape of a packed parameter."""
    return shapes_of(module)[key]


def linear(inputs: int, outputs: int, *, bias: bool = True, **settings: Any) -> nn.Module:
    """``nn.Linear`` in float64 with a packed weight."""
    return pack(nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64), **settings)


class Holder(nn.Module):
    """A bare packed weight of ``(rows, cols)`` and a function of it: any use a model's author may write."""

    def __init__(self, function: Callable[..., Tensor], rows: int = 24, cols: int = 20, **settings: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, cols, dtype=torch.float64))
        self.function = function
        pack(self, **settings)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.weight, *inputs)


class Stack(nn.Module):
    """Layers with a nonlinearity between; each gets the output of the one before."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()  # no function that two layers run through as one
        return x


class Capture:
    """A Dynamo backend that runs the passes up to one of them, keeps the graph, and runs it operation by operation."""

    def __init__(self, last: str = "lower_plans") -> None:
        self.last = last
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        passes = pipeline.passes(threads=torch.get_num_threads(), training=torch.is_grad_enabled())
        for name, rewrite in passes:
            graph_module = rewrite(graph_module)
            if name == self.last:
                break
        self.graphs.append(graph_module)
        run: Callable[..., Any] = graph_module.forward
        return run

    def compile(self, model: nn.Module, **settings: Any) -> Callable[..., Tensor]:
        """``torch.compile`` with this backend."""
        call: Callable[..., Tensor] = torch.compile(model, backend=self, **settings)
        return call

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes of all graphs, bodies of higher-order ops included."""
        modules = [m for g in self.graphs for m in g.modules() if isinstance(m, fx.GraphModule)]
        return [n for module in modules for n in module.graph.nodes]

    def count(self, *targets: Any) -> int:
        """How many nodes call one of these functions."""
        return sum(n.op == "call_function" and n.target in targets for n in self.nodes)

    @property
    def markers(self) -> int:
        """How many marker ops are left."""
        return self.count(*MARKERS)

    @property
    def uses(self) -> list[TTUse]:
        """Uses of packed weights, tagged by the first pass."""
        return [n.meta[USE] for n in self.nodes if isinstance(n.meta.get(USE), TTUse)]

    @property
    def plans(self) -> list[LinearPlan]:
        """Plans of linear uses, tagged by the second pass."""
        return [n.meta[PLAN] for n in self.nodes if isinstance(n.meta.get(PLAN), LinearPlan)]


def outcome(call: Callable[..., Tensor], model: nn.Module, inputs: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Output and every gradient, that of floating inputs included, under a loss that weighs each entry differently."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    model.zero_grad()
    output = call(*leaves)
    yield "output", output.detach()
    (output * torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)).sum().backward()
    named = {f"input {k}": x for k, x in enumerate(leaves)} | dict(model.named_parameters())
    yield from ((name, t.grad.clone()) for name, t in named.items() if t.grad is not None)


def assert_as_eager(capture: Capture, model: nn.Module, *inputs: Tensor, **settings: Any) -> None:
    """The captured graph computes what eager code computes, to 1e-10 of the norm, gradients included."""
    ours = dict(outcome(capture.compile(model, **settings), model, inputs))
    right = dict(outcome(model, model, inputs))
    assert ours.keys() == right.keys()
    for name, value in right.items():
        assert ours[name].shape == value.shape, name
        assert (ours[name] - value).norm() <= 1e-10 * value.norm(), name

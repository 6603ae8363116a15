"""Models of a few thousand parameters and the comparisons that the tests of the backend share.

``copy.deepcopy`` of a model that is tensorized already runs eagerly on the same cores (each weight is rebuilt by the
marker op), so it is the truth for the compiled model: it shares neither plans nor generated code with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Small weights count, two modes a side are enough, and graphs run operation by operation: no code is generated.
OPTIONS: dict[str, Any] = {"rank": 4, "order": 2, "min_elements": 500, "inner": "aot_eager"}
TENSORIZE: dict[str, Any] = {key: OPTIONS[key] for key in ("rank", "order", "min_elements")}
WIDTH = 32
Near = Callable[..., None]


class Mlp(nn.Module):
    """Two linear layers of 32 x 48 and 48 x 32 with a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 48)
        self.norm = nn.LayerNorm(48)
        self.fc2 = nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.norm(self.fc1(x))))


class Broken(Mlp):
    """The same with a graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.fc1(x))
        torch._dynamo.graph_break()
        return self.fc2(F.gelu(hidden))


class Checkpointed(nn.Module):
    """Two blocks whose activations are recomputed in the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(), Mlp()])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, WIDTH)
        self.body = Mlp()
        self.head = nn.Linear(WIDTH, 60, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


class TiedLinear(nn.Module):
    """Two linear modules that hold one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Twice(nn.Module):
    """One module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.fc(x)))


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random input of the models' width."""
    return torch.randn(*shape, WIDTH, dtype=dtype)


def double(model: nn.Module) -> nn.Module:
    """Float64, in which a compiled and an eager result differ by rounding of 1e-16: a wrong term cannot hide."""
    return model.double()


def outcome(call: Callable[..., Tensor], model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Loss, output and every gradient of one training step without an update."""
    model.zero_grad()
    output = call(*inputs)
    loss = (output * output.detach().cos()).mean()  # no symmetry, no gradient that is zero by chance
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "output": output.detach(), **found}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], near: Near, factor: float = 1.0) -> None:
    """Equal names (so the same parameters got a gradient) and values within the dtype's tolerance."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        near(actual[name], value, factor)


def assert_as_eager(
    call: Callable[..., Tensor], model: nn.Module, inputs: Sequence[Tensor], near: Near, factor: float = 1.0
) -> None:
    """The compiled call (made at least once, so the model is packed) equals an eager run of the same packed model."""
    twin = copy.deepcopy(model)
    assert_same(outcome(call, model, *inputs), outcome(twin, twin, *inputs), near, factor)


def packed_names(model: nn.Module) -> list[str]:
    """Names of the packed weights, by the layout entries of the state dict."""
    return [k.removesuffix("_tt").replace("_orig_mod.", "") for k in model.state_dict() if k.endswith("weight_tt")]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a refused call must leave alone: classes, objects, values, gradients."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "classes": [type(m) for m in model.modules()],
        "objects": {n: id(p) for n, p in model.named_parameters()},
        "storages": {n: t.data_ptr() for n, t in tensors.items()},
        "values": {n: t.detach().clone() for n, t in tensors.items()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
    }


def assert_unchanged(before: dict[str, Any], model: nn.Module) -> None:
    """Bit for bit what :func:`snapshot` saw."""
    after = snapshot(model)
    assert all(before[part] == after[part] for part in ("classes", "objects", "storages"))
    for part in ("values", "gradients"):
        for name, value in before[part].items():
            other = after[part][name]
            assert (value is None) == (other is None), name
            assert value is None or torch.equal(value.nan_to_num(), other.nan_to_num()), name


class Counter:
    """An inner backend that counts the graphs it is given; its name goes into the option ``inner``."""

    name = "tests_counting"

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        if self.name not in torch._dynamo.list_backends(exclude_tags=()):
            torch._dynamo.register_backend(_count, name=self.name)
        _counters[:] = [self]

    @property
    def count(self) -> int:
        return len(self.graphs)

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS | {"inner": self.name}


_counters: list[Counter] = []


def _count(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    _counters[0].graphs.append(graph_module)
    compiled: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(graph_module, inputs)
    return compiled

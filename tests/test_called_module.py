"""Which module a trace belongs to, seen from inside a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

import comera_compile as comera
from comera_compile import torch_private
from tests import tiny_models as tiny

Inspect = Callable[[fx.GraphModule], object]


def watching(inspect: Inspect) -> Any:
    """A Dynamo backend that looks at each graph, then runs it as it is; ``seen`` holds what it found."""

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        backend.seen.append(inspect(graph_module))  # type: ignore[attr-defined]
        run: Callable[..., Any] = graph_module.forward
        return run

    backend.seen = []  # type: ignore[attr-defined]
    return backend


def called(_: fx.GraphModule) -> object:
    return torch_private.called_module()


def test_the_called_module() -> None:
    # The root of all names: not a submodule that happens to be first in the graph.
    model, backend = tiny.Checkpointed(use_reentrant=False), watching(called)
    torch.compile(model, backend=backend)(tiny.rows(3, dtype=torch.float32))
    assert len(backend.seen) == 1 and backend.seen[0] is model


def test_a_called_module_of_torch_itself() -> None:
    # Dynamo does not compile torch's own forward methods but a function around the call of the module.
    model, backend = nn.Sequential(nn.Linear(tiny.WIDTH, tiny.WIDTH), nn.ReLU()), watching(called)
    torch.compile(model, backend=backend)(tiny.rows(3, dtype=torch.float32))
    assert len(backend.seen) == 1 and backend.seen[0] is model


def test_the_called_module_after_a_break_in_a_submodule() -> None:
    # The submodule's forward is compiled as frames of its own; what the user compiled is further up the stack.
    model, backend = nn.Sequential(nn.Identity(), tiny.Broken()), watching(called)
    torch.compile(model, backend=backend)(tiny.rows(3, dtype=torch.float32))
    assert len(backend.seen) == 2 and all(found is model for found in backend.seen)


def test_the_called_module_inside_an_uncompiled_one() -> None:
    # Only the compiled part counts; its eager parent is not what the user compiled.
    inner, backend = tiny.Broken(), watching(called)
    outer = nn.Sequential(nn.Linear(tiny.WIDTH, tiny.WIDTH), torch.compile(inner, backend=backend))
    outer(tiny.rows(3, dtype=torch.float32))
    assert len(backend.seen) == 2 and all(found is inner for found in backend.seen)


GLOBAL = nn.Linear(tiny.WIDTH, 8)


def test_modules_of_a_traced_function() -> None:
    # No module is called: those that the function can see, each once, give the names.
    local = nn.Linear(8, 8)

    def both(_: fx.GraphModule) -> object:
        return torch_private.called_module(), torch_private.traced_modules()

    backend = watching(both)

    @torch.compile(backend=backend)
    def call(x: Tensor) -> Tensor:
        return local(local(GLOBAL(x)))

    call(tiny.rows(3, dtype=torch.float32))
    ((module, visible),) = backend.seen
    assert module is None and {id(m) for m in visible} >= {id(local), id(GLOBAL)}
    assert len({id(m) for m in visible}) == len(visible)


def test_a_module_of_torchs_own_class_is_visible() -> None:
    # Dynamo wraps the call of an nn.Sequential into a function, through which the module must still be found.
    model, backend = nn.Sequential(tiny.Mlp()), watching(lambda _: torch_private.traced_modules())
    torch.compile(model, backend=backend)(tiny.rows(3, dtype=torch.float32))
    assert backend.seen == [[model]]


def test_outside_of_a_trace_there_is_no_module() -> None:
    # A torch that keeps its translator elsewhere looks the same; the message says what works without it.
    for function in (torch_private.called_module, torch_private.traced_modules):
        with pytest.raises(comera.VersionError, match=r"call comera\.tensorize\(model\) before"):
            function()


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_distributed_data_parallel(process_group: None) -> None:
    # The wrapper's own module is the root of names; its parameters count as in use.
    model = tiny.Mlp()
    wrapped, backend = DistributedDataParallel(model), watching(called)
    assert all(torch_private.has_live_graph(p) for p in model.parameters())
    torch.compile(wrapped, backend=backend)(tiny.rows(3, dtype=torch.float32))
    assert backend.seen and all(found is model for found in backend.seen)

"""Each use of torch's private interfaces does what the package relies on: what fails first on a new torch."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import comera_compile as comera
from comera_compile import errors, pipeline, torch_private
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


def placeholders(graph_module: fx.GraphModule) -> list[object]:
    return [torch_private.placeholder_value(n) for n in graph_module.graph.nodes if n.op == "placeholder"]


# -- versions and errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.20.1", "3.0.0a0+git1234567"])
def test_versions_that_are_new_enough(version: str) -> None:
    torch_private.check_version(version)


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0+cu128", "1.13.1"])
def test_versions_that_are_too_old(version: str) -> None:
    # Compared as numbers: as text, 2.9 would be newer than 2.11. The message says what there is and what is needed.
    with pytest.raises(comera.VersionError, match=rf"torch >= 2\.11, found {version.split('+')[0]}"):
        torch_private.check_version(version)


KINDS = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.ComeraError)]


@pytest.mark.parametrize("kind", KINDS)
def test_users_get_the_original_error(kind: type[errors.ComeraError]) -> None:
    # Raised as it is, a backend's error would reach the user as BackendCompilerFailed, with another text.
    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise torch_private.as_user_error(kind("expected this, got that"))

    with pytest.raises(kind) as caught:
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert str(caught.value) == "expected this, got that"  # without advice on reporting bugs to PyTorch
    assert type(caught.value).__name__ == kind.__name__ and type(caught.value).__module__ == kind.__module__


# -- tracing again ----------------------------------------------------------------------------------------------------


class Switch(nn.Module):
    """Has one graph break before ``flag`` is set and another one, at another place, after."""

    flag = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        if self.flag:
            torch._dynamo.graph_break()
        x = x * 2
        if not self.flag:
            torch._dynamo.graph_break()
        return x - 3


def retracing(change: Callable[[], None], calls: list[int]) -> Callable[..., Any]:
    """A backend that changes something at the first graph and asks for a new trace."""

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        calls.append(len(graph_module.graph.nodes))
        if len(calls) == 1:
            change()
            raise torch_private.Retrace(restart_reason="test")
        run: Callable[..., Any] = graph_module.forward
        return run

    return backend


def test_retrace_traces_the_frame_again() -> None:
    # The second trace must follow the changed code, breaks and all, without "speculation log" complaints.
    model, calls = Switch(), list[int]()
    call = torch.compile(model, backend=retracing(lambda: setattr(model, "flag", True), calls))
    assert torch.equal(call(torch.ones(2)), torch.ones(2))
    assert len(calls) == 3  # the discarded graph and the two halves of the new one


def test_retrace_is_no_graph_break() -> None:
    # fullgraph=True refuses breaks; the compilation must pass it, and once compiled run without another.
    model, calls = tiny.Mlp(), list[int]()
    call = torch.compile(model, backend=retracing(lambda: None, calls), fullgraph=True)
    x = tiny.rows(3, dtype=torch.float32)
    assert torch.allclose(call(x), model(x))
    call(x)
    assert len(calls) == 2


# -- what a graph is about --------------------------------------------------------------------------------------------


def test_placeholders_give_the_real_objects() -> None:
    # The user's Parameter itself, not a fake or an alias of it: it is converted in place.
    model, x = tiny.Mlp(), tiny.rows(3, dtype=torch.float32)
    backend = watching(placeholders)
    torch.compile(model, backend=backend)(x)
    (seen,) = backend.seen
    for parameter in model.parameters():
        assert sum(value is parameter for value in seen) == 1
    assert sum(value is x for value in seen) == 1


def test_placeholders_of_symbolic_sizes_have_no_parameter() -> None:
    # Sizes come as inputs of their own; nothing of theirs may be taken for a weight.
    model, backend = nn.Linear(tiny.WIDTH, 8), watching(placeholders)
    torch.compile(model, backend=backend, dynamic=True)(tiny.rows(3, dtype=torch.float32))
    (seen,) = backend.seen
    assert len(seen) == 4 and sum(isinstance(v, nn.Parameter) for v in seen) == 2
    assert sum(isinstance(v, Tensor) for v in seen) == 3


# -- live autograd graphs ---------------------------------------------------------------------------------------------


# -- lowering ---------------------------------------------------------------------------------------------------------


def lowering(name: str, patches: dict[str, Any]) -> Callable[..., Any]:
    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_private.compile_inner(name, graph_module, inputs, patches)

    return backend


def test_a_known_inner_backend_lowers() -> None:
    # The result is torch's own, gradients included.
    x = torch.randn(4, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=lowering("aot_eager", {}))(x).backward()
    assert torch.allclose(x.grad, x.cos())


def test_an_unknown_inner_backend_is_named() -> None:
    # Options refuse it earlier; should one vanish in between, torch's own error says which.
    with pytest.raises(torch._dynamo.exc.InvalidBackend, match="no_such_backend"):
        torch_private.compile_inner("no_such_backend", fx.GraphModule(nn.Module(), fx.Graph()), [], {})


def test_inductor_gets_the_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Config for this compilation only; nothing is set globally.
    given: list[dict[str, Any]] = []

    def compile_fx(graph_module: fx.GraphModule, inputs: Sequence[Any], config_patches: dict[str, Any]) -> Any:
        given.append(config_patches)
        return graph_module.forward

    module = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(module, "compile_fx", compile_fx)
    torch.compile(torch.sin, backend=lowering("inductor", {"triton.cudagraphs": True}))(torch.ones(2))
    assert given == [{"triton.cudagraphs": True}]


def test_a_missing_compiler_is_said_before_anything_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inductor would say so too, but only after the weights have been converted. Without it, or with nothing on the
    # CPU, no compiler is needed.
    def nothing() -> str:
        raise torch._inductor.exc.InvalidCxxCompiler()

    torch_private.check_compiler("inductor", [torch.ones(1)])
    monkeypatch.setattr(importlib.import_module("torch._inductor.cpp_builder"), "get_cpp_compiler", nothing)
    torch_private.check_compiler("aot_eager", [torch.ones(1)])
    torch_private.check_compiler("inductor", [torch.ones(1, device="meta"), 3])
    with pytest.raises(comera.CompileError, match=r"needs a C\+\+ compiler.* Install one .*aot_eager"):
        torch_private.check_compiler("inductor", [3, torch.ones(1)])


def test_names_of_inner_backends() -> None:
    # What the option's error message lists; calling ourselves would never end.
    names = torch_private.inner_backend_names()
    assert {"inductor", "eager", "aot_eager"} <= set(names) and "comera" not in names
    assert names == sorted(set(names))
    tiny.Counter()  # registers a backend
    assert tiny.Counter.name in torch_private.inner_backend_names()


def test_cacheable_names_the_functions() -> None:
    # AOTAutograd looks a called function up by module and name; entries that the user set stay.
    with torch._inductor.config.patch(unsafe_marked_cacheable_functions={"theirs.f": "1"}):
        patch = torch_private.cacheable(pipeline.graph_functions(), "7")
    (marked,) = patch.values()
    assert list(patch) == ["unsafe_marked_cacheable_functions"] and marked.pop("theirs.f") == "1"
    assert len(marked) == len(pipeline.graph_functions()) and set(marked.values()) == {"7"}
    for name in marked:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_cacheable_on_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Such graphs are not cached, which is slower and not an error.
    old = types.SimpleNamespace(_inductor=types.SimpleNamespace(config=types.SimpleNamespace()))
    monkeypatch.setattr(torch_private, "torch", old)
    assert torch_private.cacheable(pipeline.graph_functions(), "7") == {}


# -- sizes ------------------------------------------------------------------------------------------------------------


def rows_of(graph_module: fx.GraphModule) -> Any:
    """The first dimension of the last input: the activation."""
    last = [n for n in graph_module.graph.nodes if n.op == "placeholder"][-1]
    return last.meta["example_value"].shape[0]


def test_holds_becomes_a_guard() -> None:
    # A choice on a symbolic size holds for the sizes it was made for: crossing it compiles again, nothing else does.
    backend = watching(lambda graph_module: torch_private.holds(rows_of(graph_module) <= 4))
    call = torch.compile(torch.sin, backend=backend, dynamic=True)
    for rows in (3, 4, 2, 5, 9, 3):
        call(torch.ones(rows))
    assert backend.seen == [True, False]
    assert torch_private.holds(3 <= 4) is True and torch_private.holds(5 <= 4) is False


def test_size_hint() -> None:
    # A number is itself; a symbolic size has the value of the call that is being compiled, and gets no guard by it.
    backend = watching(lambda graph_module: (rows_of(graph_module), torch_private.size_hint(rows_of(graph_module) * 2)))
    call = torch.compile(torch.sin, backend=backend, dynamic=True)
    for rows in (3, 5):
        call(torch.ones(rows))
    ((symbolic, hint),) = backend.seen
    assert isinstance(symbolic, torch.SymInt) and type(hint) is int and hint == 6
    assert torch_private.size_hint(7) == 7


def test_a_size_that_depends_on_data() -> None:
    # Nothing is known about it: no condition is taken to hold, and 1 stands in, rather than an error while compiling.
    def inspect(graph_module: fx.GraphModule) -> tuple[bool, int]:
        (node,) = (n for n in graph_module.graph.nodes if "nonzero" in str(n.target))
        size = node.meta["example_value"].shape[0]
        return torch_private.holds(size <= 2), torch_private.size_hint(size)

    backend = watching(inspect)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(lambda x: torch.nonzero(x) + 1, backend=backend)(torch.ones(3))
    assert backend.seen == [(False, 1)]


# -- recording and counting -------------------------------------------------------------------------------------------


def recording(forward: list[str], backward: list[str]) -> Callable[..., Any]:
    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_private.compile_recording(
            graph_module, inputs, lambda g: forward.append(g.code), lambda g: backward.append(g.code)
        )

    return backend


def test_recording_shows_both_graphs_and_runs_them() -> None:
    # Both are shown by the forward call alone, in aten operations, and compute the right result.
    forward, backward = list[str](), list[str]()
    x = torch.randn(4, requires_grad=True)
    output = torch.compile(lambda x: x.sin().sum(), backend=recording(forward, backward))(x)
    assert len(forward) == 1 and "aten.sin" in forward[0]
    assert len(backward) == 1 and "aten.cos" in "".join(forward + backward)
    output.backward()
    assert len(backward) == 1 and torch.allclose(x.grad, x.cos())


def test_recording_without_gradients() -> None:
    # One graph, and no backward is made up.
    forward, backward = list[str](), list[str]()
    with torch.no_grad():
        output = torch.compile(torch.sin, backend=recording(forward, backward))(torch.ones(2))
    assert torch.equal(output, torch.ones(2).sin())
    assert len(forward) == 1 and backward == []


@torch._dynamo.config.patch(recompile_limit=1)
def test_compilations_apart_are_not_counted_together() -> None:
    # Two models of one class, a limit of one graph: both are compiled, and the limit still holds for ordinary calls.
    models, backend, x = [Switch(), Switch()], watching(lambda _: None), torch.ones(2)
    models[1].flag = True
    for model in models:
        torch_private.compile_apart(model, backend)(x)
    assert len(backend.seen) == 4
    for model in models:
        torch.compile(model, backend=backend)(x)
    assert len(backend.seen) == 6


def test_events_are_counted_beside_torchs_own() -> None:
    counter = torch._dynamo.utils.counters["comera"]
    before = counter["tested"]
    torch_private.count("tested", 2)
    torch_private.count("tested", 1)
    assert counter.pop("tested") == before + 3


def test_transformed_tensors_are_known() -> None:
    # Inside torch.func's transforms a tensor has no storage of its own to watch.
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(torch_private.is_transformed(x))
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    assert seen == [False, True, True]


def test_no_autocast_inside() -> None:
    # On a device that knows autocast it is off; one that does not, meta, is no error.
    a = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch_private.without_autocast("cpu"):
            assert (a @ a).dtype == torch.float32
        with torch_private.without_autocast("meta"):
            assert torch.ones(2, device="meta").shape == (2,)
        assert (a @ a).dtype == torch.bfloat16


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_no_inference_mode_inside(guard: Callable[[], Any]) -> None:
    # Tensors are ordinary ones; whether they get a history is as outside.
    x = torch.ones(2, requires_grad=True)
    with guard():
        with torch_private.without_inference_mode():
            y = x * 2
            assert not y.is_inference() and y.requires_grad is torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled() is (guard is torch.inference_mode)
        assert torch.is_grad_enabled() is (guard is torch.enable_grad)


def test_whether_the_backward_is_traced() -> None:
    assert not torch_private.traces_backward()
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert torch_private.traces_backward()
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        assert torch_private.traces_backward()
    assert not torch_private.traces_backward()

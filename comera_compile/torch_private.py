"""Every use of torch interfaces that are not public, in one place, each with what to do when it is missing.

Checked against torch 2.11 to 2.13. ``check_version`` is called before the first use; each function below is covered by
``tests/test_torch_private.py``, which is what fails first on a new torch.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import exc
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel

from comera_compile.errors import ComeraError, CompileError, OptionError, VersionError

OLDEST_TORCH = (2, 11)
Compiled = Callable[..., Any]


def check_version(version: str = torch.__version__) -> None:
    """Refuse a torch that is too old to hold the interfaces used here.

    Raises:
        VersionError: torch is older than 2.11.
    """
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if found < OLDEST_TORCH:
        raise VersionError(
            f"comera-compile needs torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}, found {version}: "
            "install a newer torch, or call comera.tensorize(model) and train eagerly"
        )


class Retrace(exc.UnspecializeRestartAnalysis, exc.TensorifyScalarRestartAnalysis):
    """Raised in the backend to make Dynamo trace the frame again, now that its weights are packed.

    Both bases are needed: the first makes Dynamo clear its speculation log, the second passes the compiler call
    unwrapped.
    """


def as_user_error(error: ComeraError) -> Exception:
    """The same error in a form that Dynamo hands to the user unwrapped instead of as ``BackendCompilerFailed``."""
    kind = type(error)

    def start(self: Any, message: str) -> None:
        Exception.__init__(self, message)
        self.first_useful_frame = None

    # The bases' own __init__ do not go together: those of ValueError and ShortenTraceback want other arguments. Dynamo
    # adds to the message how to report a bug to PyTorch, which is not what a wrong option calls for.
    members = {"__init__": start, "__str__": lambda self: str(error), "__module__": kind.__module__}
    wrapped: type[Exception] = type(kind.__name__, (kind, exc.ShortenTraceback), members)
    return wrapped(str(error))


def placeholder_value(node: fx.Node) -> object:
    """The real object behind a graph input (the user's Parameter itself), or None for symbolic sizes."""
    argument = node.meta.get("grapharg")
    return None if argument is None else argument.example


def called_module() -> nn.Module | None:
    """The module whose call is being compiled, or None where a function is.

    After a graph break inside a submodule, Dynamo compiles that submodule's forward as a frame of its own. What the
    user compiled is then further up the stack: the outermost method of a module within torch.compile's wrapper.
    """
    scope = _output().local_scope
    called: Any = scope.get("self", scope.get("fn"))  # torch's own modules are called through a function of theirs
    outermost = called
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        if "self" in frame.f_code.co_varnames and isinstance(frame.f_locals.get("self"), nn.Module):
            outermost = frame.f_locals["self"]
        frame = frame.f_back
    found = called if frame is None else outermost  # without the wrapper on the stack there is nothing to go by
    if isinstance(found, DistributedDataParallel):
        found = found.module
    return found if isinstance(found, nn.Module) else None


def traced_modules() -> list[nn.Module]:
    """Modules that the frame being compiled can see: its locals and globals.

    Raises:
        VersionError: there is no running Dynamo translation, or this torch keeps it elsewhere.
    """
    output = _output()
    found = [
        v for scope in (output.local_scope, output.global_scope) for v in scope.values() if isinstance(v, nn.Module)
    ]
    return list(dict.fromkeys(found))


def _output() -> Any:
    """Dynamo's record of the frame being compiled.

    Raises:
        VersionError: there is no running Dynamo translation, or this torch keeps it elsewhere.
    """
    try:
        return torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output
    except AttributeError as error:
        raise VersionError(
            f"torch {torch.__version__} does not show the frame being compiled ({error}): "
            "call comera.tensorize(model) before torch.compile"
        ) from error


def has_live_graph(parameter: torch.Tensor) -> bool:
    """Whether an autograd graph, or DDP, holds on to this leaf: its data must then not change shape.

    Both keep the leaf's AccumulateGrad node alive, which holds a reference to the leaf; asking for the node makes one
    only if there was none.
    """
    if not parameter.requires_grad or not parameter.is_leaf:
        return False
    with torch.enable_grad(), torch.inference_mode(False):
        before: int = parameter._use_count()  # type: ignore[attr-defined]
        edge = torch.autograd.graph.get_gradient_edge(parameter)
        after: int = parameter._use_count()  # type: ignore[attr-defined]
    del edge
    return after == before


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for others inside a transform of ``torch.func`` (vmap, grad)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """No autocast inside, on devices that know it (the meta device does not)."""
    known = torch.amp.autocast_mode.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else nullcontext()


def traces_backward() -> bool:
    """Whether compiled autograd is on, which traces the backward of every operation of autograd."""
    from torch._dynamo import compiled_autograd, config

    return bool(config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """Ordinary tensors inside, with or without history as the grad mode outside says."""
    recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recorded):
        yield


def check_compiler(inner: str, inputs: Sequence[Any]) -> None:
    """Refuse to go on to Inductor, before anything is changed, where it would find no C++ compiler for the CPU.

    Raises:
        CompileError: says which compiler was looked for.
    """
    if inner != "inductor" or not any(isinstance(i, torch.Tensor) and i.device.type == "cpu" for i in inputs):
        return
    from torch._inductor.cpp_builder import get_cpp_compiler  # heavy; only when it is what runs
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise CompileError(
            f"Inductor needs a C++ compiler and found none: {error}. Install one (Debian, Ubuntu: g++) or set CXX to "
            "it; options={'inner': 'aot_eager'} runs without, slowly"
        ) from error


def check_inner_options(inner: str, names: Iterable[str]) -> None:
    """Refuse config patches that Inductor does not know, before anything is changed.

    Raises:
        OptionError: names one, and those that it may have been meant for.
    """
    if inner != "inductor" or not names:
        return
    from torch._inductor import config  # heavy; only when it is what runs

    known = config.get_config_copy()
    for name in names:
        if name not in known:
            near = ", ".join(map(repr, difflib.get_close_matches(name, known, n=3))) or "see torch._inductor.config"
            raise OptionError(f"inner_options: Inductor {torch.__version__} has no option {name!r}; close: {near}")


def compile_inner(
    name: str, graph_module: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]
) -> Compiled:
    """Lower a rewritten graph: Inductor with config patches, or any other registered Dynamo backend by name.

    How the graph is cut into forward and backward, see ``torch_partition``.
    """
    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx  # heavy; only when it is what runs

        return compile_fx(graph_module, inputs, config_patches=dict(patches))  # type: ignore[return-value]
    compiled: Compiled = lookup_backend(name)(graph_module, inputs)  # type: ignore[arg-type]
    return compiled


def inner_backend_names() -> list[str]:
    """Names that ``inner`` may have."""
    return sorted({*torch._dynamo.list_backends(exclude_tags=()), "inductor"} - {"comera"})


def cacheable(functions: Sequence[Callable[..., Any]], version: str) -> dict[str, dict[str, str]]:
    """Inductor config patch that lets AOTAutograd's disk cache hold graphs that call ``functions``.

    ``version`` becomes part of the cache key, so graphs of other versions of these functions are never reused.
    """
    if not hasattr(torch._inductor.config, "unsafe_marked_cacheable_functions"):
        return {}
    known = dict(torch._inductor.config.unsafe_marked_cacheable_functions)
    return {"unsafe_marked_cacheable_functions": known | {f"{f.__module__}.{f.__name__}": version for f in functions}}


def holds(condition: Any) -> bool:
    """Value of a condition on sizes. A symbolic one is decided by its hint and becomes a guard of the compiled code."""
    return bool(torch.fx.experimental.symbolic_shapes.guard_or_false(condition))


def size_hint(size: Any) -> int:
    """A concrete value of a size: itself, or the hint of a symbolic one (1 where there is none)."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return 1 if hint is None else int(hint)


def compile_apart(model: nn.Module, backend: Callable[..., Compiled]) -> Callable[..., Any]:
    """``torch.compile`` that does not add to the recompilations counted for other models of the same class.

    torch before 2.13 has one count for all.
    """
    known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    apart: Any = {"isolate_recompiles": True} if known else {}
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, **apart)
    return compiled


def compile_recording(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    forward: Callable[[fx.GraphModule], None],
    backward: Callable[[fx.GraphModule], None],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] | None = None,
) -> Compiled:
    """Run a graph through AOTAutograd as Inductor would, show both graphs, and execute them operation by operation.

    ``partition`` cuts the joint graph; None: as Inductor does.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def recorder(show: Callable[[fx.GraphModule], None]) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        def compiler(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            show(graph)
            return make_boxed_func(graph.forward)

        return compiler

    lowered = aot_autograd(
        fw_compiler=recorder(forward),
        bw_compiler=recorder(backward),
        partition_fn=partition or min_cut_rematerialization_partition,
    )
    # Otherwise the backward graph may only be compiled, and shown, when backward is called.
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        compiled: Compiled = lowered(graph_module, inputs)
    return compiled


def count(event: str, times: int) -> None:
    """Add to ``torch._dynamo.utils.counters["comera"]``, where torch keeps its own counters of fallbacks."""
    torch._dynamo.utils.counters["comera"][event] += times

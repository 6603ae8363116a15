"""The ``comera`` backend of torch.compile.

First call: Dynamo's graph still has dense weights. They are converted in place and Dynamo is asked to trace again; the
second graph shows marker ops, which the pipeline rewrites into planned contractions and Inductor lowers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from comera_compile import ledger, pipeline, torch_partition, torch_private
from comera_compile.codegen.cpu.build_ahead import build_ahead
from comera_compile.codegen.linear_alone import call_linear_alone
from comera_compile.codegen.lookup_alone import call_lookup_alone
from comera_compile.errors import ComeraError, CompileError, OptionError
from comera_compile.first_call import convert_called
from comera_compile.ledger import SavedBytes
from comera_compile.memory_policy import keep_freed_memory
from comera_compile.options import Options
from comera_compile.passes.count_saved import count_saved
from comera_compile.passes.graph_nodes import example, graph_modules
from comera_compile.passes.plan_attention import ATTENTION
from comera_compile.passes.tag_saved_tensors import tag_saved_tensors
from comera_compile.plan_record import record_plans
from comera_compile.planning.alone import Alone, AloneLookup
from comera_compile.planning.uses import ALONE, USE
from comera_compile.version import code_fingerprint
from comera_compile.weights.checkpoint import accept_packed_checkpoints

_log = logging.getLogger("comera_compile")
_said: set[str] = set()


class Backend:
    """A backend with its options checked at once: ``torch.compile(model, backend=comera.Backend(rank=16))``.

    Args:
        options: see ``comera_compile.options.Options``.

    Raises:
        OptionError: unknown option or impossible value.
        VersionError: torch is too old.
    """

    def __init__(self, **options: Any) -> None:
        torch_private.check_version()
        self.options = Options.parse(options)
        self.__name__ = "comera"

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> torch_private.Compiled:
        """Compile one graph of Dynamo's."""
        try:
            return compile_graph(graph_module, example_inputs, self.options)
        except ComeraError as error:
            raise torch_private.as_user_error(error) from error

    def __repr__(self) -> str:
        """Shows the options, as error messages and logs of torch print it."""
        return f"comera.Backend({self.options})"


def comera_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> torch_private.Compiled:
    """What the entry point ``comera`` names: ``torch.compile(model, backend="comera", options={...})``."""
    try:
        if mode is not None:
            remedy = "use options={'cudagraphs': True, 'inner_options': {...}}"
            raise OptionError(f"mode={mode!r} is not known; {remedy}")
        backend = Backend(**(options or {}))
    except ComeraError as error:
        raise torch_private.as_user_error(error) from error
    return backend(graph_module, example_inputs)


def compile_graph(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> torch_private.Compiled:
    """Convert what is still dense (and trace again), else rewrite and lower.

    Raises:
        Retrace: weights were converted; Dynamo traces the frame again.
        ComeraError: options, weights or their placement do not allow it; nothing has been changed.
    """
    torch_private.check_compiler(options.inner, example_inputs)
    torch_private.check_inner_options(options.inner, options.inner_options)
    converted = convert_called(graph_module, options)
    _build_kernels(graph_module)
    if converted:
        raise torch_private.Retrace(restart_reason="comera: weights became tensor trains")
    unplanned: list[str] = []

    def observe(name: str, graph: fx.GraphModule) -> None:
        if name == "find_attention":
            unplanned.extend(record_plans(graph))

    if options.keep_memory:
        keep_freed_memory()
    pipeline.run(graph_module, observe, objective=options.objective, tune=options.tune, alone=options.may_run_alone)
    _fall_back(unplanned, options.strict)
    alone = _call_alone(graph_module)
    if alone is not None:
        return alone
    partitioner = partitioner_for(options, _recorder(graph_module))
    if partitioner is not None and options.inner == "aot_eager":
        return torch_partition.compile_eagerly(graph_module, example_inputs, partitioner)
    return torch_private.compile_inner(options.inner, graph_module, example_inputs, _patches(options, partitioner))


def _build_kernels(graph_module: fx.GraphModule) -> None:
    """Begin with the libraries that the graph's packed weights will want; tracing them takes as long."""
    values = map(torch_private.placeholder_value, graph_module.graph.find_nodes(op="placeholder"))
    on_cpu = [v for v in values if isinstance(v, torch.nn.Parameter) and v.device.type == "cpu"]
    shapes = [(v.dtype, known.decision.shape) for v in on_cpu if (known := ledger.recall(v)) is not None]
    attention = any(n.target in ATTENTION for module in graph_modules(graph_module) for n in module.graph.nodes)
    build_ahead(((dtype, shape) for dtype, shape in shapes if shape is not None), attention=attention)


def _fall_back(unplanned: Sequence[str], strict: bool) -> None:
    """Say once, and count, that a weight is rebuilt densely in every call; with ``strict`` refuse it."""
    if not unplanned:
        return
    torch_private.count("unplanned_uses", len(unplanned))
    text = f"{len(unplanned)} use(s) without a planned contraction rebuild the dense matrix: {'; '.join(unplanned)}"
    if strict:
        raise CompileError(f"strict: {text}. Keep these weights dense (option exclude) or compile without strict")
    if text not in _said:
        _said.add(text)
        _log.warning("comera: %s", text)


def _call_alone(graph_module: fx.GraphModule) -> torch_private.Compiled | None:
    """What runs a graph that is one linear or one lookup, where it was found to be."""
    [node] = [n for n in graph_module.graph.nodes if ALONE in n.meta] or [None]
    if node is None:
        return None
    found: Alone = node.meta[ALONE]
    x, packed = example(node.meta[USE].x), example(node.meta[USE].packed)
    call = call_lookup_alone(found, x, packed) if isinstance(found, AloneLookup) else call_linear_alone(found, x)
    if call is not None:
        rows = torch_private.size_hint(math.prod(x.shape[:-1]))
        saved = found.saved_elements(rows) * packed.dtype.itemsize if example(node).requires_grad else 0
        _record(graph_module).saved = SavedBytes(saved, 0)
    return call


def _record(graph_module: fx.GraphModule) -> ledger.GraphRecord:
    """A record of this graph, for the report of the weights that it uses."""
    record = ledger.GraphRecord()
    values = map(torch_private.placeholder_value, graph_module.graph.find_nodes(op="placeholder"))
    ledger.record_graph((v for v in values if isinstance(v, torch.Tensor)), record)
    return record


def _recorder(graph_module: fx.GraphModule) -> torch_partition.Observer:
    """Writes down what the graph saves once it is cut."""
    record = _record(graph_module)

    def observe(forward: fx.GraphModule, outputs: int) -> None:
        record.saved = count_saved(forward, outputs)

    return observe


def partitioner_for(
    options: Options, observe: torch_partition.Observer | None = None
) -> torch_partition.Partitioner | None:
    """What cuts the joint graph, where the options say what is saved; None: as the inner compiler does.

    ``observe`` is shown each forward graph that was cut.
    """
    asked = options.saved == "min" or options.saved_bytes is not None
    if not options.cuts or not (asked or options.inner == "aot_eager" or torch_partition.can_partition()):
        return None
    tag = partial(tag_saved_tensors, saved="min" if options.saved == "min" else "auto", limit=options.saved_bytes)
    key = f"{code_fingerprint()} saved={options.saved} saved_bytes={options.saved_bytes}"
    return torch_partition.Partitioner(key, tag, observe)


def _patches(options: Options, partitioner: torch_partition.Partitioner | None) -> dict[str, Any]:
    """Inductor config for this compilation."""
    patches: dict[str, Any] = torch_private.cacheable(pipeline.graph_functions(), code_fingerprint())
    if options.cudagraphs:
        patches["triton.cudagraphs"] = True
    if partitioner is not None:
        patches |= torch_partition.partitioner_patch(partitioner)
    return patches | dict(options.inner_options)


# torch imports this module when torch.compile looks the backend up, before the first call: from then on packed
# checkpoints must load into models that are still dense.
accept_packed_checkpoints()

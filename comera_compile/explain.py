"""``comera.explain(model, *inputs)``: the traced graph, the rewritten one, what runs, and every plan step by step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from comera_compile import pipeline, torch_partition, torch_private
from comera_compile.backend import partitioner_for
from comera_compile.decide import Found
from comera_compile.discover import find_dense_parameters
from comera_compile.errors import ComeraError, OptionError
from comera_compile.ledger import SavedBytes
from comera_compile.options import Options
from comera_compile.passes.count_saved import count_saved
from comera_compile.passes.graph_nodes import graph_modules, rows_of
from comera_compile.passes.plan_contractions import layer_of
from comera_compile.planning.choose import CPU_BOND_MULTIPLE
from comera_compile.planning.cost import Objective, plan_cost
from comera_compile.planning.least_cost import least_cost
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.plan_text import describe_plan
from comera_compile.planning.uses import PLAN, USE
from comera_compile.tensorize import convert
from comera_compile.tuned_plans import Layer


@dataclass
class Explanation:
    """Readable text of one compilation; each list has an entry a graph (a graph break makes several).

    Args:
        traced: Dynamo's graphs, with the marker op where a packed weight is read.
        rewritten: the same after the passes.
        forward, backward: what is handed to the code generator, in aten operations.
        saved: what each forward graph saves for its backward, in bytes: made by plans, and the rest.
        plans: every distinct plan, step by step, with FLOPs and saved tensors.
    """

    traced: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    saved: list[SavedBytes] = field(default_factory=list)

    def __str__(self) -> str:
        """All parts under headings."""
        parts = (
            ("plans", self.plans),
            ("saved by graph", [str(saved) for saved in self.saved]),
            ("traced graph", self.traced),
            ("rewritten graph", self.rewritten),
            ("forward graph", self.forward),
            ("backward graph", self.backward),
        )
        texts = [f"== {name} {k + 1} of {len(part)} ==\n{text}" for name, part in parts for k, text in enumerate(part)]
        return "\n\n".join(texts)


def explain(model: nn.Module, *inputs: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """Compile a copy of the model for these inputs without generating code, and show every stage.

    Args:
        model: any module, compiled or not, packed or not. It is not changed: weights that are still dense are converted
            in the copy only.
        inputs, kwargs: what the model is called with.
        options: backend options, for a model that is still dense.

    Raises:
        ComeraError: as the first compiled call would.
        OptionError: ``model`` is no module, or all inputs were given as one tuple, list or dict.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"explain expects an nn.Module and then its inputs, got {type(model).__name__}")
    settings, shown = Options.parse(options), Explanation()
    twin = copy.deepcopy(getattr(model, "_orig_mod", model))
    convert([Found(p) for p in twin.parameters()], settings, [twin], with_copies=False)
    with torch.random.fork_rng():  # dropout in the copy must not move the random numbers of the model's training
        call = torch_private.compile_apart(twin, _Capture(twin, settings, shown))
        _differentiate(_called(call, twin, inputs, kwargs), twin)
    return shown


def _called(call: Callable[..., Any], model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The outputs. Where the model cannot take one tuple, list or dict, but what is in it, says how to pass that.

    Raises:
        OptionError: the inputs were given as one.
    """
    try:
        return call(*inputs, **kwargs)
    except ComeraError:
        raise
    except Exception as error:  # torch wraps what the model raises in classes of its own
        held = inputs[0] if len(inputs) == 1 and not kwargs else None
        if not isinstance(held, (tuple, list, Mapping)) or not _fits(model, held):
            raise
        kind, remedy = type(held).__name__, "**inputs" if isinstance(held, Mapping) else "*inputs"
        raise OptionError(
            f"the model cannot be called with one {kind} of {len(held)}: {type(error).__name__}: "
            f"{str(error).splitlines()[0]}. Pass its inputs one by one, as in model(x, y): explain(model, x, y), or "
            f"explain(model, {remedy})"
        ) from error


def _fits(model: nn.Module, held: Sequence[Any] | Mapping[str, Any]) -> bool:
    """Whether the model's signature takes these as its arguments."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**held) if isinstance(held, Mapping) else signature.bind(*held)
    except TypeError:
        return False
    return True


class _Capture:
    """A Dynamo backend that records every stage and runs the graphs as they are."""

    def __init__(self, model: nn.Module, options: Options, shown: Explanation) -> None:
        self.model, self.options, self.shown = model, options, shown

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> torch_private.Compiled:
        try:
            decisions = convert(find_dense_parameters(graph_module), self.options, [self.model], with_copies=False)
            if any(d.shape is not None for d in decisions):  # of a use that only the graph shows
                raise torch_private.Retrace(restart_reason="comera: weights became tensor trains")
            self.shown.traced.append(_text(graph_module))
            pipeline.run(graph_module, self._after_pass, objective=self.options.objective)
        except ComeraError as error:
            raise torch_private.as_user_error(error) from error
        self.shown.rewritten.append(_text(graph_module))
        cut = partitioner_for(self.options, self._saved) or torch_partition.observed_as_inductor_cuts(self._saved)
        return torch_private.compile_recording(graph_module, inputs, self._forward, self._backward, cut)

    def _after_pass(self, name: str, graph_module: fx.GraphModule) -> None:
        if name == "lower_plans":  # then the planned nodes are gone
            return
        for module in graph_modules(graph_module):
            for node in module.graph.nodes:
                text = self._describe(node) if PLAN in node.meta else ""
                if text and text not in self.shown.plans:
                    self.shown.plans.append(text)

    def _describe(self, node: fx.Node) -> str:
        """The plan of a node; of a linear one also how far from the cheapest plan it is."""
        text, plan = describe_plan(node), node.meta[PLAN]
        if not isinstance(plan, LinearPlan):
            return text
        layer = layer_of(node.meta[USE], threads=torch.get_num_threads(), training=torch.is_grad_enabled())
        rows = torch_private.size_hint(rows_of(node.meta[USE].x))
        return f"{text}\n  {_yardstick(plan, layer, rows, self.options.objective)}"

    def _saved(self, forward: fx.GraphModule, outputs: int) -> None:
        self.shown.saved.append(count_saved(forward, outputs))

    def _forward(self, graph_module: fx.GraphModule) -> None:
        self.shown.forward.append(_text(graph_module))

    def _backward(self, graph_module: fx.GraphModule) -> None:
        self.shown.backward.append(_text(graph_module))


def _yardstick(plan: LinearPlan, layer: Layer, rows: int, objective: Objective) -> str:
    # Both as torch's products: the search knows no others.
    known = replace(layer.device, kernels=None), layer.dtype.itemsize
    ours = plan_cost(plan, rows, *known, training=layer.training).by(objective)
    multiple = CPU_BOND_MULTIPLE if layer.device_type == "cpu" else 1
    least = least_cost(plan.shape, plan.contracts, rows, *known, layer.training, objective, multiple)
    scale, unit = {"time": (1e6, "us"), "flops": (1e-6, "MFLOP"), "bytes": (1e-6, "MB moved")}[objective]
    verb = "is proven to cost" if least.proven else "was found to cost"
    return (
        f"predicted {scale * ours:,.1f} {unit} in torch's products; the cheapest plan, one axis order a tensor, over "
        f"{least.tensors} tensors and {least.contractions} contractions {verb} {scale * least.price:,.1f} {unit}"
    )


def _differentiate(outputs: Any, model: nn.Module) -> None:
    """Run the backward, which is lowered only when it is asked for; gradients go nowhere."""
    leaves = [o for o in tree_leaves(outputs) if isinstance(o, torch.Tensor) and o.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    if leaves and parameters:
        upstream = [torch.ones_like(o) for o in leaves]
        torch.autograd.grad(leaves, parameters, upstream, allow_unused=True)


def _text(graph_module: fx.GraphModule) -> str:
    text: str = graph_module.print_readable(print_output=False)
    return text.strip()

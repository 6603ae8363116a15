"""``comera.explain(model, *inputs)``: the traced graph, the rewritten one, what runs, and every plan step by step."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from comera_compile import pipeline, torch_private
from comera_compile.backend import partitioner_for
from comera_compile.decide import Found
from comera_compile.discover import find_dense_parameters
from comera_compile.errors import ComeraError
from comera_compile.options import Options
from comera_compile.passes.graph_nodes import graph_modules
from comera_compile.planning.plan_text import describe_plan
from comera_compile.planning.uses import PLAN
from comera_compile.tensorize import convert


@dataclass
class Explanation:
    """Readable text of one compilation; each list has an entry a graph (a graph break makes several).

    Args:
        traced: Dynamo's graphs, with the marker op where a packed weight is read.
        rewritten: the same after the passes.
        forward, backward: what is handed to the code generator, in aten operations.
        plans: every distinct plan, step by step, with FLOPs and saved tensors.
    """

    traced: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """All parts under headings."""
        parts = (
            ("plans", self.plans),
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
    """
    settings, shown = Options.parse(options), Explanation()
    twin = copy.deepcopy(getattr(model, "_orig_mod", model))
    convert([Found(p) for p in twin.parameters()], settings, [twin], with_copies=False)
    with torch.random.fork_rng():  # dropout in the copy must not move the random numbers of the model's training
        call = torch_private.compile_apart(twin, _Capture(twin, settings, shown))
        _differentiate(call(*inputs, **kwargs), twin)
    return shown


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
        cut = partitioner_for(self.options)
        return torch_private.compile_recording(graph_module, inputs, self._forward, self._backward, cut)

    def _after_pass(self, name: str, graph_module: fx.GraphModule) -> None:
        if name == "lower_plans":  # then the planned nodes are gone
            return
        for module in graph_modules(graph_module):
            for node in module.graph.nodes:
                text = describe_plan(node) if PLAN in node.meta else ""
                if text and text not in self.shown.plans:
                    self.shown.plans.append(text)

    def _forward(self, graph_module: fx.GraphModule) -> None:
        self.shown.forward.append(_text(graph_module))

    def _backward(self, graph_module: fx.GraphModule) -> None:
        self.shown.backward.append(_text(graph_module))


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

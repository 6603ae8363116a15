"""The order of the passes, on one screen. Each pass gets its few settings here and never sees the options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from comera_compile.codegen.lower_plans import GRAPH_FUNCTIONS, lower_plans
from comera_compile.passes.find_alone import find_alone
from comera_compile.passes.find_attention import find_attention
from comera_compile.passes.find_bridges import find_bridges
from comera_compile.passes.find_tt_weights import find_tt_weights
from comera_compile.passes.plan_attention import plan_attention
from comera_compile.passes.plan_contractions import plan_contractions
from comera_compile.planning.cost import Objective
from comera_compile.tune import tune_graph

Pass = Callable[[fx.GraphModule], fx.GraphModule]
Observer = Callable[[str, fx.GraphModule], None]


def passes(
    *, threads: int, training: bool, objective: Objective = "time", tune: bool = False, alone: bool = False
) -> list[tuple[str, Pass]]:
    """Every pass by name, in order, bound to its settings."""
    settings: dict[str, Any] = {"threads": threads, "training": training}
    measuring = [("tune_graph", partial(tune_graph, **settings))] if tune else []
    looking = [("find_alone", partial(find_alone, **settings, objective=objective))] if alone else []
    return [
        ("find_tt_weights", find_tt_weights),
        *measuring,
        ("plan_contractions", partial(plan_contractions, **settings, objective=objective)),
        *looking,
        ("find_bridges", find_bridges),
        ("find_attention", find_attention),
        ("plan_attention", plan_attention),
        ("lower_plans", lower_plans),
    ]


def run(
    graph_module: fx.GraphModule,
    observe: Observer | None = None,
    *,
    objective: Objective = "time",
    tune: bool = False,
    alone: bool = False,
) -> fx.GraphModule:
    """Rewrite a traced graph whose weights are packed.

    Args:
        graph_module: Dynamo's graph; rewritten in place.
        observe: called with each pass's name and the graph after it.
        objective: what contractions are chosen by.
        tune: measure plans of layers for which no measurement is stored.
        alone: whether a graph that is one tensor-train linear or lookup may be run without an inner compiler.
    """
    settings: dict[str, Any] = {"threads": torch.get_num_threads(), "training": torch.is_grad_enabled()}
    for name, rewrite in passes(**settings, objective=objective, tune=tune, alone=alone):
        graph_module = rewrite(graph_module)
        if observe is not None:
            observe(name, graph_module)
    return graph_module


def graph_functions() -> tuple[Callable[..., object], ...]:
    """Python functions that a rewritten graph calls; all are pure, so graphs that call them may be cached on disk."""
    return GRAPH_FUNCTIONS

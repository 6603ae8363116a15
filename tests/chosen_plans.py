"""Plans of a given name for every layer, and a look at the graphs that come out of the last pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import fx

from comera_compile import pipeline
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.planning.row_ranges import RowRange


def choose_plans(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every layer gets the plan of this name, whatever such small layers would rather have."""

    def chosen(shape: object, contracts: object, *_: object) -> tuple[RowRange, ...]:
        plans: list[LinearPlan] = candidates(shape, contracts, 8)  # type: ignore[arg-type]
        return (RowRange(None, next(p for p in plans if p.name == name)),)

    monkeypatch.setattr("comera_compile.passes.plan_contractions.plans_by_rows", chosen)
    torch._dynamo.reset()


@contextmanager
def lowered() -> Iterator[list[fx.GraphModule]]:
    """The graphs that come out of the last pass."""
    graphs: list[fx.GraphModule] = []
    lower = pipeline.lower_plans

    def watch(graph: fx.GraphModule) -> fx.GraphModule:
        graphs.append(lower(graph))
        return graphs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "lower_plans", watch)
        yield graphs

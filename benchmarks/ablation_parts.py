"""The parts that the ablation switches off, each by putting something plain in the place of one named function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch._inductor.config
from torch import fx

from comera_compile import pipeline
from comera_compile.codegen import lower_plans
from comera_compile.codegen.cpu import merge_kernels, skinny_kernels
from comera_compile.passes.plan_contractions import plan_contractions
from comera_compile.planning import choose
from comera_compile.planning.uses import USE

UNEVEN_RANK = 30  # where padding matters: 32 is a multiple of 8 already


@dataclass(frozen=True)
class Part:
    """One thing that can be switched off.

    Args:
        instead: what runs in its place.
        off: while this is entered, models compile without it.
        saved: the option that switches it off, or None.
        rank: rank at which it matters, or None for that of the run.
    """

    instead: str
    off: Callable[[], AbstractContextManager[object]] = nullcontext
    saved: str | None = None
    rank: int | None = None


@contextmanager
def forward_plans() -> Iterator[None]:
    """Each layer's plan is the one of fewest operations in the forward alone."""

    def plan(
        graph_module: fx.GraphModule, *, threads: int, training: bool, objective: str = "time", **settings: Any
    ) -> fx.GraphModule:
        return plan_contractions(graph_module, threads=threads, training=False, objective="flops", **settings)

    with patch.object(pipeline, "plan_contractions", plan):
        yield


@contextmanager
def unpadded_bonds() -> Iterator[None]:
    """The bond of merged halves stays as it is, whatever its size."""
    choose.plans_by_rows.cache_clear()
    try:
        with patch.object(choose, "CPU_BOND_MULTIPLE", 1):
            yield
    finally:
        choose.plans_by_rows.cache_clear()


@contextmanager
def separate_merges() -> Iterator[None]:
    """Every weight's cores are merged on their own."""
    together = lower_plans._merge_all

    def apart(graph: fx.Graph, linears: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        weights: dict[fx.Node, list[fx.Node]] = {}
        for node in linears:
            weights.setdefault(node.meta[USE].packed, []).append(node)
        operands: dict[fx.Node, list[fx.Node]] = {}
        for uses in weights.values():
            operands |= together(graph, uses)
        return operands

    with patch.object(lower_plans, "_merge_all", apart):
        yield


@contextmanager
def without_pass(name: str) -> Iterator[None]:
    """Graphs go past one pass of the pipeline as they are."""

    def same(graph_module: fx.GraphModule) -> fx.GraphModule:
        return graph_module

    with patch.object(pipeline, name, same):
        yield


@contextmanager
def by_torch(*modules: Any) -> Iterator[None]:
    """Torch's own operators run instead of the kernels of these modules.

    The graphs are the same, so compiled ones must not be taken from a cache.
    """
    with ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True))
        for module in modules:
            stack.enter_context(patch.object(module, "available", lambda *_: False))
        yield


WHOLE = Part("")
PARTS: dict[str, Part] = {
    "joint_plan": Part("fewest FLOPs of the forward alone", forward_plans),
    "padding": Part("bonds as they are", unpadded_bonds, rank=UNEVEN_RANK),
    "sharing": Part("each weight's cores merged on their own", separate_merges),
    "chosen_saved": Part("saved='all'", saved="all"),
    "merge_kernel": Part("cores merged by torch, a call a step", partial(by_torch, merge_kernels)),
    "bridges": Part("feed-forward networks layer by layer", partial(without_pass, "find_bridges")),
    "attention": Part("q, k, v and attention as wide tensors", partial(without_pass, "find_attention")),
    "own_kernels": Part("all products by torch", partial(by_torch, merge_kernels, skinny_kernels)),
}

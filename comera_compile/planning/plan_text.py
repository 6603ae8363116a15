"""Plans as text, one line a step: what ``comera.explain`` shows and what belongs into a bug report."""

from __future__ import annotations

import math

from torch import fx

from comera_compile.planning.attention_plan import AttentionPlan
from comera_compile.planning.cost import saved_bytes
from comera_compile.planning.lookup_plan import LookupPlan
from comera_compile.planning.program import Program
from comera_compile.planning.step import Step
from comera_compile.planning.uses import PLAN, USE


def describe_plan(node: fx.Node) -> str:
    """Text of the plan of one tagged node."""
    plan = node.meta[PLAN]
    if isinstance(plan, AttentionPlan):
        return f"attention {tuple(node.meta['example_value'].shape)}\n  {plan.name}"
    shape = node.meta[USE].x.meta["example_value"].shape
    if isinstance(plan, LookupPlan):
        return f"lookup [{math.prod(shape)} ids] {plan.encode()}\n  {plan.name}"
    rows = math.prod(shape[:-1])
    hint = rows if isinstance(rows, int) else int(rows.node.hint or 1)
    sizes = {**plan.core_sizes, "t": hint}
    applied = {**plan.operand_sizes, "t": hint}
    lines = [f"linear [{rows} rows] {plan.encode()}", f"  {plan.name}; axes {_sizes(applied)}"]
    lines += ["  merge (batch-free, once for all layers of this shape):", *_lines(plan.merge.steps, sizes)]
    lines += ["  forward:", *_lines(plan.apply.steps, applied)]
    lines += ["  backward:", *_lines(_all(plan.apply), applied), *_lines(_all(plan.merge), sizes)]
    kept = ", ".join(plan.apply.saved(plan.apply.input_names))
    lines.append(f"  saved: {kept} ({saved_bytes(plan, hint) / 1024:,.0f} KiB besides x)")
    return "\n".join(lines)


def _all(program: Program) -> tuple[Step, ...]:
    return program.backward(program.input_names)


def _lines(steps: tuple[Step, ...], sizes: dict[str, int]) -> list[str]:
    return [f"    {s!s:<56}{s.flops(sizes) / 1e6:>12,.3f} MFLOP" for s in steps]


def _sizes(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())

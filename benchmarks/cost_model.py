"""How well the cost model ranks plans: predicted against measured time, beside FLOPs alone and bytes alone.

``python -m benchmarks.cost_model`` runs every candidate plan of a set of layers, ranks and numbers of rows: forward,
backward and all gradients, as the mm, bmm and copies that a compiled graph holds (``plan_timing``). Plans of a case
take turns in one process. The model is the stored calibration of this device, made first with
``--calibrate``, or the shipped figures; ``conditions.model`` says which.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import output, process
from benchmarks.linear_cases import Case
from comera_compile.calibrate import calibrate, calibrated_model
from comera_compile.plan_timing import time_plans
from comera_compile.planning.choose import CPU_BOND_MULTIPLE
from comera_compile.planning.cost import OBJECTIVES, Cost, plan_cost
from comera_compile.planning.device_model import DeviceModel, shipped_model
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.tuned_plans import Layer

MODULE = "benchmarks.cost_model"
NEAR = 1.1  # a plan within 10 % of the best is a good choice

CASES = (
    *(Case(768, 768, rank, rows) for rank in (8, 16, 32, 64) for rows in (32, 512)),
    *(Case(768, 3072, rank, rows) for rank in (16, 32) for rows in (32, 512, 2048)),
    *(Case(3072, 768, rank, rows) for rank in (16, 32) for rows in (128, 1024)),
    *(Case(1024, 4096, 32, rows) for rows in (32, 256)),
    *(Case(4096, 4096, 16, rows) for rows in (32, 256)),
    Case(512, 512, 24, 64),
    Case(512, 2048, 64, 256),
)


@dataclass(frozen=True)
class Measured:
    """Plans of one case: what each costs by the model, and the seconds that it took."""

    case: Case
    plans: Sequence[LinearPlan]
    costs: Sequence[Cost]
    seconds: Sequence[float]


@dataclass(frozen=True)
class Figures:
    """How well one objective predicts time."""

    spearman: float
    median_relative_error: float
    within_10_percent: float


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with what is right."""
    p = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--calibrate", action="store_true", help="measure this device first and store the figures")
    p.add_argument("--shipped", action="store_true", help="use the shipped figures even where a calibration is stored")
    p.add_argument("--seconds", type=float, default=8.0, help="time of one case, warm-up left out")
    p.add_argument("--rounds", type=int, default=25, help="rounds of one case, if --seconds suffice for them")
    p.add_argument("--cases", help="only cases whose name contains this")
    p.add_argument("--json", type=Path, help="file for the result with every plan")
    options = p.parse_args(arguments)
    if options.threads < 1 or options.rounds < 1 or options.seconds <= 0:
        p.error("--threads, --rounds and --seconds must be positive")
    if options.calibrate and options.shipped:
        p.error("--calibrate and --shipped exclude each other")
    options.cases = [case for case in CASES if options.cases is None or options.cases in case.name]
    if not options.cases:
        p.error(f"--cases must be part of one of {', '.join(case.name for case in CASES)}")
    return options


def measure(case: Case, device: DeviceModel, *, rounds: int, seconds: float) -> Measured:
    """Time every candidate plan of a case, all in alternation."""
    layer = Layer(case.shape, "cols", "cpu", torch.get_num_threads(), torch.float32, training=True)
    plans = candidates(case.shape, "cols", CPU_BOND_MULTIPLE)
    timing = time_plans(layer, case.rows, plans, rounds=rounds, seconds=seconds)
    costs = [plan_cost(plan, case.rows, device) for plan in plans]
    return Measured(case, plans, costs, [timing.median(plan.encode()) for plan in plans])


def figures(measured: Sequence[Measured], objective: str) -> Figures:
    """The three figures of one objective over all cases.

    FLOPs and bytes become seconds by the one rate that suits all plans best; time is taken as predicted.
    """
    predicted = [[_amount(cost, objective) for cost in m.costs] for m in measured]
    pairs = [(p, s) for row, m in zip(predicted, measured, strict=True) for p, s in zip(row, m.seconds, strict=True)]
    scale = 1.0 if objective == "time" else statistics.median(s / p for p, s in pairs)
    chosen = [m.seconds[row.index(min(row))] / min(m.seconds) for row, m in zip(predicted, measured, strict=True)]
    return Figures(
        spearman=statistics.median(spearman(row, m.seconds) for row, m in zip(predicted, measured, strict=True)),
        median_relative_error=statistics.median(abs(scale * p - s) / s for p, s in pairs),
        within_10_percent=sum(ratio <= NEAR for ratio in chosen) / len(chosen),
    )


def _amount(cost: Cost, objective: str) -> float:
    return {"time": cost.seconds, "flops": float(cost.flops), "bytes": float(cost.bytes)}[objective]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of the ranks; equal values share the mean of their ranks."""
    return statistics.correlation(ranks(first), ranks(second))


def ranks(values: Sequence[float]) -> list[float]:
    """Rank of each value from 0; of equal values the mean."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def show(measured: Sequence[Measured]) -> None:
    """A line a case: how well the order is predicted, and what the choice by each objective loses."""
    rows: list[list[object]] = []
    for m in measured:
        best = min(m.seconds)
        losses = [_chosen(m, objective)[1] / best for objective in OBJECTIVES]
        name, seconds = _chosen(m, "time")
        ratio = statistics.median(c.seconds / s for c, s in zip(m.costs, m.seconds, strict=True))
        rho = spearman([c.seconds for c in m.costs], m.seconds)
        rows.append([m.case.name, len(m.plans), rho, ratio, *losses, 1e3 * seconds, name])
    head = [
        "case",
        "plans",
        "spearman",
        "predicted/measured",
        "chosen/best",
        "by FLOPs",
        "by bytes",
        "ms",
        "chosen plan",
    ]
    print(output.table(head, rows))


def _chosen(m: Measured, objective: str) -> tuple[str, float]:
    """Name and seconds of the plan that an objective prefers."""
    k = min(range(len(m.plans)), key=lambda k: _amount(m.costs[k], objective))
    return m.plans[k].name, m.seconds[k]


def result(measured: Sequence[Measured]) -> dict[str, Any]:
    """Figures of predicted time at the top, those of the other objectives beside them."""
    found = {objective: vars(figures(measured, objective)) for objective in OBJECTIVES}
    counts = {"cases": len(measured), "plans": sum(len(m.plans) for m in measured)}
    return {**found["time"], "flops_only": found["flops"], "bytes_only": found["bytes"], **counts}


def raw(measured: Sequence[Measured]) -> Mapping[str, Any]:
    """Every plan with what was predicted and measured."""
    return {
        m.case.name: [
            {"plan": p.name, "seconds": s, "predicted": c.seconds, "flops": c.flops, "bytes": c.bytes}
            for p, c, s in zip(m.plans, m.costs, m.seconds, strict=True)
        ]
        for m in measured
    }


def device_model(options: argparse.Namespace) -> DeviceModel:
    """The model whose predictions are judged."""
    if options.shipped:
        return shipped_model("cpu", options.threads)
    if options.calibrate:
        calibrate("cpu", options.threads)
    return calibrated_model("cpu", options.threads, torch.float32)


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(options.threads)
    device = device_model(options)
    print(f"model: {device.source}")
    measured = [measure(case, device, rounds=options.rounds, seconds=options.seconds) for case in options.cases]
    show(measured)
    facts = output.conditions(
        malloc=process.malloc_settings(), dtype="float32", model=device.source, rounds=options.rounds
    )
    found = {"name": "cost_model", "conditions": facts, **result(measured)}
    output.emit(found, raw=raw(measured), json_file=options.json)


if __name__ == "__main__":
    chosen = parse()
    process.require_allocator("keep")
    main(chosen)

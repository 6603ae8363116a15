"""Ours against every fixed order of contraction, case by case; a run can be ended and gone on with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import comera_compile as comera
from benchmarks import output, paired
from benchmarks.fixed_strategies import STRATEGIES
from benchmarks.linear_cases import OURS, Case, build

SAME = ("threads", "torch", "processor", "commit")  # what a run must share with the one it goes on with
HEAD = ("case", "plan of ours", "ms", "best fixed", "ours / best", *(f"over {name}" for name in STRATEGIES))

Row = dict[str, Any]


class Progress:
    """Rows measured so far, kept in a file after every case.

    Args:
        file: where to, or None.
        facts: conditions of this run.
        resume: begin with the rows that the file holds, if it is there.

    Raises:
        SystemExit: the file's rows were taken under other conditions.
    """

    def __init__(self, file: Path | None, facts: Mapping[str, Any], *, resume: bool) -> None:
        self.file, self.facts = file, facts
        self.rows: dict[str, Row] = {}
        if resume and file is not None and file.exists():
            kept = json.loads(file.read_text())
            differing = {k: (kept["conditions"].get(k), facts.get(k)) for k in SAME}
            if any(before != now for before, now in differing.values()):
                raise SystemExit(f"--resume: {file} was measured under other conditions (then, now): {differing}")
            self.rows = kept["raw"]["cases"]

    @property
    def raw(self) -> dict[str, Any]:
        """What the file holds beside the figures."""
        return {"cases": self.rows}

    def add(self, name: str, row: Row) -> None:
        """Keep one case; the file is whole at any time."""
        self.rows[name] = row
        if self.file is not None:
            part = self.file.with_name(self.file.name + ".part")
            part.write_text(json.dumps({"name": "linear_grid", "conditions": self.facts, "raw": self.raw}) + "\n")
            os.replace(part, self.file)


def measure(cases: Sequence[Case], progress: Progress, *, rounds: int, seconds: float) -> None:
    """Time every case that ``progress`` does not hold yet."""
    for k, case in enumerate(cases):
        if case.name not in progress.rows:
            progress.add(case.name, measure_case(case, rounds=rounds, seconds=seconds))
            line = figures_of(progress.rows[case.name])
            print(f"{k + 1}/{len(cases)} {case.name}: {line['over_best']:.3f} of {line['best']}", flush=True)


def measure_case(case: Case, *, rounds: int, seconds: float) -> Row:
    """Raw rounds of ours and of all strategies; the pair once more, five times as long, where a loss is undecided."""
    torch._dynamo.reset()
    batches = case.batches()
    built = {name: build(name, case, batches) for name in (OURS, *STRATEGIES)}
    steps = {name: b.step for name, b in built.items()}
    timing = paired.measure(steps, rounds=rounds, seconds=seconds)
    best = min(STRATEGIES, key=timing.median)
    row: Row = {"seconds": dict(timing.seconds), "plan": _plan(built[OURS].layer)}
    if timing.speedup(OURS, best).undecided:
        pair = {name: steps[name] for name in (best, OURS)}
        longer = paired.measure(pair, rounds=paired.AGAIN * rounds, seconds=paired.AGAIN * seconds)
        row["again"] = dict(longer.seconds)
    return row


def _plan(layer: torch.nn.Module) -> str:
    """Name of the plan that the backend chose."""
    uses = comera.report(layer)["weight"].uses
    return uses[0].plan if uses else "none"


def figures_of(row: Row) -> dict[str, Any]:
    """What one case says: the best strategy, our time over its time, and by how much ours beats each."""
    timing = paired.Timing(row["seconds"])
    best = min(STRATEGIES, key=timing.median)
    pair = paired.Timing(row.get("again") or row["seconds"])
    return {
        "best": best,
        "over_best": 1 / pair.speedup(OURS, best).median,
        "speedup_over": {name: timing.speedup(OURS, name).median for name in STRATEGIES},
        "milliseconds": 1e3 * timing.median(OURS),
    }


def figures(rows: Mapping[str, Row]) -> dict[str, Any]:
    """By strategy and case ``speedup_over``; by case ``over_best_fixed``; and the worst of these."""
    lines = {name: figures_of(row) for name, row in rows.items()}
    over_best = {name: line["over_best"] for name, line in lines.items()}
    worst = max(over_best, key=lambda name: over_best[name])
    return {
        "worst_over_best_fixed": over_best[worst],
        "worst_case": worst,
        "cases": len(lines),
        "over_best_fixed": over_best,
        "speedup_over": {s: {name: line["speedup_over"][s] for name, line in lines.items()} for s in STRATEGIES},
    }


def show(result: Mapping[str, Any], rows: Mapping[str, Row]) -> None:
    """Print one row a case."""
    table: list[list[object]] = []
    for name, row in rows.items():
        line = figures_of(row)
        over = [line["speedup_over"][s] for s in STRATEGIES]
        table.append([name, row["plan"], line["milliseconds"], line["best"], line["over_best"], *over])
    print(output.table(HEAD, table))
    print(f"worst: {result['worst_over_best_fixed']:.3f} of the best fixed strategy at {result['worst_case']}")

"""Whether plans change at the right number of rows: each plan against its neighbour on its own side of the crossover.

``python -m benchmarks.crossovers --threads 2`` takes the ranges of rows that a dynamic batch has on this device (its
stored calibration, else the shipped figures) and times the two plans that meet at each limit, half as many rows below
and twice as many above, or at the other end of the range where that is nearer. Ratios are neighbour over plan: above 1
the plan is rightly chosen.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import output, process
from benchmarks.linear_cases import GRID_LAYERS, GRID_RANKS, Case
from comera_compile.plan_timing import time_plans
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.row_ranges import RowRange
from comera_compile.tuned_plans import Layer

MODULE = "benchmarks.crossovers"
NEAR = 0.95  # a plan that takes 5 % longer than its neighbour is as good as it
HEAD = ("layer", "limit", "rows", "plan", "neighbour", "neighbour over plan", "25-75 %", "predicted", "ms")


@dataclass(frozen=True)
class Side:
    """One side of a crossover: the plan that is to be the better one at ``rows``, and the one beyond the limit."""

    limit: int
    rows: int
    plan: LinearPlan
    neighbour: LinearPlan


@dataclass(frozen=True)
class Line:
    """What was measured of a side."""

    layer: str
    limit: int
    rows: int
    plan: str
    neighbour: str
    ratio: float
    low: float
    high: float
    predicted: float
    milliseconds: float


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with what is right."""
    p = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=60, help="rounds of a side, if --seconds suffice for them")
    p.add_argument("--seconds", type=float, default=1.5, help="no further round of a side is begun after this time")
    p.add_argument("--layers", default="", help="only layers whose name contains this, as 768x768 or r32")
    p.add_argument("--json", type=Path, help="file for the result")
    options = p.parse_args(arguments)
    if options.threads < 1 or options.rounds < 1 or options.seconds <= 0:
        p.error("--threads, --rounds and --seconds must be positive")
    options.cases = [case for case in cases() if options.layers in name_of(case)]
    if not options.cases:
        p.error(f"--layers must be part of one of {', '.join(map(name_of, cases()))}")
    return options


def cases() -> Iterator[Case]:
    """Every layer and rank of the grid; rows play no part."""
    for inner, out in GRID_LAYERS:
        for rank in GRID_RANKS:
            yield Case(inner, out, rank, 1)


def name_of(case: Case) -> str:
    """``<in>x<out>_r<rank>``."""
    return case.name.rpartition("_")[0]


def sides(ranges: Sequence[RowRange]) -> Iterator[Side]:
    """Both sides of every limit above one row, which torch compiles apart whatever the plans are."""
    for k, (below, above) in enumerate(pairwise(ranges)):
        limit = below.up_to
        assert limit is not None
        if limit == 1:
            continue
        first = ((ranges[k - 1].up_to or 0) if k else 0) + 1
        yield Side(limit, max(first, limit // 2), below.plan, above.plan)
        yield Side(limit, min(2 * limit, above.up_to or 2 * limit), above.plan, below.plan)


def measure(chosen: Sequence[Case], *, rounds: int, seconds: float) -> list[Line]:
    """Time both plans of every side in alternation."""
    found = []
    for case in chosen:
        layer = Layer(case.shape, "cols", "cpu", torch.get_num_threads(), torch.float32, training=True)
        for side in sides(layer.predicted()):
            pair = [side.plan, side.neighbour]
            timing = time_plans(layer, side.rows, pair, rounds=rounds, seconds=seconds)
            ratio = timing.speedup(side.plan.encode(), side.neighbour.encode())
            predicted = layer.seconds(side.neighbour, side.rows) / layer.seconds(side.plan, side.rows)
            names = name_of(case), side.limit, side.rows, side.plan.name, side.neighbour.name
            milliseconds = 1e3 * timing.median(side.plan.encode())
            found.append(Line(*names, ratio.median, ratio.low, ratio.high, predicted, milliseconds))
    return found


def figures(lines: Sequence[Line]) -> dict[str, Any]:
    """``right``: share of sides whose plan is at most 5 % slower than its neighbour; the median and the least ratio."""
    ratios = [line.ratio for line in lines]
    right = sum(ratio >= NEAR for ratio in ratios) / len(ratios)
    return {"sides": len(lines), "right": right, "median_ratio": statistics.median(ratios), "least_ratio": min(ratios)}


def show(lines: Sequence[Line]) -> None:
    """Print a row a side."""
    rows = [
        [
            x.layer,
            x.limit,
            x.rows,
            x.plan,
            x.neighbour,
            x.ratio,
            f"{x.low:.3g}-{x.high:.3g}",
            x.predicted,
            x.milliseconds,
        ]
        for x in lines
    ]
    print(output.table(HEAD, rows))


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(options.threads)
    lines = measure(options.cases, rounds=options.rounds, seconds=options.seconds)
    show(lines)
    layer = Layer(options.cases[0].shape, "cols", "cpu", options.threads, torch.float32, training=True)
    facts = output.conditions(malloc=process.malloc_settings(), dtype="float32", model=layer.device.source)
    result = {"name": "crossovers", "conditions": facts, **figures(lines)}
    output.emit(result, raw={"sides": [asdict(line) for line in lines]}, json_file=options.json)


if __name__ == "__main__":
    chosen = parse()
    process.require_allocator("keep")
    main(chosen)

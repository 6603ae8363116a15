"""Forward, backward and all gradients of one linear layer: this backend against dense Inductor.

``python -m benchmarks.linear_step --threads 2`` times the standard cases in pairs; ``--grid`` holds this backend
against the best of the fixed orders of contraction on 60 cases instead. Ratios are other over ours: above 1 is better.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from benchmarks import floor, linear_against_dense, linear_grid, linear_table, output, process
from benchmarks.linear_cases import DEFAULT, Case, grid

MODULE = "benchmarks.linear_step"
DEFAULT_MALLOC = {"rounds": 15, "seconds": 1.5}  # of the process that repeats the ratios under the default allocator


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with what is right."""
    p = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=300, help="rounds kept of a layer, if --seconds suffice for them")
    p.add_argument("--seconds", type=float, default=8.0, help="no further round of a layer is begun after this time")
    p.add_argument("--cases", default="*", help="name pattern of the cases, as 768x768_r*_T512")
    p.add_argument("--grid", action="store_true", help="against the fixed orders of contraction, case by case")
    p.add_argument("--resume", action="store_true", help="with --grid: keep the cases that the --json file holds")
    p.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="also tensorly-torch")
    p.add_argument("--json", type=Path, help="file for the result with all raw rounds")
    p.add_argument("--measure", choices=("all", "speed"), default="all", help="speed: ratios only, allocator as it is")
    options = p.parse_args(arguments)
    if min(options.threads, options.rounds) < 1:
        p.error("--threads and --rounds must be at least 1")
    if options.resume and not (options.grid and options.json):
        p.error("--resume needs --grid and --json FILE, the file of the run to go on with")
    options.chosen = [c for c in (grid() if options.grid else DEFAULT) if fnmatchcase(c.name, options.cases)]
    if not options.chosen:
        p.error(f"--cases {options.cases}: no such case; they are {', '.join(c.name for c in DEFAULT)}, ...")
    return options


def measure_default(options: argparse.Namespace) -> dict[str, Any]:
    """The standard cases, with what is printed beside them."""
    cases: list[Case] = options.chosen
    limits: dict[str, Any] = {"rounds": options.rounds, "seconds": options.seconds}
    if options.measure == "speed":
        return linear_against_dense.measure(cases, **limits)
    before = floor.measure_machine()
    result = linear_against_dense.measure(cases, **limits)
    result["floor"] = linear_table.floors(result, cases, floor.best_of(before, floor.measure_machine()))
    if options.peer:
        result |= linear_against_dense.against_tensorly(cases, **limits)
    fewer = [f"--{key}={min(value, limits[key])}" for key, value in DEFAULT_MALLOC.items()]
    same = [f"--threads={options.threads}", f"--cases={options.cases}", "--measure=speed", "--no-peer"]
    child = process.run_child(MODULE, [*same, *fewer], allocator="default")
    return {**result, "speedup_default_malloc": child["speedup"]}


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(options.threads)
    facts = output.conditions(malloc=process.malloc_settings(), dtype="float32", gradients="x and all parameters")
    if options.grid:
        progress = linear_grid.Progress(options.json, facts, resume=options.resume)
        linear_grid.measure(options.chosen, progress, rounds=options.rounds, seconds=options.seconds)
        result: dict[str, Any] = linear_grid.figures(progress.rows)
        linear_grid.show(result, progress.rows)
        output.emit({"name": "linear_grid", "conditions": facts, **result}, raw=progress.raw, json_file=options.json)
        return
    result = measure_default(options)
    raw = {"seconds": result.pop("raw_seconds")}
    if "floor" in result:
        linear_table.show(result)
    output.emit({"name": "linear_step", "conditions": facts, **result}, raw=raw, json_file=options.json)


if __name__ == "__main__":
    chosen = parse()
    if chosen.measure == "all":
        process.require_allocator("keep")
    main(chosen)

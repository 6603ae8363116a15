"""One training step of an embedding table, lookup, backward and update: this backend against dense and naive ones.

``python -m benchmarks.embedding_step --threads 2``. Two tables: a language model's (30522 x 768, rank 30) beside the
dense table under AdamW, and a recommender's (1,000,000 x 32, rank 32) beside the dense table under SparseAdam; 4096 ids
a step, by default P(id) ~ 1 / (id + 1) ** 1.05. Ratios are other over ours: above 1 is better.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from benchmarks import embedding_times, floor, output, process
from benchmarks.embedding_cases import OURS, TABLES

MODULE = "benchmarks.embedding_step"
DEFAULT_MALLOC = {"rounds": 15, "seconds": 3.0}  # of the process that repeats the ratios under the default allocator
HEAD = ("table, variant", "parameters", "ours faster", "25-75 %", "rounds", "default malloc", "ms", "floor ms")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with what is right."""
    p = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=300, help="rounds kept of a table, if --seconds suffice for them")
    p.add_argument("--seconds", type=float, default=12.0, help="no further round of a table is begun after this time")
    p.add_argument("--tables", default="*", help=f"name pattern of {', '.join(TABLES)}")
    p.add_argument("--naive", action=argparse.BooleanOptionalAction, default=True, help="also the naive lookups")
    p.add_argument("--json", type=Path, help="file for the result with all raw rounds")
    p.add_argument("--measure", choices=("all", "speed"), default="all", help="speed: ratios only, allocator as it is")
    options = p.parse_args(arguments)
    if min(options.threads, options.rounds) < 1:
        p.error("--threads and --rounds must be at least 1")
    options.chosen = [name for name in TABLES if fnmatchcase(name, options.tables)]
    if not options.chosen:
        p.error(f"--tables {options.tables}: no such table; they are {', '.join(TABLES)}")
    return options


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Every chosen table, with what is printed beside it."""
    limits: dict[str, Any] = {"rounds": options.rounds, "seconds": options.seconds, "naive": options.naive}
    if options.measure == "speed":
        return embedding_times.measure(options.chosen, **limits)
    before = floor.measure_machine()
    result = embedding_times.measure(options.chosen, **limits)
    result["floor"] = floors(result, floor.best_of(before, floor.measure_machine()))
    fewer = [f"--{key}={min(value, limits[key])}" for key, value in DEFAULT_MALLOC.items()]
    same = [f"--threads={options.threads}", f"--tables={options.tables}", "--measure=speed", "--no-naive"]
    child = process.run_child(MODULE, [*same, *fewer], allocator="default")
    return {**result, "speedup_default_malloc": child["speedup"]}


def floors(result: Mapping[str, Any], machine: floor.Machine) -> dict[str, Any]:
    """Rates measured here and, by table and variant, the least milliseconds at these rates where they are known."""
    lines: dict[str, Any] = {"gemm_gflops": machine.flops / 1e9, "stream_gb_s": machine.bytes / 1e9}
    for name, variants in result["milliseconds"].items():
        table = TABLES[name]
        ids = table.ids()
        works = {variant: table.work(variant, ids) for variant in variants}
        lines[name] = {v: 1e3 * work.seconds(machine) for v, work in works.items() if work is not None}
    return lines


def show(result: Mapping[str, Any]) -> None:
    """Print one row a table and variant, then the ids of each table."""
    rows = [_row(name, variant, result) for name, v in result["milliseconds"].items() for variant in v]
    print(output.table(HEAD, rows))
    for name, ids in result["ids"].items():
        share = result["processor_share"][name]
        print(f"{name}: {output.rounded(ids)} a batch; {share:.0%} of the processor time got")
    rates = result["floor"]
    gemm, stream = rates["gemm_gflops"], rates["stream_gb_s"]
    print(f"rates measured here: {gemm:.4g} GFLOP/s in a square product, {stream:.3g} GB/s in an addition in place")


def _row(name: str, variant: str, result: Mapping[str, Any]) -> list[object]:
    key = f"{name}_vs_{variant}"
    low, high = result["speedup_range"].get(key, (1.0, 1.0))
    return [
        f"{name} {variant}",
        result["parameters"][name][variant],
        None if variant == OURS else result["speedup"][key],
        f"{low:.3g}-{high:.3g}",
        result["rounds"][name][variant],
        result["speedup_default_malloc"].get(key),
        result["milliseconds"][name][variant],
        result["floor"][name].get(variant),
    ]


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(options.threads)
    result = measure_all(options)
    raw = {"seconds": result.pop("raw_seconds")}
    if "floor" in result:
        show(result)
    shapes = {name: asdict(TABLES[name]) for name in options.chosen}
    facts = output.conditions(malloc=process.malloc_settings(), dtype="float32", tables=shapes)
    output.emit({"name": "embedding_step", "conditions": facts, **result}, raw=raw, json_file=options.json)


if __name__ == "__main__":
    chosen = parse()
    if chosen.measure == "all":
        process.require_allocator("keep")
    main(chosen)

"""Forward, backward and all gradients of blocks that run from bond to bond: this backend against dense Inductor.

``python -m benchmarks.region_step --threads 2`` times a feed-forward network, attention and a block of a language model
in pairs. Ratios are dense over ours: above 1 is better.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import comera_compile as comera
from benchmarks import output, paired, process
from benchmarks.linear_cases import DENSE, OURS
from benchmarks.region_cases import REGIONS, Region, build

MODULE = "benchmarks.region_step"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with what is right."""
    p = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=200, help="rounds kept of a block, if --seconds suffice for them")
    p.add_argument("--seconds", type=float, default=8.0, help="no further round of a block is begun after this time")
    p.add_argument("--cases", default="*", help="name pattern of the blocks, as ffn_*")
    p.add_argument("--inner", default="inductor", help="what lowers the graphs of both variants")
    p.add_argument("--json", type=Path, help="file for the result with all raw rounds")
    options = p.parse_args(arguments)
    if min(options.threads, options.rounds) < 1:
        p.error("--threads and --rounds must be at least 1")
    options.chosen = [region for region in REGIONS if fnmatchcase(region.name, options.cases)]
    if not options.chosen:
        p.error(f"--cases {options.cases}: no such block; they are {', '.join(r.name for r in REGIONS)}")
    return options


def measure(region: Region, *, rounds: int, seconds: float, inner: str) -> dict[str, Any]:
    """Paired times of one block and its dense form.

    Returns:
        ``speedup``, ``speedup_range``, ``rounds``, ``processor_share``, ``milliseconds`` and ``raw_seconds`` of both
        variants, and ``plans``, how each weight is run.
    """
    torch._dynamo.reset()  # what other blocks compiled is not looked through at each call
    batches = region.batches()
    steps = {variant: build(variant, region, batches, inner=inner) for variant in (DENSE, OURS)}
    timing = paired.measure({name: s.step for name, s in steps.items()}, rounds=rounds, seconds=seconds)
    spread = timing.speedup(OURS, DENSE)
    lines = comera.report(steps[OURS].layer).tensorized
    return {
        "speedup": spread.median,
        "speedup_range": [spread.low, spread.high],
        "rounds": timing.rounds,
        "processor_share": timing.share(torch.get_num_threads()),
        "milliseconds": {name: 1e3 * timing.median(name) for name in steps},
        "plans": {line.decision.name: line.uses[0].plan for line in lines if line.uses},
        "raw_seconds": {name: timing.seconds[name] for name in steps},
    }


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(options.threads)
    facts = output.conditions(malloc=process.malloc_settings(), dtype="float32", gradients="x and all parameters")
    result: dict[str, Any] = {}
    for region in options.chosen:
        figures = measure(region, rounds=options.rounds, seconds=options.seconds, inner=options.inner)
        print(f"{region.name:20s} {figures['speedup']:6.2f}x  {figures['milliseconds']}", flush=True)
        for key, value in figures.items():
            result.setdefault(key, {})[region.name] = value
    raw = {"seconds": result.pop("raw_seconds")}
    output.emit({"name": "region_step", "conditions": facts, **result}, raw=raw, json_file=options.json)


if __name__ == "__main__":
    chosen = parse()
    process.require_allocator("keep")
    main(chosen)

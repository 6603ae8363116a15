"""What each part of the package is worth: one training step of the six encoders with one thing switched off at a time.

``python -m benchmarks.ablation --batch 8 --threads 2`` times the whole and the variants in pairs in one process, and
the allocator in processes of its own that take turns. Figures are time without a part over time of the whole: above 1
the part pays.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import comera_compile as comera
from benchmarks import output, paired, process
from benchmarks.ablation_parts import PARTS, WHOLE, Part
from benchmarks.six_encoders import SixEncoders, Sizes, zipf_batches
from benchmarks.training import LEARNING_RATE, Setting, Training

MODULE = "benchmarks.ablation"
ALLOCATOR = "kept_buffers"
HEAD = ("without", "what runs instead", "rank", "time over whole", "25-75 %", "rounds", "ms", "plans")


def build(part: Part, setting: Setting, **more: Any) -> Training:
    """A model compiled without one part, after its first step: what is switched off is so only while it compiles.

    Args:
        part: what is switched off; :data:`WHOLE` for nothing.
        setting: sizes, batch, rank and seed.
        more: further options of the backend.
    """
    setting = replace(setting, saved=part.saved or setting.saved)
    torch.manual_seed(setting.seed)
    model = SixEncoders(setting.sizes)
    # which allocator runs is said by the benchmark, for all variants of a process alike
    options = {"rank": setting.rank, "keep_memory": False, "saved": setting.saved, **more}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    call = torch.compile(model, backend="comera", options=options)
    training = Training(model, call, optimizer, zipf_batches(setting.batch, setting.sizes))
    # beyond its limit torch runs a function uncompiled, and all variants have one forward
    with part.off(), torch._dynamo.config.patch(recompile_limit=10 * len(PARTS)):
        training.step()
    return training


def measure(parts: Mapping[str, Part], setting: Setting, *, rounds: int, seconds: float, **more: Any) -> dict[str, Any]:
    """Paired times of the whole and of each variant, one session for each rank that occurs.

    Args:
        parts: what to switch off, by name.
        setting: batch, sizes and rank; a part may say another rank, at which it matters.
        rounds, seconds: of a session, see ``paired.measure``.
        more: further options of the backend.

    Returns:
        By part ``time_over_whole`` and its 25-75 % range, ``rounds``, ``milliseconds``, ``plans``, ``ranks``; and
        ``raw_seconds``.

    Raises:
        ArithmeticError: a variant's loss is not finite.
    """
    ranks = {name: part.rank or setting.rank for name, part in parts.items()}
    lines: dict[str, dict[str, Any]] = {}
    for rank in dict.fromkeys(ranks.values()):
        ours = {"whole": WHOLE, **{name: part for name, part in parts.items() if ranks[name] == rank}}
        lines |= _session(ours, replace(setting, rank=rank), rounds=rounds, seconds=seconds, **more)
    keys = ("time_over_whole", "time_over_whole_range", "rounds", "milliseconds", "plans", "raw_seconds")
    return {"ranks": ranks, **{key: {name: lines[name][key] for name in ranks} for key in keys}}


def _session(
    parts: Mapping[str, Part], setting: Setting, *, rounds: int, seconds: float, **more: Any
) -> dict[str, dict[str, Any]]:
    trained = {name: build(part, setting, **more) for name, part in parts.items()}
    timings = paired.compare({n: t.step for n, t in trained.items()}, "whole", rounds=rounds, seconds=seconds)
    wrong = {name: t.loss for name, t in trained.items() if not math.isfinite(t.loss)}
    if wrong:
        raise ArithmeticError(f"every variant must train; losses that are not finite: {wrong}")
    return {name: _figures(name, timings[name], trained[name]) for name in parts if name != "whole"}


def _figures(name: str, timing: paired.Timing, training: Training) -> dict[str, Any]:
    without = timing.speedup("whole", name)
    return {
        "time_over_whole": without.median,
        "time_over_whole_range": [without.low, without.high],
        "rounds": timing.rounds,
        "milliseconds": {"whole": 1e3 * timing.median("whole"), "without": 1e3 * timing.median(name)},
        "plans": plans_of(training.model),
        "raw_seconds": dict(timing.seconds),
    }


def plans_of(model: torch.nn.Module) -> dict[str, int]:
    """Names of the plans that run, and of how many weights."""
    names = [use.plan for line in comera.report(model).tensorized for use in line.uses]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def measure_allocator(options: argparse.Namespace) -> dict[str, Any]:
    """The whole under glibc's defaults over the whole with kept memory, in processes that take turns."""
    same = [f"--{key}={getattr(options, key)}" for key in ("batch", "threads", "rank", "rounds", "seconds")]
    taken: dict[str, list[float]] = {"keep": [], "default": []}
    for k in range(options.sessions):
        for allocator in taken if k % 2 == 0 else reversed(taken):
            found = process.run_child(MODULE, [*same, "--measure=whole"], allocator=allocator)
            taken[allocator].append(found["milliseconds"])
    spread = paired.spread([d / k for d, k in zip(taken["default"], taken["keep"], strict=True)])
    return {"time_over_whole": spread.median, "range": [spread.low, spread.high], "milliseconds": taken}


def measure_whole(setting: Setting, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Median milliseconds of the whole alone, in this process, under the allocator that it has."""
    training = build(WHOLE, setting)
    timing = paired.measure({"whole": training.step}, rounds=rounds, seconds=seconds)
    return {"milliseconds": 1e3 * timing.median("whole")}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with what is right."""
    p = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    p.add_argument("--batch", type=int, default=8, help="sequences of 128 tokens in a step")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rank", type=int, default=32)
    p.add_argument("--rounds", type=int, default=25, help="rounds kept of a session, if --seconds suffice for them")
    p.add_argument("--seconds", type=float, default=60.0, help="no further round is begun after this time")
    p.add_argument("--sessions", type=int, default=3, help="pairs of processes for the allocator; 0: leave it out")
    p.add_argument("--parts", type=_parts, default=tuple(PARTS), help=f"of {','.join(PARTS)}")
    p.add_argument("--json", type=Path, help="file for the result with all raw rounds")
    p.add_argument("--measure", choices=("all", "whole"), default="all", help="whole: its time alone, in this process")
    options = p.parse_args(arguments)
    if min(options.batch, options.threads, options.rank, options.rounds) < 1 or options.sessions < 0:
        p.error("--batch, --threads, --rank and --rounds must be at least 1, --sessions at least 0")
    return options


def _parts(text: str) -> tuple[str, ...]:
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if not asked or set(asked) - set(PARTS):
        raise argparse.ArgumentTypeError(f"parts are {', '.join(PARTS)}; got {text!r}")
    return tuple(name for name in PARTS if name in asked)


def show(result: Mapping[str, Any]) -> None:
    """Print one row a part."""
    rows: list[list[object]] = []
    for name, ratio in result["time_over_whole"].items():
        low, high = result["time_over_whole_range"][name]
        instead = PARTS[name].instead if name in PARTS else "glibc's defaults, in a process of its own"
        plans = ", ".join(f"{plan} x{n}" for plan, n in result["plans"].get(name, {}).items())
        milliseconds = result["milliseconds"].get(name, {}).get("without")
        rank, rounds = result["ranks"].get(name), result["rounds"].get(name)
        rows.append([name, instead, rank, ratio, f"{low:.3g}-{high:.3g}", rounds, milliseconds, plans])
    print(output.table(HEAD, rows))


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(options.threads)
    setting, limits = Setting(options.batch, options.rank), {"rounds": options.rounds, "seconds": options.seconds}
    raw: dict[str, Any] = {}
    if options.measure == "whole":
        result = measure_whole(setting, **limits)
    else:
        result = measure({name: PARTS[name] for name in options.parts}, setting, **limits)
        raw["seconds"] = result.pop("raw_seconds")
        if options.sessions:
            allocator = measure_allocator(options)
            raw["allocator_milliseconds"] = allocator["milliseconds"]
            result["time_over_whole"][ALLOCATOR] = allocator["time_over_whole"]
            result["time_over_whole_range"][ALLOCATOR] = allocator["range"]
        show(result)
    shapes = {**asdict(Sizes()), "batch": options.batch}
    facts = output.conditions(malloc=process.malloc_settings(), dtype="float32", shapes=shapes, rank=options.rank)
    output.emit({"name": "ablation", "conditions": facts, **result}, raw=raw, json_file=options.json)


if __name__ == "__main__":
    chosen = parse()
    if chosen.measure == "all":
        process.require_allocator("keep")
    main(chosen)

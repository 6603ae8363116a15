"""One training step of CoMERA's six-encoder classifier: this backend against dense Inductor and against its peers.

``python -m benchmarks.transformer_step --batch 8 --threads 2`` times the variants in pairs and measures the peak memory
of each in a process of its own. Ratios are dense over variant: above 1 is better than dense.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import bookkeeping, compile_time, floor, memory, output, peers, process, step_speed, step_table
from benchmarks.six_encoders import Sizes
from benchmarks.training import BASELINE, OURS, OURS_SAVING_ALL, PEERS, VARIANTS, Setting, build
from comera_compile.options import SAVED

MODULE = "benchmarks.transformer_step"
STANDARD = (BASELINE, OURS, "tt_autograd")
DEFAULT_MALLOC = {"rounds": 7, "seconds": 25.0}
# allocator of the process that measures a part; None: as its caller set it
ALLOCATOR_OF = {"all": "keep", "memory": "return", "speed": None, "compile": None}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with what is right."""
    p = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    p.add_argument("--batch", type=int, default=8, help="sequences of 128 tokens in a step")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rank", type=int, default=32)
    p.add_argument("--rounds", type=int, default=25, help="rounds kept, if --seconds suffice for them")
    p.add_argument("--seconds", type=float, default=60.0, help="no further round is begun after this time")
    p.add_argument("--variants", type=_variants, help=f"of {','.join(VARIANTS)}; peers by default at batch 1 only")
    p.add_argument(
        "--saved",
        choices=SAVED,
        default="auto",
        help="what this backend saves for the backward; min is also timed against all",
    )
    p.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--compile-time", action="store_true", help="also compile cold and warm, in fresh processes")
    p.add_argument("--bookkeeping", action="store_true", help="only count CoMERA's own shapes")
    p.add_argument("--json", type=Path, help="file for the result with all raw rounds")
    p.add_argument("--measure", choices=tuple(ALLOCATOR_OF), default="all", help="one part only, in this process")
    options = p.parse_args(arguments)
    if min(options.batch, options.threads, options.rank, options.rounds) < 1:
        p.error("--batch, --threads, --rank and --rounds must be at least 1")
    if options.variants is None:
        options.variants = STANDARD + (PEERS if options.batch == 1 else ())
        options.variants += (OURS_SAVING_ALL,) if options.saved == "min" else ()
    if options.measure in ("memory", "compile") and len(options.variants) != 1:
        p.error(f"--measure {options.measure} takes one variant: --variants NAME")
    return options


def _variants(text: str) -> tuple[str, ...]:
    """The named variants, in the order of the table."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if not asked or set(asked) - set(VARIANTS):
        raise argparse.ArgumentTypeError(f"variants are {', '.join(VARIANTS)}; got {text!r}")
    return tuple(name for name in VARIANTS if name in asked)


def measure_part(options: argparse.Namespace) -> dict[str, Any]:
    """The one part that ``--measure`` names, in this process."""
    setting = Setting(options.batch, options.rank, saved=options.saved)
    if options.measure == "speed":
        return step_speed.measure(options.variants, setting, rounds=options.rounds, seconds=options.seconds)
    [variant] = options.variants
    if options.measure == "compile":
        return {"compile": compile_time.measure(variant, setting)}
    peak = memory.measure(lambda: build(variant, setting))
    return {"memory": {"residue": peak.residue, "peak": peak.peak, "figure": peak.figure}}


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Every part that was asked for, merged into one result."""
    setting = Setting(options.batch, options.rank, saved=options.saved)
    variants, missing = installed(options.variants)
    before = floor.measure_machine()
    result = step_speed.measure(variants, setting, rounds=options.rounds, seconds=options.seconds)
    result["floor"] = floors(result, setting, floor.best_of(before, floor.measure_machine()))
    standard = [name for name in variants if name not in PEERS]
    fewer = [f"--{key}={min(value, getattr(options, key))}" for key, value in DEFAULT_MALLOC.items()]
    result["speedup_default_malloc"] = child(options, "speed", standard, fewer)["speedup"]
    if options.memory:
        names = dict.fromkeys((BASELINE, *variants))
        result["memory"] = {name: child(options, "memory", [name])["memory"] for name in names}
        result["memory_ratio"] = {name: memory_ratio(result, BASELINE, name) for name in names if name != BASELINE}
    if (faster := result.pop("speedup_over_galore", None)) is not None:
        less = {"memory_ratio": memory_ratio(result, "galore", OURS)} if options.memory else {}
        result["against_galore"] = {"speedup": faster, **less}
    if options.compile_time:
        result |= compile_times(options)
    return {**result, "not_measured": missing} if missing else result


def installed(variants: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The variants that can be measured here, and why each of the others cannot."""
    missing: dict[str, str] = {}
    for name in set(variants) & set(PEERS):
        try:
            peers.require(name)
        except peers.PeerMissingError as reason:
            missing[name] = str(reason)
    return tuple(name for name in variants if name not in missing), missing


def child(
    options: argparse.Namespace,
    part: str,
    variants: Sequence[str],
    more: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One part, measured in a fresh process under the same conditions and the part's allocator."""
    same = [f"--{key}={getattr(options, key)}" for key in ("batch", "threads", "rank", "saved")]
    arguments = [*same, f"--measure={part}", f"--variants={','.join(variants)}", *more]
    return process.run_child(MODULE, arguments, allocator=ALLOCATOR_OF[part] or "default", extra=extra)


def memory_ratio(result: Mapping[str, Any], other: str, variant: str) -> float:
    """Bytes of ``other`` over bytes of ``variant``."""
    peaks = result["memory"]
    return float(peaks[other]["figure"] / peaks[variant]["figure"])


def compile_times(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of compilation, dense and ours, cold and warm; the ratio is ours over dense."""
    times: dict[str, dict[str, Any]] = {}
    for name in (BASELINE, OURS):

        def once(extra: dict[str, str], name: str = name) -> dict[str, Any]:
            seconds: dict[str, Any] = child(options, "compile", [name], extra=extra)["compile"]
            return seconds

        times[name] = compile_time.cold_and_warm(once)
    return {"compile_time": times, "compile_time_ratio": compile_time.ratios(times, BASELINE, OURS)}


def floors(result: Mapping[str, Any], setting: Setting, machine: floor.Machine) -> dict[str, Any]:
    """Rates measured here and, for each variant, the least work at these rates beside the time it took."""
    lines: dict[str, Any] = {"gemm_gflops": machine.flops / 1e9, "stream_gb_s": machine.bytes / 1e9}
    for name, milliseconds in result["milliseconds"].items():
        least = floor.work(name, setting, result["parameters"][name])
        if least is not None:
            bound = 1e3 * least.seconds(machine)
            amounts = {"gflop": least.flops / 1e9, "gbyte": least.bytes / 1e9}
            lines[name] = {**amounts, "floor_ms": bound, "floor_over_measured": bound / milliseconds}
    return lines


def count() -> dict[str, Any]:
    """CoMERA's own bookkeeping, printed as a table."""
    blocks = bookkeeping.blocks()
    ours, dense = bookkeeping.totals()
    rows: list[list[object]] = [[b.name, b.count, b.parameters, b.dense, b.dense / b.parameters] for b in blocks]
    rows.append(["all", sum(b.count for b in blocks), ours, dense, dense / ours])
    print(output.table(["weights", "count", "tensor-train", "dense", "ratio"], rows))
    return {"parameters": {OURS: ours, BASELINE: dense}, "ratio": dense / ours}


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(options.threads)
    if options.bookkeeping:
        ranks = {"linear": bookkeeping.LINEAR_RANK, "embedding": bookkeeping.EMBEDDING_RANK}
        name, result, specific = "bookkeeping", count(), dict[str, Any](rank=ranks)
    else:
        name, result = "transformer_step", measure_all(options) if options.measure == "all" else measure_part(options)
        shapes = {**asdict(Sizes()), "batch": options.batch}
        specific = {
            "dtype": "float32",
            "shapes": shapes,
            "rank": options.rank,
            "saved": options.saved,
            "rounds": result.pop("rounds", None),
        }
    raw = {"seconds": result.pop("raw_seconds", {})}
    if "floor" in result:
        step_table.show(result, specific["rounds"])
        if "time_over_saving_all" in result:
            print(f"time over that of saved='all': {result['time_over_saving_all']:.3g}")
    facts = output.conditions(malloc=process.malloc_settings(), **specific)
    output.emit({"name": name, "conditions": facts, **result}, raw=raw, json_file=options.json)


if __name__ == "__main__":
    chosen = parse()
    if (allocator := ALLOCATOR_OF[chosen.measure]) is not None and not chosen.bookkeeping:
        process.require_allocator(allocator)
    main(chosen)

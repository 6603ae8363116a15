"""Two runs side by side: at equal steps, at equal time, as a table and as one JSON object."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from code_lm.settings import Settings
from code_lm.training import Point, Run

BUSY = 0.1  # share of the processor that others may have before times cannot be compared


def bits_at(run: Run, x: float, axis: Callable[[Point], float]) -> float:
    """Held-out bits per byte at ``x`` steps or seconds: a straight line between the two nearest measured points."""
    xs = [axis(point) for point in run.points]
    right = min(bisect_left(xs, x), len(xs) - 1)
    left = max(right - 1, 0)
    if x >= xs[right] or left == right:
        return run.points[right].bits
    share = (x - xs[left]) / (xs[right] - xs[left])
    return run.points[left].bits + share * (run.points[right].bits - run.points[left].bits)


def equal(dense: Run, comera: Run, axis: Callable[[Run, Point], float]) -> dict[str, float]:
    """Both at the last place on ``axis`` that both reached."""
    at = min(axis(run, run.points[-1]) for run in (dense, comera))
    return {"at": at} | {run.side: bits_at(run, at, partial(axis, run)) for run in (dense, comera)}


def compare(dense: Run, comera: Run, settings: Settings) -> dict[str, Any]:
    """All figures; ratios above 1 are in favour of comera."""
    memory = dense.memory_mb / comera.memory_mb if dense.memory_mb and comera.memory_mb else None
    return {
        "name": "train_code_lm",
        "conditions": {**asdict(settings), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "speedup": {"comera": dense.step_ms / comera.step_ms},
        "memory_ratio": {"comera": memory},
        "parameter_ratio": {"comera": dense.parameters / comera.parameters},
        "others_share": {run.side: run.others_share for run in (dense, comera)},
        "compile_seconds": {run.side: run.compile_seconds for run in (dense, comera)},
        "steps": {run.side: run.points[-1].step for run in (dense, comera)},
        "bits_per_byte": {
            "equal_steps": equal(dense, comera, lambda _, point: point.step),
            "equal_time": equal(dense, comera, lambda _, point: point.seconds),
            "equal_time_with_compile": equal(dense, comera, lambda run, point: run.compile_seconds + point.seconds),
        },
    }


def table(dense: Run, comera: Run, result: dict[str, Any]) -> str:
    """The figures for a person."""

    def row(name: str, show: Callable[[Run], str], note: str = "") -> tuple[str, str, str, str]:
        return name, show(dense), show(comera), note

    fewer, less = times(result, "parameter_ratio", "fewer", "more"), times(result, "memory_ratio", "less", "more")
    bits = result["bits_per_byte"]
    with_compile = bits["equal_time_with_compile"]
    rows = [
        row("", lambda run: run.side),
        row("parameters", lambda run: f"{run.parameters / 1e6:.2f} M", fewer),
        row("memory of training", megabytes, less),
        row("compile time", lambda run: f"{run.compile_seconds:.0f} s"),
        row("time per step", lambda run: f"{run.step_ms:.0f} ms", times(result, "speedup", "faster", "slower")),
        row("steps taken", lambda run: str(run.points[-1].step)),
        row("held-out bits per byte, lower is better", lambda _: ""),
        (f"  after {bits['equal_steps']['at']} steps each", *gap(bits["equal_steps"])),
        (f"  after {bits['equal_time']['at']:.0f} s of steps each", *gap(bits["equal_time"])),
        (f"  after {with_compile['at']:.0f} s, compilation included", *gap(with_compile)),
    ]
    lines = [f"{a:40} {b:>10} {c:>10}   {d}".rstrip() for a, b, c, d in rows]
    return "\n".join([*lines, *busy_note(dense, comera)])


def busy_note(dense: Run, comera: Run) -> list[str]:
    """A warning where times are worth nothing, since other programs had too much of the processor."""
    share = max(run.others_share or 0.0 for run in (dense, comera))
    if share <= BUSY:
        return []
    return [
        f"NOTE other programs took up to {share:.0%} of the processor: trust no time above, run again when it is idle"
    ]


def megabytes(run: Run) -> str:
    return "unknown" if run.memory_mb is None else f"{run.memory_mb:.0f} MiB"


def times(result: dict[str, Any], name: str, above: str, below: str) -> str:
    ratio = result[name]["comera"]
    if ratio is None:
        return ""
    return f"{ratio:.1f} x {above}" if ratio >= 1 else f"{1 / ratio:.1f} x {below}"


def gap(bits: dict[str, float]) -> tuple[str, str, str]:
    difference = bits["dense"] - bits["comera"]
    word = "equal" if abs(difference) < 0.0005 else f"{abs(difference):.3f} {'better' if difference > 0 else 'worse'}"
    return f"{bits['dense']:.3f}", f"{bits['comera']:.3f}", word


def compare_rates(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """The best learning rate of each side, and how far apart the two are."""
    best = {side: min(tried, key=lambda run: run.points[-1].bits).lr for side, tried in runs.items()}
    return {
        "name": "train_code_lm_rates",
        "best": best,
        "ratio": best["comera"] / best["dense"],
        "bits_per_byte": {side: {f"{run.lr:g}": run.points[-1].bits for run in tried} for side, tried in runs.items()},
    }


def rate_table(result: dict[str, Any]) -> str:
    """Held-out bits per byte for each rate, the best of each side marked."""
    lines = [f"{'learning rate':14} {'dense':>9} {'comera':>9}"]
    for rate in result["bits_per_byte"]["dense"]:
        cells = [cell(result, side, rate) for side in ("dense", "comera")]
        lines.append(f"{rate:14} {cells[0]:>9} {cells[1]:>9}")
    return "\n".join(lines)


def cell(result: dict[str, Any], side: str, rate: str) -> str:
    mark = "*" if f"{result['best'][side]:g}" == rate else " "
    return f"{result['bits_per_byte'][side][rate]:.3f}{mark}"

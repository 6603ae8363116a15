"""The readable form of the linear cases, and their floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import floor, output
from benchmarks.linear_cases import DENSE, OURS, Case

HEAD = (
    *("case", "parameters", "speed-up", "25-75 %", "rounds", "default malloc"),
    *("dense ms", "ms", "floor ms", "dense/floor", "ours/floor", "processor"),
)
ASIDE = ("time_ratio_r30_over_r32", "time_ratio_r30_over_r32_range", "speedup_over", "tltorch", "not_measured")


def floors(result: Mapping[str, Any], cases: Sequence[Case], machine: floor.Machine) -> dict[str, Any]:
    """Rates measured here and, by case name, the least milliseconds of the dense layer and of ours at these rates."""
    lines: dict[str, Any] = {"gemm_gflops": machine.flops / 1e9, "stream_gb_s": machine.bytes / 1e9}
    for case in cases:
        least = {name: case.work(name) for name in (DENSE, OURS)}
        lines[case.name] = {
            "floor_ms": {name: 1e3 * work.seconds(machine) for name, work in least.items()},
            "gflop": {name: work.flops / 1e9 for name, work in least.items()},
            "gbyte": {name: work.bytes / 1e9 for name, work in least.items()},
        }
    return lines


def show(result: Mapping[str, Any]) -> None:
    """Print one row a case of ``linear_step.measure_default``'s result, then what does not fit into it."""
    print(output.table(HEAD, [_row(name, result) for name in result["speedup"]]))
    rates = result["floor"]
    gemm, stream = rates["gemm_gflops"], rates["stream_gb_s"]
    print(f"rates measured here: {gemm:.4g} GFLOP/s in a square product, {stream:.3g} GB/s in an addition in place")
    print("processor: share of the threads' time that was got while timing; much below 0.9: others ran too")
    for key in ASIDE:
        if key in result:
            print(f"{key}: {output.rounded(result[key])}")


def _row(name: str, result: Mapping[str, Any]) -> list[object]:
    low, high = result["speedup_range"][name]
    took, least = result["milliseconds"][name], result["floor"][name]["floor_ms"]
    return [
        name,
        result["parameters"][name][OURS],
        result["speedup"][name],
        f"{low:.3g}-{high:.3g}",
        result["rounds"][name],
        result["speedup_default_malloc"].get(name),
        took[DENSE],
        took[OURS],
        least[OURS],
        took[DENSE] / least[DENSE],
        took[OURS] / least[OURS],
        result["processor_share"][name],
    ]

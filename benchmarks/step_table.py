"""The readable form of a transformer step's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import memory, output

HEAD = (
    *("variant", "parameters", "speed-up", "25-75 %", "rounds", "default malloc"),
    *("peak MiB", "memory ratio", "ms", "floor ms", "GFLOP", "GB"),
)
ASIDE = ("compile_time", "compile_time_ratio", "against_galore", "not_measured")


def show(result: Mapping[str, Any], rounds: Mapping[str, int]) -> None:
    """Print one row a variant, then what does not fit into it.

    Args:
        result: what ``transformer_step.measure_all`` gives.
        rounds: kept of each variant.
    """
    print(output.table(HEAD, [_row(name, result, rounds[name]) for name in rounds]))
    rates = result["floor"]
    gemm, stream = rates["gemm_gflops"], rates["stream_gb_s"]
    print(f"rates measured here: {gemm:.4g} GFLOP/s in a square product, {stream:.3g} GB/s in an addition in place")
    share = result["processor_share"]
    print(
        f"processor time got while timing: {share:.0%} of what the threads could use; much below 90 %: others ran too"
    )
    for name, peak in result.get("memory", {}).items():
        residue, highest = peak["residue"] / memory.MIB, peak["peak"] / memory.MIB
        print(f"memory of {name}: {highest:.0f} MiB at the peak - {residue:.0f} MiB residue")
    for part in ASIDE:
        for name, value in result.get(part, {}).items():
            print(f"{part} {name}: {output.rounded(value)}")


def _row(name: str, result: Mapping[str, Any], rounds: int) -> list[object]:
    low, high = result["speedup_range"].get(name, (1.0, 1.0))
    peak = result.get("memory", {}).get(name)
    least = result["floor"].get(name, {})
    return [
        name,
        result["parameters"][name],
        result["speedup"].get(name, 1.0),
        f"{low:.3g}-{high:.3g}",
        rounds,
        result["speedup_default_malloc"].get(name),
        None if peak is None else round(peak["figure"] / memory.MIB),
        result.get("memory_ratio", {}).get(name),
        result["milliseconds"][name],
        *(least.get(key) for key in ("floor_ms", "gflop", "gbyte")),
    ]

"""The C++ products of many rows with a thin matrix, in the cache, on one thread: share of the processor's peak.

``python -m benchmarks.kernels`` measures ``narrow`` (x A^T), ``wide`` (h B) and ``outer`` (h^T dy, with dy B^T beside
it: the way back through ``wide``) at ranks that are whole vectors and ranks that are not. The peak is that of
multiply-adds in registers, measured in the same rounds. Operations that only fill up a rank are not counted.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import output, paired
from comera_compile.codegen.cpu import skinny_kernels
from comera_compile.cpp_library import load_library

MODULE = "benchmarks.kernels"
RANKS = (8, 12, 16, 24, 30, 32, 48, 64)
ROWS, SIZE = 96, 768  # 0.3 MB: the second cache holds it
PEAK, COUNT = "peak", 20_000
REPEATS = 8  # calls in one timed run: a call alone is some microseconds


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with what is right."""
    p = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    p.add_argument("--rounds", type=int, default=200)
    p.add_argument("--seconds", type=float, default=20.0, help="no further round is begun after this time")
    p.add_argument("--json", type=Path, help="file for the result with all raw rounds")
    options = p.parse_args(arguments)
    if options.rounds < 1:
        p.error("--rounds must be at least 1")
    return options


def peak() -> tuple[Callable[[], None], int]:
    """Multiply-adds in registers, and the floating-point operations of a run.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    folder = Path(skinny_kernels.__file__).parent
    library = load_library((folder / "gemm.h").read_text(), Path(__file__).with_name("peak.cpp").read_text())
    if library is None:
        raise RuntimeError("the peak is measured by C++, for which no compiler was found: install one (g++) or set CXX")
    library.multiply_adds.argtypes = [ctypes.c_int64, ctypes.c_float, ctypes.c_float]
    library.operations_a_count.restype = ctypes.c_int64

    def run() -> None:
        library.multiply_adds(COUNT, 0.5, 1.0)

    return run, COUNT * library.operations_a_count()


def products(rank: int) -> dict[str, tuple[Callable[[], None], int]]:
    """Each kernel at a rank, called as the operators call it, and the floating-point operations of a run."""
    library = load_library(*skinny_kernels.sources(torch.float32))
    x, half, h = torch.randn(ROWS, SIZE), torch.randn(rank, SIZE), torch.randn(ROWS, rank)
    y, dh, dhalf = torch.empty(ROWS, SIZE), torch.empty(ROWS, rank), torch.empty(rank, SIZE)
    if library is None or not skinny_kernels.available(x, rank):
        raise RuntimeError("there is no C++ compiler: install one (g++) or set CXX to one")
    sizes = ROWS, SIZE, rank

    def repeated(function: Callable[..., None], *tensors: torch.Tensor | None) -> Callable[[], None]:
        arguments = *sizes, *(None if t is None else t.data_ptr() for t in tensors), 1

        def run() -> None:
            for _ in range(REPEATS):
                function(*arguments)

        run.tensors = tensors  # type: ignore[attr-defined]  # they must outlive the pointers
        return run

    flops = REPEATS * 2 * ROWS * SIZE * rank
    return {
        f"narrow_r{rank}": (repeated(library.narrow, x, half, dh), flops),
        f"wide_r{rank}": (repeated(library.wide, h, half, None, y), flops),
        f"outer_r{rank}": (repeated(library.wide_backward, h, x, half, dh, dhalf, None), 2 * flops),
    }


def measure(ranks: Sequence[int], *, rounds: int, seconds: float) -> dict[str, Any]:
    """Rates of every kernel beside the peak, all taking turns.

    Returns:
        ``peak_gflops``, ``share_of_peak`` by ``<kernel>_r<rank>``, ``min_share_of_peak``, ``over_next_vector``: time at
        a rank that is not whole vectors over time at the next one that is, at most 1 is right; ``raw_seconds``.
    """
    runs = {PEAK: peak()} | {name: run for rank in ranks for name, run in products(rank).items()}
    timing = paired.measure({name: run for name, (run, _) in runs.items()}, rounds=rounds, seconds=seconds)
    rates = {name: flops / timing.median(name) for name, (_, flops) in runs.items()}
    shares = {name: rate / rates[PEAK] for name, rate in rates.items() if name != PEAK}
    uneven = [(rank, -(-rank // 8) * 8) for rank in ranks if rank % 8 and -(-rank // 8) * 8 in ranks]
    over = {
        f"{kernel}_r{rank}": timing.median(f"{kernel}_r{rank}") / timing.median(f"{kernel}_r{whole}")
        for kernel in ("narrow", "wide", "outer")
        for rank, whole in uneven
    }
    return {
        "peak_gflops": 1e-9 * rates[PEAK],
        "share_of_peak": shares,
        "min_share_of_peak": min(shares.values()),
        "over_next_vector": over,
        "rounds": timing.rounds,
        "raw_seconds": dict(timing.seconds),
    }


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    result = measure(RANKS, rounds=options.rounds, seconds=options.seconds)
    raw = {"seconds": result.pop("raw_seconds")}
    rows = [(name, share, share * result["peak_gflops"]) for name, share in result["share_of_peak"].items()]
    print(output.table(("kernel", "share of peak", "GFLOP/s"), rows))
    facts = output.conditions(dtype="float32", rows=ROWS, size=SIZE)
    output.emit({"name": "kernels", "conditions": facts, **result}, raw=raw, json_file=options.json)


if __name__ == "__main__":
    main(parse())

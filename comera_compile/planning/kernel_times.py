"""How long this package's own operators take on a CPU: merging cores, and rows through two merged halves."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A tile of such a product keeps the bond in registers; far beyond this the blocking for square products is better.
MOST_BOND = 128
ITEMSIZES = (4, 8)
Rates = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class KernelTimes:
    """Figures of the operators in ``codegen/cpu``.

    Args:
        call_seconds: of one call, however little it does.
        forward, backward: (bond, FLOPs per second) of rows through both halves, ascending; in between they are
            interpolated, beyond they stay.
        merge: (rank at the bond, FLOPs per second) of merging the cores of one layer, and of its gradients.

    Raises:
        ValueError: a figure is not positive, or bonds do not ascend.
    """

    call_seconds: float
    forward: Rates
    backward: Rates
    merge: Rates

    def __post_init__(self) -> None:
        tables = self.forward, self.backward, self.merge
        figures = [self.call_seconds, *(rate for rates in tables for _, rate in rates)]
        bonds = [[bond for bond, _ in rates] for rates in tables]
        if not all(math.isfinite(f) and f > 0 for f in figures) or any(b != sorted(set(b)) or not b for b in bonds):
            raise ValueError(f"rates must be positive and bonds ascend, got {self}")

    def takes(self, bond: int, itemsize: int) -> bool:
        """Whether there is an operator for a merged plan of this bond and dtype."""
        return bond <= MOST_BOND and itemsize in ITEMSIZES

    def apply_seconds(self, rows: int, inputs: int, outputs: int, bond: int, *, training: bool) -> float:
        """Time of ``rows`` rows through both halves; with ``training`` also of every gradient. No less than a call."""
        products = 2 * rows * bond * (inputs + outputs)
        seconds = 2 * self.call_seconds + products / _between(self.forward, bond)
        return seconds + self.call_seconds + 2 * products / _between(self.backward, bond) if training else seconds

    def merge_seconds(self, flops: int, rank: int, *, training: bool) -> float:
        """Time of merging that takes so many FLOPs in all, gradients included with ``training``."""
        return (1 + training) * self.call_seconds + flops / _between(self.merge, rank)

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal one."""
        return {
            "call_seconds": self.call_seconds,
            "forward": self.forward,
            "backward": self.backward,
            "merge": self.merge,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> KernelTimes:
        """Inverse of :meth:`to_json`; raises as other readers of JSON do where ``value`` is none of these."""
        tables = (tuple((int(b), float(r)) for b, r in value[name]) for name in ("forward", "backward", "merge"))
        return KernelTimes(float(value["call_seconds"]), *tables)


def _between(rates: Rates, bond: int) -> float:
    at = bisect_right(rates, (bond, math.inf))
    if at in (0, len(rates)):
        return rates[min(at, len(rates) - 1)][1]
    (low, slow), (high, fast) = rates[at - 1], rates[at]
    return slow + (fast - slow) * (bond - low) / (high - low)


def shipped_kernel_times(threads: int) -> KernelTimes:
    """Shipped figures: x86-64 cores with AVX2."""
    forward, backward = (
        tuple((bond, threads * gflops * 1e9) for bond, gflops in rates)
        for rates in (((8, 55), (16, 73), (32, 80), (128, 80)), ((8, 50), (16, 66), (32, 70), (128, 70)))
    )
    return KernelTimes(9e-6, forward, backward, ((32, 3e10 * min(threads, 2)),))

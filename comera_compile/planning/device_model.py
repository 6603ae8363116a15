"""How long a matrix product or a copy takes on one device.

Either from a table of measured times (``calibrate.py`` makes it), interpolated between the sizes that were measured, or
from a few figures where nothing was measured: then a product takes max(launch floor, FLOPs / rate, bytes / bandwidth),
with a rate that falls for narrow products.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from comera_compile.planning.kernel_times import KernelTimes, shipped_kernel_times

# How the two operands of a product lie in memory: n row by row, t transposed. Both transposed is rare: as far above
# "tn" as "nt" is above "nn".
FORMS = ("nn", "nt", "tn")
# What a copy does: the last axis stays last (runs of memory stay whole), it moves, or it moves and the rows with it.
COPY_KINDS = ("runs", "elements", "rows")
CopyTimes = tuple[tuple[float, float], ...]
# Larger operands do not stay in a cache between two steps.
_CACHED_BYTES = 1 << 24
_FIGURES = ("flops_per_second", "bytes_per_second", "launch_seconds", "batch_seconds", "half_rate_size")
_MOST_PLACES = 1 << 16


@dataclass(frozen=True)
class ProductTimes:
    """Times of products ``(m x k) . (k x n)`` over a grid, for one form of the operands.

    Args:
        sizes: what each of m, n and k takes: ascending, from 1, at least two.
        log_seconds: log2 of the seconds of each product, k fastest, then n.

    Raises:
        ValueError: the grid is none, or the number of times is not the cube of the number of sizes.
    """

    sizes: tuple[int, ...]
    log_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or self.sizes[0] != 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes must ascend from 1, got {self.sizes}")
        if len(self.log_seconds) != len(self.sizes) ** 3 or not all(map(math.isfinite, self.log_seconds)):
            raise ValueError(f"expected {len(self.sizes) ** 3} finite times, got {len(self.log_seconds)}")

    def seconds(self, m: int, n: int, k: int) -> float:
        """Time of one product; all sizes at least 1. Beyond the grid the rate stays that of its edge."""
        places = self._places
        # Straight-line code: a search asks for thousands of products.
        i, f, over_m = places.get(m) or self._place(m)
        j, g, over_n = places.get(n) or self._place(n)
        l, h, over_k = places.get(k) or self._place(k)  # noqa: E741
        t, c = self.log_seconds, len(self.sizes)
        a = (i * c + j) * c + l
        b, d, e = a + c, a + c * c, a + c * c + c
        near = t[a] + h * (t[a + 1] - t[a])
        near += g * (t[b] + h * (t[b + 1] - t[b]) - near)
        far = t[d] + h * (t[d + 1] - t[d])
        far += g * (t[e] + h * (t[e + 1] - t[e]) - far)
        return float(2.0 ** (near + f * (far - near) + over_m + over_n + over_k))

    @cached_property
    def _places(self) -> dict[int, tuple[int, float, float]]:
        return {}

    def _place(self, size: int) -> tuple[int, float, float]:
        """Grid cell below a size, how far into it (in log space), and how far beyond the last."""
        cell = min(bisect_right(self.sizes, size), len(self.sizes) - 1) - 1
        low, high = self.sizes[cell], self.sizes[cell + 1]
        inside = min(1.0, math.log2(size / low) / math.log2(high / low))
        place = cell, inside, max(0.0, math.log2(size / self.sizes[-1]))
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        self._places[size] = place
        return place


@dataclass(frozen=True)
class DeviceModel:
    """Figures of one device that turn sizes into seconds.

    Args:
        flops_per_second: peak rate of a large matrix product.
        bytes_per_second: memory bandwidth of streaming reads and writes.
        launch_seconds: floor of one operation (dispatch on a CPU, kernel launch on a GPU).
        batch_seconds: extra time of each matrix of a batched product, where it was not measured.
        half_rate_size: a product whose smallest dimension has this size runs at half the peak, where not measured.
        copy_launch_seconds: floor of a copy, where it was not measured.
        copy_factors: how many times as long as streaming twice its bytes a copy of each of ``COPY_KINDS`` takes, where
            it was not measured.
        copies: measured (bytes of a tensor, seconds of its copy), ascending, for each of ``COPY_KINDS``; or none.
        products: measured times of one product, a table for each of ``FORMS``; or none.
        batched: the same for each matrix of a batched product, its launch apart.
        kernels: figures of this package's own operators, or None where they do not run.
        source: where the figures are from; plays no part in comparisons.
    """

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    batch_seconds: float
    half_rate_size: float
    copy_launch_seconds: float = 0.0
    copy_factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    copies: tuple[CopyTimes, ...] = ()
    products: tuple[ProductTimes, ...] = ()
    batched: tuple[ProductTimes, ...] = ()
    kernels: KernelTimes | None = None
    source: str = field(default="shipped figures", compare=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Taken once: models key caches and hold thousands of times.
        return hash(tuple(getattr(self, f.name) for f in fields(self) if f.compare))

    def product_seconds(
        self,
        batch: int,
        m: int,
        n: int,
        k: int,
        itemsize: int,
        left_transposed: bool = False,
        right_transposed: bool = False,
    ) -> float:
        """Time of ``batch`` products ``(m x k) . (k x n)`` as one mm (``batch`` 1) or bmm.

        Args:
            batch, m, n, k: sizes; with a 0 among them only the launch is paid.
            itemsize: bytes of an element.
            left_transposed, right_transposed: the operand lies in memory as ``(k x m)``, ``(n x k)``.
        """
        if not (batch and m and n and k):
            return self.launch_seconds
        if not self.products:
            return self._by_figures(batch, m, n, k, itemsize)
        tables = self.products if batch == 1 else self.batched
        if left_transposed and right_transposed:
            plain, right, left = (table.seconds(m, n, k) for table in tables)
            seconds = left * right / plain
        else:
            seconds = tables[2 * left_transposed + right_transposed].seconds(m, n, k)
        seconds = seconds if batch == 1 else self.launch_seconds + batch * seconds
        streamed = itemsize * batch * (m * k + k * n + m * n)
        if streamed <= _CACHED_BYTES or max(m, n, k) <= tables[0].sizes[-1]:
            return seconds
        # The edge of the grid may lie in the cache where this product does not.
        return max(seconds, streamed / self.bytes_per_second)

    def copy_seconds(self, nbytes: int, kind: int = 1) -> float:
        """Time to copy a tensor of ``nbytes`` bytes into another axis order: each is read once and written once.

        ``kind`` is a position in ``COPY_KINDS``.
        """
        if not self.copies:
            return max(self.copy_launch_seconds, self.copy_factors[kind] * 2 * nbytes / self.bytes_per_second)
        cells = self._log_copies[kind]
        if nbytes <= self.copies[kind][0][0]:
            return self.copies[kind][0][1]
        at = math.log2(nbytes)
        cell = min(bisect_right(cells, (at, math.inf)), len(cells) - 1)
        (x0, y0), (x1, y1) = cells[cell - 1], cells[cell]
        inside = min(at, x1)
        return float(2.0 ** (y0 + (y1 - y0) * (inside - x0) / (x1 - x0) + at - inside))

    @cached_property
    def _log_copies(self) -> list[list[tuple[float, float]]]:
        return [[(math.log2(size), math.log2(seconds)) for size, seconds in times] for times in self.copies]

    def _by_figures(self, batch: int, m: int, n: int, k: int, itemsize: int) -> float:
        narrow = min(m, n, k)
        rate = self.flops_per_second * narrow / (narrow + self.half_rate_size)
        streamed = itemsize * batch * (m * k + k * n + m * n)
        busy = max(self.launch_seconds, 2 * batch * m * n * k / rate, streamed / self.bytes_per_second)
        return busy + (batch * self.batch_seconds if batch > 1 else 0.0)

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal model."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        tables = {n: [[t.sizes, t.log_seconds] for t in plain[n]] for n in ("products", "batched")}
        return {**plain, **tables, "kernels": self.kernels and self.kernels.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DeviceModel:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: the object is not a model.
        """
        try:
            return _from_json(value)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not a device model: {error!r}") from None


def _from_json(value: Mapping[str, Any]) -> DeviceModel:
    figures = {name: float(value[name]) for name in _FIGURES}
    copies = tuple(tuple((float(size), float(seconds)) for size, seconds in times) for times in value["copies"])
    products, batched = (
        tuple(ProductTimes(tuple(map(int, sizes)), tuple(map(float, times))) for sizes, times in value[name])
        for name in ("products", "batched")
    )
    if any(not f >= 0 for f in figures.values()) or not all(figures[name] for name in _FIGURES[:2]):
        raise ValueError(f"not a device model: rates must be positive, got {figures}")
    for times in copies:
        if len(times) < 2 or list(times) != sorted(set(times)) or any(min(pair) <= 0 for pair in times):
            raise ValueError(f"not a device model: sizes of copies must ascend, got {times}")
    lengths = len(copies), len(products), len(batched)
    if lengths not in ((0, 0, 0), (len(COPY_KINDS), len(FORMS), len(FORMS))):
        raise ValueError(f"not a device model: expected 3 tables of copies, products and batches, got {lengths}")
    runs, elements, rows = map(float, value["copy_factors"])
    return DeviceModel(
        **figures,
        copy_launch_seconds=float(value["copy_launch_seconds"]),
        copy_factors=(runs, elements, rows),
        copies=copies,
        products=products,
        batched=batched,
        kernels=None if value["kernels"] is None else KernelTimes.from_json(value["kernels"]),
        source=str(value["source"]),
    )


# Shipped figures, measured on server processors: one x86-64 core with AVX2 reaches 70-85 GFLOP/s in MKL and two cores
# stream 15-30 GB/s; the GPU row is an H100-class part in fp32 with tf32 off. They only have to order plans rightly.
_CPU_CORE_FLOPS = 7e10
CUDA_MODEL = DeviceModel(4e13, 2.5e12, 5e-6, 5e-9, 24.0)


def cpu_model(threads: int) -> DeviceModel:
    """Shipped figures for a CPU with that many threads."""
    kernels = shipped_kernel_times(threads)
    return DeviceModel(_CPU_CORE_FLOPS * threads, 2.5e10, 4e-6, 3e-7, 12.0, kernels=kernels)


def shipped_model(device_type: str, threads: int) -> DeviceModel:
    """Shipped figures of a kind of device; ``threads`` matter on a CPU only."""
    return CUDA_MODEL if device_type == "cuda" else cpu_model(threads)

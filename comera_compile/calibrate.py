"""Measure this device once, keep the figures on disk, and give the planner the model that fits what will run.

Nothing is ever measured unless :func:`calibrate` is called (``comera calibrate`` on the command line). A calibration
holds for one device, torch version, number of threads and dtype; where there is none the shipped figures do.
"""

from __future__ import annotations

import logging
import math
import os
import platform
from functools import cache, lru_cache
from pathlib import Path

import torch

from comera_compile import user_cache
from comera_compile.device_timing import (
    BATCH,
    BATCHED_SIZES,
    COPIES,
    ORDERS,
    SIZES,
    STREAM,
    Copy,
    Kernel,
    Operands,
    Product,
    Timings,
    Wrapper,
    fill,
    largest_product,
    measure,
    product_grid,
)
from comera_compile.errors import CalibrationError, OptionError
from comera_compile.kernel_timing import kernel_runs, kernel_times
from comera_compile.planning.device_model import FORMS, DeviceModel, ProductTimes, shipped_model

_log = logging.getLogger("comera_compile")

VERSION = 2  # of what is measured and how it is stored
LARGEST_SPREAD, SMALLEST_SHARE = 0.25, 0.85
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CAPACITY = 1 << 24  # elements of each operand


def calibrate(
    device: str = "cpu", threads: int | None = None, dtype: torch.dtype = torch.float32, seconds: float = 20.0
) -> DeviceModel:
    """Measure products and copies on a device, store the figures for later processes and return them.

    Args:
        device: ``"cpu"`` or ``"cuda"`` (its current device).
        threads: threads of the CPU; None: those that torch uses now.
        dtype: of the operands.
        seconds: about how long to measure, 1 to 30; a slow device may take longer, since each product is timed three
            times at least.

    Raises:
        OptionError: an argument is impossible, or there is no such device.
        CalibrationError: the times of equal products differ too much: other programs run on this machine.
    """
    check_device(device, threads, dtype)
    _check_seconds(seconds)
    threads = threads or torch.get_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model, timings = _measure(device, dtype, seconds)
    finally:
        torch.set_num_threads(before)
    if timings.spread > LARGEST_SPREAD or timings.share < SMALLEST_SHARE:
        raise CalibrationError(
            f"calibration of {device} with {threads} threads refused: times of equal products spread by "
            f"{timings.spread:.0%} (quartiles over median; at most {LARGEST_SPREAD:.0%} can be used), large products "
            f"got {timings.share:.0%} of the time of their threads (at least {SMALLEST_SHARE:.0%}). Other programs are "
            "running, or there are more threads than free cores: stop them or pass fewer threads, then calibrate again"
        )
    user_cache.store("calibration", calibration_key(device, threads, dtype), model.to_json())
    calibrated_model.cache_clear()
    return model


@lru_cache(maxsize=64)
def calibrated_model(device_type: str, threads: int, dtype: torch.dtype) -> DeviceModel:
    """The stored calibration of this device, or the shipped figures where there is none. Looked up once a process."""
    key = calibration_key(device_type, threads, dtype)
    stored = user_cache.load("calibration", key)
    if stored is None:
        return shipped_model(device_type, threads)
    try:
        return DeviceModel.from_json(stored)
    except ValueError as error:
        _log.warning("comera: the stored calibration %r is ignored (%s): calibrate again", key, error)
        return shipped_model(device_type, threads)


def calibration_key(device_type: str, threads: int, dtype: torch.dtype) -> str:
    """What a calibration holds for, as the key of its entry."""
    return f"v{VERSION} | {device_text(device_type, threads, dtype)}"


def device_text(device_type: str, threads: int, dtype: torch.dtype) -> str:
    """What a measurement depends on, in words: device, threads of a CPU, torch version and dtype."""
    on = f"{device_name(device_type)}, {threads} threads" if device_type == "cpu" else device_name(device_type)
    return f"{device_type} {on} | torch {torch.__version__} | {str(dtype).removeprefix('torch.')}"


def device_name(device_type: str) -> str:
    """Name of the processor and its vector instructions, or of the GPU."""
    if device_type == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return _processor()


@cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"


def check_device(device: str, threads: int | None, dtype: torch.dtype) -> None:
    """Refuse a device that is not there, and threads and dtypes that it cannot be measured with.

    Raises:
        OptionError: says which.
    """
    if device not in ("cpu", "cuda"):
        raise OptionError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("device 'cuda' was asked for, but torch finds no CUDA device here: use 'cpu'")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise OptionError(f"threads must be an int of at least 1, got {threads!r}")
    if threads is not None and threads > (os.cpu_count() or threads):
        raise OptionError(f"threads must be at most the {os.cpu_count()} processors of this machine, got {threads}")
    if dtype not in DTYPES.values():
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def _check_seconds(seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds <= 30:
        raise OptionError(f"seconds must be a number from 1 to 30, got {seconds!r}")


def _measure(device: str, dtype: torch.dtype, seconds: float) -> tuple[DeviceModel, Timings]:
    synchronize = torch.cuda.synchronize if device == "cuda" else _nothing
    with torch.inference_mode():
        operands = Operands(device, dtype, _CAPACITY)
        runs = kernel_runs(dtype) if device == "cpu" else {}
        runs |= {t: operands.run(t) for t in _grid(largest_product(operands, synchronize))}
        timings = measure(runs, seconds, synchronize, torch.get_num_threads() if device == "cpu" else 0)
    threads = f" with {torch.get_num_threads()} threads" if device == "cpu" else ""
    source = f"calibrated on {device_name(device)}{threads}, torch {torch.__version__}"
    return _model(timings, dtype.itemsize, f"{source}; spread {timings.spread:.1%} in {timings.rounds} rounds"), timings


def _nothing() -> None:
    """A CPU is done when its call returns."""


def _grid(largest: float) -> list[Product | Copy | Wrapper]:
    single, batched = product_grid(SIZES, largest), product_grid(BATCHED_SIZES, largest / (4 * BATCH))
    products = [Product(0, form, *p) for p in single for form in FORMS]
    products += [Product(BATCH, form, *p) for p in batched for form in FORMS]
    copies = [Copy(numel, order) for numel in COPIES for order in ORDERS]
    # Short ones first: after a copy that empties the caches they would take longer.
    return [Wrapper(), *products, *copies, Copy(COPIES[-1], STREAM)]


def _model(timings: Timings, itemsize: int, source: str) -> DeviceModel:
    """Times as measured, and with each operation what generated code does around it."""
    median, wrapper = timings.median, timings.median[Wrapper()]
    launch = min(median[Product(0, form, 1, 1, 1)] for form in FORMS)
    products = {t: s for t, s in median.items() if isinstance(t, Product)}
    single = {t: s + wrapper for t, s in products.items() if not t.batch}
    batched = {t: _matrix_seconds(s, launch) for t, s in products.items() if t.batch}
    return DeviceModel(
        flops_per_second=max(2 * t.m * t.n * t.k / s for t, s in single.items()),
        bytes_per_second=2 * COPIES[-1] * itemsize / median[Copy(COPIES[-1], STREAM)],
        launch_seconds=launch + wrapper,
        batch_seconds=batched[Product(BATCH, "nn", 1, 1, 1)],
        half_rate_size=0.0,
        copies=tuple(
            tuple((float(n * itemsize), median[Copy(n, order)] + wrapper) for n in COPIES) for order in ORDERS
        ),
        products=_tables(single, SIZES),
        batched=_tables(batched, BATCHED_SIZES),
        kernels=kernel_times({t: s for t, s in median.items() if isinstance(t, Kernel)}),
        source=source,
    )


def _matrix_seconds(seconds: float, launch: float) -> float:
    """Time of each matrix of a batch, the launch apart. Of very small ones that is lost in the noise of the launch."""
    return max(seconds - launch, 0.05 * seconds) / BATCH


def _tables(products: dict[Product, float], sizes: tuple[int, ...]) -> tuple[ProductTimes, ...]:
    """A table for each form."""
    tables = []
    for form in FORMS:
        times = {(t.m, t.n, t.k): s for t, s in products.items() if t.form == form}
        tables.append(ProductTimes(sizes, tuple(round(math.log2(s), 4) for s in fill(times, sizes))))
    return tuple(tables)

"""Lookup of a tensor-train-matrix table in C++, forward and backward, where there is a kernel for it.

Both functions return None where there is none (another device or dtype, order 1, no compiler): the caller then goes on
with torch's own operators.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comera_compile.cpp_library import load_library
from comera_compile.tt.shape import TTShape

SOURCES = (
    "gemm.h",
    "transpose.h",
    "lookup_index.h",
    "lookup_recent.h",
    "lookup_parts.h",
    "lookup_work.h",
    "lookup_forward.h",
    "lookup_rows.h",
    "lookup_backward.h",
    "lookup.cpp",
)
ELEMENTS = {torch.float32: "float", torch.float64: "double"}
ORDERS = range(2, 9)
DONE, OUT_OF_RANGE = 0, 1
# Multiplications that are worth another thread; elements that the sums of all threads may take (128 MiB of floats).
LEAST_WORK, MOST_SUMS = 300_000, 1 << 25


def lookup(packed: Tensor, ids: Tensor, shape: TTShape) -> Tensor | None:
    """Rows ``ids`` of the table, ``[*ids.shape, cols]``.

    Args:
        packed: ``(shape.numel,)`` stored cores.
        ids: int32 or int64, any shape, at least one.
        shape: what the cores mean.

    Raises:
        IndexError: an id is negative or not below the number of rows. Nothing is written then.
    """
    if not applies(packed, ids, shape):
        return None
    rows = packed.new_empty([*ids.shape, shape.cols])
    return rows if _call("ttm_lookup", packed, ids, shape, rows) else None


def gradient(packed: Tensor, ids: Tensor, grad: Tensor, shape: TTShape) -> Tensor | None:
    """Gradient of the packed vector from that of the rows, ``[*ids.shape, cols]``; the rest as in :func:`lookup`."""
    if not applies(packed, ids, shape) or grad.dtype != packed.dtype:
        return None
    total = torch.empty_like(packed, memory_format=torch.contiguous_format)
    return total if _call("ttm_lookup_backward", packed, ids, shape, grad.contiguous(), total) else None


def applies(packed: Tensor, ids: Tensor, shape: TTShape) -> bool:
    """Whether there is a kernel; builds it when it is first asked for."""
    known = packed.dtype in ELEMENTS and ids.dtype in (torch.int32, torch.int64) and len(shape.row_modes) in ORDERS
    here = packed.device.type == "cpu" and ids.device.type == "cpu" and shape.format == "ttm"
    return known and here and _library_for(packed.dtype, shape) is not None


def sources(dtype: torch.dtype, shape: TTShape) -> tuple[str, ...]:
    """Texts of the library for a dtype, a key of ``ELEMENTS``, and a table.

    It is made for rows of the last core of up to so many columns, a power of two: that decides which vectors it uses.
    """
    folder, columns = Path(__file__).parent, min(16, 1 << (shape.col_modes[-1] - 1).bit_length())
    head = f"#define ELEMENT {ELEMENTS[dtype]}", f"#define LAST_COLUMNS {columns}"
    return *head, *((folder / name).read_text() for name in SOURCES)


@cache
def _library(*sources: str) -> ctypes.CDLL | None:
    library = load_library(*sources)
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        # shape, scale, cores, ids, their size and count; then, behind the tensors, threads, two limits, a wrong id
        head: list[Any] = [pointer, ctypes.c_double, pointer, pointer, number, number]
        tail: list[Any] = [number, number, number, pointer]
        library.ttm_lookup.argtypes = [*head, pointer, *tail]
        library.ttm_lookup_backward.argtypes = [*head, pointer, pointer, *tail]
        library.ttm_lookup.restype = library.ttm_lookup_backward.restype = number
    return library


@lru_cache(maxsize=4096)
def _library_for(dtype: torch.dtype, shape: TTShape) -> ctypes.CDLL | None:
    return _library(*sources(dtype, shape))


@lru_cache(maxsize=4096)
def _words(shape: TTShape) -> ctypes.Array[ctypes.c_int64]:
    values = [len(shape.row_modes), shape.rows, shape.cols, shape.zero_row]
    values += [*shape.row_modes, *shape.col_modes, *shape.ranks]
    return (ctypes.c_int64 * len(values))(*values)


def _call(name: str, packed: Tensor, ids: Tensor, shape: TTShape, *tensors: Tensor) -> bool:
    """Whether it was done; not, if it would take too much memory."""
    ids, packed = ids.contiguous(), packed.contiguous()
    wrong = ctypes.c_int64()
    status = getattr(_library_for(packed.dtype, shape), name)(
        _words(shape),
        shape.scale,
        packed.data_ptr(),
        ids.data_ptr(),
        ids.element_size(),
        ids.numel(),
        *(tensor.data_ptr() for tensor in tensors),
        torch.get_num_threads(),
        LEAST_WORK,
        MOST_SUMS,
        ctypes.byref(wrong),
    )
    if status == OUT_OF_RANGE:
        raise IndexError(f"index out of range in embedding: expected 0 to {shape.rows - 1}, got {wrong.value}")
    return bool(status == DONE)

"""Rows through a tensor-train weight whose halves are merged, as operators of C++: forward one for each half, and one
for all gradients.

The two forward operators are apart so that the wide tensor can be made again from the bond between them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from comera_compile.cpp_library import load_library
from comera_compile.planning.kernel_times import MOST_BOND

ELEMENTS = {torch.float32: "float", torch.float64: "double"}
SOURCES = ("gemm.h", "skinny_parts.h", "skinny.cpp")

# How many sizes and how many tensors a function of the library takes, before the number of threads.
_ARGUMENTS = {
    "narrow": (3, 3),
    "wide": (3, 4),
    "narrow_backward": (3, 5),
    "wide_backward": (3, 6),
    "backward": (4, 9),
}

_operators = torch.library.Library("comera", "FRAGMENT")
_operators.define("narrow(Tensor x, Tensor half) -> Tensor")
_operators.define("wide(Tensor h, Tensor half, Tensor? bias) -> Tensor")
_operators.define(
    "skinny_backward(Tensor x, Tensor h, Tensor grad, Tensor? first, Tensor second, bool needs_bias)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_operators.define("narrow_backward(Tensor x, Tensor grad, Tensor? half) -> (Tensor, Tensor)")
_operators.define("wide_backward(Tensor h, Tensor grad, Tensor half, bool needs_bias) -> (Tensor, Tensor, Tensor)")


def available(x: Tensor, bond: int) -> bool:
    """Whether the operators take these rows: on the CPU, of a dtype they know, a bond that is narrow, a library."""
    return takes(x, bond) and _library(x.dtype) is not None


def takes(x: Tensor, bond: int) -> bool:
    """The same, but for the library."""
    return x.device.type == "cpu" and x.dtype in ELEMENTS and 0 < bond <= MOST_BOND


def narrow(x: Tensor, half: Tensor) -> Tensor:
    """``x half^T``: ``[rows, size]`` and ``[bond, size]`` to ``[rows, bond]``."""
    made: Tensor = torch.ops.comera.narrow.default(x, half)
    return made


def wide(h: Tensor, half: Tensor, bias: Tensor | None) -> Tensor:
    """``h half + bias``: ``[rows, bond]``, ``[bond, size]`` and ``[size]`` to ``[rows, size]``."""
    made: Tensor = torch.ops.comera.wide.default(h, half, bias)
    return made


def backward(
    x: Tensor, h: Tensor, grad: Tensor, first: Tensor | None, second: Tensor, *, needs_bias: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of x, both halves and the bias of ``wide(narrow(x, first), second, bias)``, from that of its result.

    Args:
        x: ``[rows, inputs]``.
        h: ``[rows, bond]``, what ``narrow`` gave.
        grad: ``[rows, outputs]``.
        first: ``[bond, inputs]``, or None where x needs no gradient: nothing else is made from it.
        second: ``[bond, outputs]``.
        needs_bias: whether the gradient of the bias is taken.

    Returns:
        Those of x (None without ``first``), of the first half, the second half and the bias (None unless needed).
    """
    made = torch.ops.comera.skinny_backward.default(x, h, grad, first, second, needs_bias)
    return None if first is None else made[0], made[1], made[2], made[3] if needs_bias else None


def narrow_backward(x: Tensor, grad: Tensor, half: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Gradients of x (None without ``half``) and of the half of ``narrow(x, half)``, from that of its result.

    Args:
        x: ``[rows, size]``.
        grad: ``[rows, bond]``.
        half: ``[bond, size]``, or None where x needs no gradient: nothing else is made from it.
    """
    dx, d_half = torch.ops.comera.narrow_backward.default(x, grad, half)
    return None if half is None else dx, d_half


def wide_backward(h: Tensor, grad: Tensor, half: Tensor, *, needs_bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of h, the half and the bias (None unless needed) of ``wide(h, half, bias)``, from that of its result.

    Args:
        h: ``[rows, bond]``.
        grad: ``[rows, size]``.
        half: ``[bond, size]``.
        needs_bias: whether the gradient of the bias is taken.
    """
    dh, d_half, d_bias = torch.ops.comera.wide_backward.default(h, grad, half, needs_bias)
    return dh, d_half, d_bias if needs_bias else None


def sources(dtype: torch.dtype) -> tuple[str, ...]:
    """Texts of the library for one dtype, a key of ``ELEMENTS``."""
    folder = Path(__file__).parent
    return f"#define ELEMENT {ELEMENTS[dtype]}", *((folder / name).read_text() for name in SOURCES)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    library = load_library(*sources(dtype))
    if library is not None:
        for name, (sizes, tensors) in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = [*[ctypes.c_int64] * sizes, *[ctypes.c_void_p] * tensors, ctypes.c_int64]
            function.restype = None
    return library


def _call(name: str, dtype: torch.dtype, sizes: tuple[int, ...], *tensors: Tensor | None) -> None:
    library = _library(dtype)
    assert library is not None, f"{name} was called without a library"
    places = [None if t is None else t.data_ptr() for t in tensors]
    getattr(library, name)(*sizes, *places, torch.get_num_threads())


@torch.library.impl(_operators, "narrow", "CPU")
def _narrow(x: Tensor, half: Tensor) -> Tensor:
    bond, size = half.shape
    h = x.new_empty(x.shape[0], bond)
    _call("narrow", x.dtype, (x.shape[0], size, bond), x.contiguous(), half.contiguous(), h)
    return h


@torch.library.impl(_operators, "wide", "CPU")
def _wide(h: Tensor, half: Tensor, bias: Tensor | None) -> Tensor:
    bond, size = half.shape
    y = h.new_empty(h.shape[0], size)
    bias = None if bias is None else bias.contiguous()
    _call("wide", h.dtype, (h.shape[0], size, bond), h.contiguous(), half.contiguous(), bias, y)
    return y


@torch.library.impl(_operators, "skinny_backward", "CPU")
def _backward(
    x: Tensor, h: Tensor, grad: Tensor, first: Tensor | None, second: Tensor, needs_bias: bool
) -> tuple[Tensor, ...]:
    rows, bond = h.shape
    inputs, outputs = x.shape[1], second.shape[1]
    dx = x.new_empty(0 if first is None else (rows, inputs))
    d_first, d_second = x.new_empty((bond, inputs)), x.new_empty((bond, outputs))
    d_bias = x.new_empty(outputs if needs_bias else 0)
    half = None if first is None else first.contiguous()
    read = x.contiguous(), h.contiguous(), grad.contiguous(), half, second.contiguous()
    written = None if first is None else dx, d_first, d_second, d_bias if needs_bias else None
    _call("backward", x.dtype, (rows, inputs, outputs, bond), *read, *written)
    return dx, d_first, d_second, d_bias


@torch.library.impl(_operators, "narrow_backward", "CPU")
def _narrow_backward(x: Tensor, grad: Tensor, half: Tensor | None) -> tuple[Tensor, Tensor]:
    (rows, size), bond = x.shape, grad.shape[1]
    dx, d_half = x.new_empty(0 if half is None else (rows, size)), x.new_empty((bond, size))
    read = x.contiguous(), grad.contiguous(), None if half is None else half.contiguous()
    _call("narrow_backward", x.dtype, (rows, size, bond), *read, None if half is None else dx, d_half)
    return dx, d_half


@torch.library.impl(_operators, "wide_backward", "CPU")
def _wide_backward(h: Tensor, grad: Tensor, half: Tensor, needs_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    (rows, bond), size = h.shape, half.shape[1]
    dh, d_half = h.new_empty((rows, bond)), h.new_empty((bond, size))
    d_bias = h.new_empty(size if needs_bias else 0)
    read = h.contiguous(), grad.contiguous(), half.contiguous()
    _call("wide_backward", h.dtype, (rows, size, bond), *read, dh, d_half, d_bias if needs_bias else None)
    return dh, d_half, d_bias


@torch.library.impl(_operators, "narrow", "Meta")
def _narrow_meta(x: Tensor, half: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], half.shape[0])


@torch.library.impl(_operators, "wide", "Meta")
def _wide_meta(h: Tensor, half: Tensor, bias: Tensor | None) -> Tensor:
    return h.new_empty(h.shape[0], half.shape[1])


@torch.library.impl(_operators, "skinny_backward", "Meta")
def _backward_meta(
    x: Tensor, h: Tensor, grad: Tensor, first: Tensor | None, second: Tensor, needs_bias: bool
) -> tuple[Tensor, ...]:
    dx = x.new_empty((0,) if first is None else x.shape)
    d_bias = x.new_empty(second.shape[1] if needs_bias else 0)
    return dx, x.new_empty(h.shape[1], x.shape[1]), x.new_empty(second.shape), d_bias


@torch.library.impl(_operators, "narrow_backward", "Meta")
def _narrow_backward_meta(x: Tensor, grad: Tensor, half: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty((0,) if half is None else x.shape), x.new_empty(grad.shape[1], x.shape[1])


@torch.library.impl(_operators, "wide_backward", "Meta")
def _wide_backward_meta(h: Tensor, grad: Tensor, half: Tensor, needs_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    return h.new_empty(h.shape), h.new_empty(half.shape), h.new_empty(half.shape[1] if needs_bias else 0)

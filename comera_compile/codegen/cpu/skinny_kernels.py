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

ELEMENTS = {torch.float32: "f32", torch.float64: "f64"}

_operators = torch.library.Library("comera", "FRAGMENT")
_operators.define("narrow(Tensor x, Tensor half) -> Tensor")
_operators.define("wide(Tensor h, Tensor half, Tensor? bias) -> Tensor")
_operators.define(
    "skinny_backward(Tensor x, Tensor h, Tensor grad, Tensor? first, Tensor second, bool needs_bias)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def available(x: Tensor, bond: int) -> bool:
    """Whether the operators take these rows: on the CPU, of a dtype they know, a bond that is narrow, a library."""
    return x.device.type == "cpu" and x.dtype in ELEMENTS and 0 < bond <= MOST_BOND and _library() is not None


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


def sources(dtype: torch.dtype) -> tuple[str, ...]:
    """Texts of the library; there is one for all dtypes of ``ELEMENTS``."""
    folder = Path(__file__).parent
    return tuple((folder / name).read_text() for name in ("gemm.h", "skinny.cpp"))


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library(*sources(torch.float32))
    if library is not None:
        for name, sizes, tensors in (("narrow", 3, 3), ("wide", 3, 4), ("backward", 4, 9)):
            for suffix in ELEMENTS.values():
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes = [*[ctypes.c_int64] * sizes, *[ctypes.c_void_p] * tensors, ctypes.c_int64]
                function.restype = None
    return library


def _call(name: str, dtype: torch.dtype, sizes: tuple[int, ...], *tensors: Tensor | None) -> None:
    library = _library()
    assert library is not None, f"{name} was called without a library"
    places = [None if t is None else t.data_ptr() for t in tensors]
    getattr(library, f"{name}_{ELEMENTS[dtype]}")(*sizes, *places, torch.get_num_threads())


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

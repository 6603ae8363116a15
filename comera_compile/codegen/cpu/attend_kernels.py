"""Attention from the bonds of q, k and v to the bond of the output projection, as operators of C++.

One forward, one for all gradients. Between them nothing is saved but the inputs: scores are made again, head by head,
and q, k, v and the mixed values never exist.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comera_compile.codegen.cpu import dropout_seed
from comera_compile.codegen.cpu.skinny_kernels import ELEMENTS
from comera_compile.cpp_library import load_library

SOURCES = (
    "gemm.h",
    "skinny_parts.h",
    "softmax.h",
    "dropout.h",
    "attend_parts.h",
    "attend_pack.h",
    "attend_forward.h",
    "attend_backward.h",
    "attend.cpp",
)
MOST_DIM = 256
_INPUTS = (
    "Tensor hq, Tensor hk, Tensor hv, Tensor second_q, Tensor? bias_q, Tensor second_k, Tensor? bias_k,"
    " Tensor second_v, Tensor? bias_v, Tensor first, Tensor? mask, int heads, int kv_heads, bool causal, float scale,"
    " float dropout=0.0, Tensor? seed=None"
)

_operators = torch.library.Library("comera", "FRAGMENT")
_operators.define(f"attend({_INPUTS}) -> Tensor")
_operators.define(f"attend_backward(Tensor grad, {_INPUTS}) -> ({', '.join(['Tensor'] * 10)})")

# hq, hk, hv, then half and bias of q, k and v, first, mask.
Operands = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None
]
# heads, kv_heads, causal, scale
Settings = tuple[int, int, bool, float]


def available(h: Tensor, dim: int) -> bool:
    """Whether the operators take bonds like ``h`` and heads of ``dim`` columns: device, dtype, a library."""
    return h.device.type == "cpu" and h.dtype in ELEMENTS and 0 < dim <= MOST_DIM and _library(h.dtype) is not None


def attend(operands: Operands, settings: Settings, dropout: float = 0.0, seed: Tensor | None = None) -> Tensor:
    """``concat_heads(drop(softmax(scale q k^T + mask)) v) first^T``, with ``q = hq second_q + bias_q``, likewise k, v.

    Args:
        operands: hq ``[batch, queries, bond]``, hk, hv ``[batch, keys, bond]``; second_q ``[bond, heads * dim]`` and
            bias_q ``[heads * dim]`` or None, the same for k and v with ``kv_heads * dim`` columns; first
            ``[bond, heads * dim]``; mask, added to the scores, of a shape that expands to ``[batch, heads, queries,
            keys]``, or None.
        settings: heads; heads of k and v, which divide them: head i uses k and v number ``i // (heads // kv_heads)``;
            whether query i sees the keys up to i only; the factor of the scores.
        dropout, seed: as of :func:`bridge_kernels.bridge`, of the weights of the keys.

    Returns:
        ``[batch, queries, bond of first]``. A query that sees no key gets zeros.

    Raises:
        ValueError: shapes that do not fit together, no probability, or a seed that is missing or in vain.
        TypeError: operands of more than one dtype.
    """
    made: Tensor = torch.ops.comera.attend.default(*operands, *settings, dropout, seed)
    return made


def backward(
    grad: Tensor, operands: Operands, settings: Settings, dropout: float = 0.0, seed: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients of all operands of :func:`attend` but the mask, from that of its result; None for absent biases."""
    made = torch.ops.comera.attend_backward.default(grad, *operands, *settings, dropout, seed)
    return tuple(None if o is None else m for o, m in zip(operands[:-1], made, strict=True))


def sources(dtype: torch.dtype) -> tuple[str, ...]:
    """Texts of the library for one dtype, a key of ``ELEMENTS``."""
    folder = Path(__file__).parent
    return f"#define ELEMENT {ELEMENTS[dtype]}", *((folder / name).read_text() for name in SOURCES)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    library = load_library(*sources(dtype))
    if library is not None:
        for name, tensors in (("attend", 2), ("attend_backward", 3)):
            function = getattr(library, name)
            function.argtypes = [ctypes.c_void_p, *[ctypes.c_double] * 2, *[ctypes.c_void_p] * tensors, ctypes.c_int64]
            function.restype = None
    return library


def _places(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def _checked(operands: Operands, heads: int, kv_heads: int) -> tuple[list[int], list[Tensor | None]]:
    """Sizes for the kernel but the last six, and the operands side by side in memory, with the mask expanded."""
    hq, hk, hv, *halves, first, mask = operands
    batch, queries, bond_q = hq.shape
    keys, bond_k, bond_v, size = hk.shape[1], hk.shape[2], hv.shape[2], first.shape[1]
    if kv_heads < 1 or heads % kv_heads or size % heads:
        raise ValueError(f"attend: {heads} heads do not divide {size} columns, or {kv_heads} heads of k and v not them")
    dim = size // heads
    kv_size = kv_heads * dim
    right = [(batch, queries, bond_q), (batch, keys, bond_k), (batch, keys, bond_v), (bond_q, size), (size,)]
    right += [(bond_k, kv_size), (kv_size,), (bond_v, kv_size), (kv_size,), (first.shape[0], size)]
    for given, shape in zip((hq, hk, hv, *halves, first), right, strict=True):
        if given is not None and given.shape != shape:
            raise ValueError(f"attend: expected an operand of shape {list(shape)}, got {list(given.shape)}")
    if any(t is not None and t.dtype != hq.dtype for t in operands):
        raise TypeError(f"attend: operands of one dtype expected, got {[t.dtype for t in operands if t is not None]}")
    ready = [None if t is None else t.contiguous() for t in (hq, hk, hv, *halves, first)]
    ready.append(None if mask is None else mask.expand(batch, heads, queries, keys))
    return [batch, queries, keys, heads, kv_heads, dim, bond_q, bond_k, bond_v, first.shape[0]], ready


def _call(name: str, operands: Operands, settings: Sequence[Any], *places: object) -> None:
    library = _library(operands[0].dtype)
    assert library is not None, f"{name} was called without a library"
    heads, kv_heads, causal, scale, dropout, seed = _with_dropout(settings)
    sizes, ready = _checked(operands, heads, kv_heads)
    mask = ready[-1]
    sizes += [int(causal), *((0,) * 4 if mask is None else mask.stride()), dropout_seed.number(seed)]
    words = (ctypes.c_int64 * len(sizes))(*sizes)
    getattr(library, name)(words, scale, dropout, _places(ready), *places, torch.get_num_threads())


def _with_dropout(settings: Sequence[Any]) -> tuple[int, int, bool, float, float, Tensor | None]:
    """Settings, dropout and seed: torch leaves out of a call what is as by default."""
    left_out: tuple[Any, ...] = (0.0, None)[len(settings) - 4 :]
    heads, kv_heads, causal, scale, dropout, seed = (*settings, *left_out)
    dropout_seed.check(dropout, seed)
    return heads, kv_heads, causal, scale, dropout, seed


def _new_result(operands: Operands) -> Tensor:
    hq, first = operands[0], operands[9]
    return hq.new_empty(hq.shape[0], hq.shape[1], first.shape[0])


def _new_gradients(operands: Operands) -> tuple[Tensor, ...]:
    return tuple(operands[0].new_empty(0 if t is None else t.shape) for t in operands[:-1])


@torch.library.impl(_operators, "attend", "CPU")
def _attend(*arguments: Any) -> Tensor:
    operands, settings = arguments[:11], arguments[11:]
    made = _new_result(operands)
    _call("attend", operands, settings, made.data_ptr())
    return made


@torch.library.impl(_operators, "attend_backward", "CPU")
def _attend_backward(*arguments: Any) -> tuple[Tensor, ...]:
    grad, operands, settings = arguments[0], arguments[1:12], arguments[12:]
    if grad.shape != (*operands[0].shape[:2], operands[9].shape[0]) or grad.dtype != operands[0].dtype:
        raise ValueError(f"attend: a gradient of {grad.dtype} and shape {list(grad.shape)} is not that of the result")
    grad, made = grad.contiguous(), _new_gradients(operands)
    wanted = [None if o is None else m for o, m in zip(operands[:-1], made, strict=True)]
    _call("attend_backward", operands, settings, grad.data_ptr(), _places(wanted))
    return made


@torch.library.impl(_operators, "attend", "Meta")
def _attend_meta(*arguments: Any) -> Tensor:
    _with_dropout(arguments[11:])
    return _new_result(arguments[:11])


@torch.library.impl(_operators, "attend_backward", "Meta")
def _attend_backward_meta(*arguments: Any) -> tuple[Tensor, ...]:
    _with_dropout(arguments[12:])
    return _new_gradients(arguments[1:12])

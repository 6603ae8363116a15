"""From the bond of one tensor-train linear to the bond of the next, through a pointwise function, as operators of C++.

What lies between is wide (``u = h second + bias`` of a feed-forward block) and is made, used and dropped in blocks that
stay in the cache, in both directions: nothing but bonds is kept for the backward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from comera_compile.codegen.cpu import dropout_seed, skinny_kernels
from comera_compile.codegen.cpu.skinny_kernels import ELEMENTS
from comera_compile.cpp_library import load_library

# The place of each is its number in pointwise.h.
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
SOURCES = ("gemm.h", "skinny_parts.h", "pointwise.h", "dropout.h", "bridge.cpp")
Optional = Tensor | None
Gradients = tuple[Tensor, Tensor, Optional, Optional, Optional, Optional, Tensor]

_OPERANDS = (
    "Tensor h, Tensor second, Tensor? bias, Tensor? h_gate, Tensor? second_gate, Tensor? bias_gate, Tensor first, "
    "str activation, float dropout=0.0, Tensor? seed=None"
)

_operators = torch.library.Library("comera", "FRAGMENT")
_operators.define(f"bridge({_OPERANDS}) -> Tensor")
_operators.define(
    f"bridge_backward(Tensor grad, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def available(h: Tensor, *bonds: int) -> bool:
    """Whether the operators take these rows and bonds: as :func:`skinny_kernels.available`, and a library of theirs."""
    return all(skinny_kernels.available(h, bond) for bond in bonds) and _library(h.dtype) is not None


def bridge(
    h: Tensor,
    second: Tensor,
    bias: Optional,
    h_gate: Optional,
    second_gate: Optional,
    bias_gate: Optional,
    first: Tensor,
    activation: str,
    dropout: float = 0.0,
    seed: Optional = None,
) -> Tensor:
    """``act(h second + bias) first^T``, or ``(act(h_gate second_gate + bias_gate) * (h second + bias)) first^T``.

    Args:
        h, h_gate: ``[rows, bond]``, of bonds of their own; without a gate ``h_gate`` and ``second_gate`` are None.
        second, second_gate: ``[bond, width]``.
        bias, bias_gate: ``[width]`` or None.
        first: ``[bond of the result, width]``.
        activation: one of :data:`ACTIVATIONS`; "gelu" is the exact one.
        dropout: probability, 0 to 1, with which each element in front of ``first^T`` is dropped; others are divided by
            1 minus it.
        seed: ``[1]``, int64, which decides with the element's row and column whether it is dropped; only with dropout.

    Returns:
        ``[rows, bond of the result]``.

    Raises:
        ValueError: another activation, one half of a gate, no probability, or a seed that is missing or in vain.
    """
    operands = h, second, bias, h_gate, second_gate, bias_gate, first
    made: Tensor = torch.ops.comera.bridge.default(*operands, activation, dropout, seed)
    return made


def backward(
    grad: Tensor,
    h: Tensor,
    second: Tensor,
    bias: Optional,
    h_gate: Optional,
    second_gate: Optional,
    bias_gate: Optional,
    first: Tensor,
    activation: str,
    dropout: float = 0.0,
    seed: Optional = None,
) -> Gradients:
    """Gradients of the seven tensors that :func:`bridge` takes, in its order, from that of its result.

    Args:
        grad: ``[rows, bond of the result]``.
        h, second, bias, h_gate, second_gate, bias_gate, first, activation, dropout, seed: as of :func:`bridge`.

    Returns:
        One gradient a tensor, None where that is None.

    Raises:
        ValueError: as :func:`bridge`.
    """
    operands = h, second, bias, h_gate, second_gate, bias_gate, first
    made = torch.ops.comera.bridge_backward.default(grad, *operands, activation, dropout, seed)
    there = [gradient if t is not None else None for t, gradient in zip(operands, made, strict=True)]
    return tuple(there)  # type: ignore[return-value]  # a tuple of seven by the line above


def sources(dtype: torch.dtype) -> tuple[str, ...]:
    """Texts of the library for one dtype, a key of ``ELEMENTS``."""
    folder = Path(__file__).parent
    return f"#define ELEMENT {ELEMENTS[dtype]}", *((folder / name).read_text() for name in SOURCES)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    library = load_library(*sources(dtype))
    if library is not None:
        for name, tensors in (("bridge", 8), ("bridge_backward", 15)):
            function = getattr(library, name)
            function.argtypes = [ctypes.c_void_p, ctypes.c_double, *[ctypes.c_void_p] * tensors, ctypes.c_int64]
            function.restype = None
    return library


def _check(
    h_gate: Optional,
    second_gate: Optional,
    bias_gate: Optional,
    activation: str,
    dropout: float,
    seed: Optional,
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if (h_gate is None) != (second_gate is None) or (h_gate is None and bias_gate is not None):
        raise ValueError("h_gate and second_gate come together, and bias_gate only with them")
    dropout_seed.check(dropout, seed)


def _call(
    name: str, operands: Sequence[Optional], activation: str, dropout: float, seed: Optional, *others: Optional
) -> None:
    h, second, _, _, second_gate, _, first = operands
    assert h is not None and second is not None and first is not None
    library = _library(h.dtype)
    assert library is not None, f"{name} was called without a library"
    bond_gate = 0 if second_gate is None else second_gate.shape[0]
    words = h.shape[0], second.shape[1], second.shape[0], bond_gate, first.shape[0], ACTIVATIONS.index(activation)
    sizes = (ctypes.c_int64 * 7)(*words, dropout_seed.number(seed))
    places = [None if t is None else t.data_ptr() for t in (*operands, *others)]
    getattr(library, name)(sizes, dropout, *places, torch.get_num_threads())


def _contiguous(tensors: Sequence[Optional]) -> list[Optional]:
    return [None if t is None else t.contiguous() for t in tensors]


@torch.library.impl(_operators, "bridge", "CPU")
def _bridge(
    h: Tensor,
    second: Tensor,
    bias: Optional,
    h_gate: Optional,
    second_gate: Optional,
    bias_gate: Optional,
    first: Tensor,
    activation: str,
    dropout: float = 0.0,
    seed: Optional = None,
) -> Tensor:
    operands = _contiguous((h, second, bias, h_gate, second_gate, bias_gate, first))
    result = _bridge_meta(h, second, bias, h_gate, second_gate, bias_gate, first, activation, dropout, seed)
    _call("bridge", operands, activation, dropout, seed, result)
    return result


@torch.library.impl(_operators, "bridge", "Meta")
def _bridge_meta(
    h: Tensor,
    second: Tensor,
    bias: Optional,
    h_gate: Optional,
    second_gate: Optional,
    bias_gate: Optional,
    first: Tensor,
    activation: str,
    dropout: float = 0.0,
    seed: Optional = None,
) -> Tensor:
    _check(h_gate, second_gate, bias_gate, activation, dropout, seed)
    return h.new_empty(h.shape[0], first.shape[0])


@torch.library.impl(_operators, "bridge_backward", "CPU")
def _backward(
    grad: Tensor,
    h: Tensor,
    second: Tensor,
    bias: Optional,
    h_gate: Optional,
    second_gate: Optional,
    bias_gate: Optional,
    first: Tensor,
    activation: str,
    dropout: float = 0.0,
    seed: Optional = None,
) -> tuple[Tensor, ...]:
    operands = _contiguous((h, second, bias, h_gate, second_gate, bias_gate, first))
    made = _backward_meta(grad, h, second, bias, h_gate, second_gate, bias_gate, first, activation, dropout, seed)
    written = [gradient if t is not None else None for t, gradient in zip(operands, made, strict=True)]
    _call("bridge_backward", operands, activation, dropout, seed, grad.contiguous(), *written)
    return made


@torch.library.impl(_operators, "bridge_backward", "Meta")
def _backward_meta(
    grad: Tensor,
    h: Tensor,
    second: Tensor,
    bias: Optional,
    h_gate: Optional,
    second_gate: Optional,
    bias_gate: Optional,
    first: Tensor,
    activation: str,
    dropout: float = 0.0,
    seed: Optional = None,
) -> tuple[Tensor, ...]:
    _check(h_gate, second_gate, bias_gate, activation, dropout, seed)
    operands = h, second, bias, h_gate, second_gate, bias_gate, first
    return tuple(h.new_empty(0) if t is None else h.new_empty(t.shape) for t in operands)

"""Merging the cores of several layers as one operator, and its gradient as another; both run in C++.

Torch's own operators do the same step by step (``codegen/run_plan.py``): for a small layer that is some twenty calls of
a few microseconds of arithmetic each, and as many kernels for Inductor to look at.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from comera_compile.codegen.cpu.merge_program import MergeProgram, backward_program, forward_program
from comera_compile.cpp_library import load_library

ELEMENTS = {torch.float32: "float", torch.float64: "double"}

_operators = torch.library.Library("comera", "FRAGMENT")
_operators.define("merge(Tensor[] packed, float[] scales, str plan) -> Tensor[]")
_operators.define("merge_backward(Tensor[] packed, Tensor[] grads, float[] scales, str plan) -> Tensor")


def available(packed: Sequence[torch.Tensor]) -> bool:
    """Whether the operators take these vectors: on the CPU, of a dtype they know, and the library can be built."""
    known = all(p.device.type == "cpu" and p.dtype in ELEMENTS for p in packed)
    return known and all(_library(p.dtype) is not None for p in packed)


def merge(packed: Sequence[torch.Tensor], scales: Sequence[float], plan_text: str) -> list[torch.Tensor]:
    """Operands of a plan, each stacked over the layers: ``[layers, *operand]``."""
    return list(torch.ops.comera.merge.default(list(packed), list(scales), plan_text))


def merge_backward(
    packed: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], scales: Sequence[float], plan_text: str
) -> torch.Tensor:
    """Gradients of the packed vectors, ``[layers, numel]``, from those of the stacked operands."""
    made: torch.Tensor = torch.ops.comera.merge_backward.default(list(packed), list(grads), list(scales), plan_text)
    return made


def new_room(like: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Memory for a result or for scratch."""
    return like.new_empty(size)


def sources(dtype: torch.dtype) -> tuple[str, ...]:
    """Texts of the library for one dtype, a key of ``ELEMENTS``."""
    folder = Path(__file__).parent
    return f"#define ELEMENT {ELEMENTS[dtype]}", *((folder / name).read_text() for name in ("gemm.h", "merge.cpp"))


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    library = load_library(*sources(dtype))
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        layers: list[Any] = [pointer, pointer, number, pointer, pointer, number]
        library.merge.argtypes = [*layers, pointer, pointer, pointer, number]
        library.merge.restype = None
    return library


@torch.library.impl(_operators, "merge", "CPU")
def _merge(packed: Sequence[torch.Tensor], scales: Sequence[float], plan_text: str) -> list[torch.Tensor]:
    program, layers = forward_program(plan_text), len(packed)
    operands = [new_room(packed[0], (layers, *shape)) for shape in program.operands]
    _run(program, packed, operands, scales, None)
    return operands


@torch.library.impl(_operators, "merge_backward", "CPU")
def _merge_backward(
    packed: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], scales: Sequence[float], plan_text: str
) -> torch.Tensor:
    made = new_room(packed[0], (len(packed), packed[0].numel()))
    _run(backward_program(plan_text), packed, [g.contiguous() for g in grads], scales, made)
    return made


@torch.library.impl(_operators, "merge", "Meta")
def _merge_meta(packed: Sequence[torch.Tensor], scales: Sequence[float], plan_text: str) -> list[torch.Tensor]:
    return [packed[0].new_empty((len(packed), *shape)) for shape in forward_program(plan_text).operands]


@torch.library.impl(_operators, "merge_backward", "Meta")
def _merge_backward_meta(
    packed: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], scales: Sequence[float], plan_text: str
) -> torch.Tensor:
    return packed[0].new_empty((len(packed), packed[0].numel()))


def _run(
    program: MergeProgram,
    packed: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    scales: Sequence[float],
    grads: torch.Tensor | None,
) -> None:
    layers, cores = len(packed), [p.contiguous() for p in packed]
    scratch = new_room(packed[0], (layers * program.scratch,))
    made = [] if grads is None else [grads]
    buffers = array("Q", [t.data_ptr() for t in (scratch, *operands, *made)])
    vectors, factors = array("Q", [c.data_ptr() for c in cores]), array("d", scales)
    library = _library(packed[0].dtype)
    assert library is not None, "merge kernels were called without a library"
    library.merge(
        _place(program.words),
        _place(program.tables),
        layers,
        _place(buffers),
        _place(program.steps),
        len(buffers),
        _place(vectors),
        _place(factors),
        None if grads is None else grads.data_ptr(),
        torch.get_num_threads(),
    )


def _place(values: array[Any]) -> int:
    return values.buffer_info()[0]

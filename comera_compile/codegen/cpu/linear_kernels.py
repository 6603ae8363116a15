"""A whole tensor-train linear by one call of C++ each way: cores merged, rows through both halves; then all gradients.

For a layer that stands alone. Where there are several, their cores are merged together (``merge_kernels.py``).
"""

from __future__ import annotations

import ctypes
import math
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comera_compile.codegen.cpu import merge_kernels, skinny_kernels
from comera_compile.codegen.cpu.merge_program import backward_program, forward_program
from comera_compile.cpp_library import load_library
from comera_compile.planning.linear_plan import LinearPlan

SOURCES = (*skinny_kernels.SOURCES, "merge.cpp", "linear.cpp")


def available(dtype: torch.dtype) -> bool:
    """Whether there is a library for CPU tensors of this dtype."""
    return dtype in merge_kernels.ELEMENTS and _library(dtype) is not None


class LinearKernel:
    """One layer, for CPU tensors of a dtype with a library.

    What changes at no call is found here, once: it would take longer than the arithmetic of a few rows.

    Args:
        plan_text: ``LinearPlan.encode()`` of a plan that merges both halves.
        scale: of the packed vector.

    Raises:
        ValueError: the plan does not merge both halves.
    """

    def __init__(self, plan_text: str, scale: float) -> None:
        plan = LinearPlan.decode(plan_text)
        if not plan.merged:
            raise ValueError(f"expected a plan that merges both halves, got: {plan.name}")
        self.swapped = plan.contracts == "cols"
        self.inputs, self.outputs = (plan.operand_sizes[axis] for axis in ("nm" if self.swapped else "mn"))
        self.bond, self.scale = plan.bond, scale
        # The programs stay where they are for as long as this object holds them.
        self._programs = forward_program(plan_text), backward_program(plan_text)
        self._forward, self._backward = ((*map(_place, (p.words, p.tables, p.steps)),) for p in self._programs)
        self._widths = self.inputs, self.outputs, self.bond, self.swapped

    def forward(self, x: Tensor, bias: Tensor | None, packed: Tensor) -> tuple[Tensor, Tensor]:
        """``x``: ``[..., inputs]``, ``bias``: ``[outputs]`` or None. All contiguous, of one dtype.

        Returns:
            y ``[..., outputs]``, and what is kept for the backward: both merged halves, and the bond behind them.
        """
        *lead, _ = x.shape
        rows = math.prod(lead)
        y = x.new_empty((*lead, self.outputs))
        kept = x.new_empty(self.bond * (self.inputs + self.outputs + rows))
        _function("linear_forward", x.dtype)(
            *self._forward,
            rows,
            *self._widths,
            self.scale,
            packed.data_ptr(),
            x.data_ptr(),
            None if bias is None else bias.data_ptr(),
            kept.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y, kept

    def backward(
        self, grad: Tensor, x: Tensor, packed: Tensor, kept: Tensor, *, needs_x: bool, needs_bias: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Gradients of x, the bias (each None unless needed) and the packed vector.

        Args:
            grad: of y, contiguous like the others.
            x, packed: as they were given to :meth:`forward`.
            kept: what it returned.
            needs_x, needs_bias: what is asked for besides the gradient of the packed vector.
        """
        dx = torch.empty_like(x) if needs_x else None
        dbias = grad.new_empty(self.outputs) if needs_bias else None
        made = torch.empty_like(packed)
        _function("linear_backward", x.dtype)(
            *self._backward,
            math.prod(x.shape[:-1]),
            *self._widths,
            self.scale,
            packed.data_ptr(),
            x.data_ptr(),
            kept.data_ptr(),
            grad.data_ptr(),
            None if dx is None else dx.data_ptr(),
            None if dbias is None else dbias.data_ptr(),
            made.data_ptr(),
            torch.get_num_threads(),
        )
        return dx, dbias, made


def sources(dtype: torch.dtype) -> tuple[str, ...]:
    """Texts of the library for one dtype, a key of ``merge_kernels.ELEMENTS``."""
    folder = Path(__file__).parent
    head = f"#define ELEMENT {merge_kernels.ELEMENTS[dtype]}"
    return head, *((folder / name).read_text() for name in SOURCES)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    library = load_library(*sources(dtype))
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        for name, tensors in (("linear_forward", 5), ("linear_backward", 7)):
            function = getattr(library, name)
            function.argtypes = [*[pointer] * 3, *[number] * 5, ctypes.c_double, *[pointer] * tensors, number]
            function.restype = None
    return library


@cache
def _function(name: str, dtype: torch.dtype) -> Any:
    library = _library(dtype)
    assert library is not None, f"{name} was called without a library"
    return getattr(library, name)


def _place(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]

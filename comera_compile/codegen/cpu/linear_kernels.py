"""A whole tensor-train linear by one call of C++ each way: cores merged, rows through both halves; then all gradients.

For a layer that stands alone. Where there are several, their cores are merged together (``merge_kernels.py``).
"""

from __future__ import annotations

import ctypes
import math
from array import array
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from comera_compile.codegen.cpu import merge_kernels, skinny_kernels
from comera_compile.codegen.cpu.merge_program import MergeProgram, backward_program, forward_program
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
        self._forward, self._backward = forward_program(plan_text), backward_program(plan_text)

    def forward(self, x: Tensor, bias: Tensor | None, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x``: ``[..., inputs]``, ``bias``: ``[outputs]`` or None. All contiguous, of one dtype.

        Returns:
            y ``[..., outputs]``, and for the backward both merged halves and the bond ``[rows, bond]``.
        """
        rows = math.prod(x.shape[:-1])
        y = x.new_empty((*x.shape[:-1], self.outputs))
        halves = x.new_empty(self.bond * (self.inputs + self.outputs))
        h = x.new_empty((rows, self.bond))
        self._call("linear_forward", self._forward, rows, packed, x, bias, halves, h, y)
        return y, halves, h

    def backward(
        self, grad: Tensor, x: Tensor, packed: Tensor, halves: Tensor, h: Tensor, *, needs_x: bool, needs_bias: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Gradients of x, the bias (each None unless needed) and the packed vector.

        Args:
            grad: of y, contiguous like the others.
            x, packed: as they were given to :meth:`forward`.
            halves, h: what it returned.
            needs_x, needs_bias: what is asked for besides the gradient of the packed vector.
        """
        dx = torch.empty_like(x) if needs_x else None
        dbias = grad.new_empty(self.outputs) if needs_bias else None
        made = torch.empty_like(packed)
        self._call("linear_backward", self._backward, len(h), packed, x, halves, h, grad, dx, dbias, made)
        return dx, dbias, made

    def _call(self, name: str, program: MergeProgram, rows: int, *tensors: Tensor | None) -> None:
        sizes = array("q", (rows, self.inputs, self.outputs, self.bond, self.swapped))
        library = _library(tensors[0].dtype)  # type: ignore[union-attr]
        assert library is not None, f"{name} was called without a library"
        getattr(library, name)(
            *(a.buffer_info()[0] for a in (program.words, program.tables, program.steps, sizes)),
            self.scale,
            *(None if t is None else t.data_ptr() for t in tensors),
            torch.get_num_threads(),
        )


def sources(dtype: torch.dtype) -> tuple[str, ...]:
    """Texts of the library for one dtype, a key of ``merge_kernels.ELEMENTS``."""
    folder = Path(__file__).parent
    head = f"#define ELEMENT {merge_kernels.ELEMENTS[dtype]}"
    return head, *((folder / name).read_text() for name in SOURCES)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    library = load_library(*sources(dtype))
    if library is not None:
        for name, tensors in (("linear_forward", 6), ("linear_backward", 8)):
            function = getattr(library, name)
            pointers: list[type] = [ctypes.c_void_p] * 4
            function.argtypes = [*pointers, ctypes.c_double, *[ctypes.c_void_p] * tensors, ctypes.c_int64]
            function.restype = None
    return library

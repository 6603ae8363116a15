"""Rows through two weights with merged halves and what lies between: narrow, then bridges from bond to bond, then wide.

Each is traced to its operators, which are leaves; nothing wider than x is kept for the backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from comera_compile.codegen.contract import viewed
from comera_compile.codegen.cpu import bridge_kernels, skinny_kernels


class Narrow(torch.autograd.Function):
    """``h = x first^T``: the way into a region."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor) -> Tensor:
        """``x``: ``[..., inputs]``; ``first``: ``[bond, inputs]``; gives ``[rows, bond]``."""
        rows = viewed(x, [math.prod(x.shape[:-1]), x.shape[-1]])
        ctx.x_shape = x.shape
        ctx.save_for_backward(rows, first if ctx.needs_input_grad[0] else None)
        return skinny_kernels.narrow(rows, first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gradients of x and the half."""
        rows, first = ctx.saved_tensors
        dx, d_first = skinny_kernels.narrow_backward(rows, grads[0], first)
        return None if dx is None else viewed(dx, ctx.x_shape), d_first


class Bridge(torch.autograd.Function):
    """From bond to bond through ``act(h second + bias)``, or that of a gate times ``h second + bias``."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        second: Tensor,
        bias: Tensor | None,
        h_gate: Tensor | None,
        second_gate: Tensor | None,
        bias_gate: Tensor | None,
        first: Tensor,
        activation: str,
    ) -> Tensor:
        """Shapes are those of :func:`bridge_kernels.bridge`."""
        operands = h, second, bias, h_gate, second_gate, bias_gate, first
        ctx.activation = activation
        ctx.save_for_backward(*operands)
        return bridge_kernels.bridge(*operands, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all tensors; the wide one is made again from h."""
        h, second, bias, h_gate, second_gate, bias_gate, first = ctx.saved_tensors
        gate = h_gate, second_gate, bias_gate
        return *bridge_kernels.backward(grads[0], h, second, bias, *gate, first, ctx.activation), None


class Wide(torch.autograd.Function):
    """``y = h second + bias``: the way out of a region."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
        """``h``: ``[rows, bond]``; ``second``: ``[bond, outputs]``; gives ``[rows, outputs]``."""
        ctx.save_for_backward(h, second)
        return skinny_kernels.wide(h, second, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of h, the half and the bias."""
        h, second = ctx.saved_tensors
        return skinny_kernels.wide_backward(h, grads[0], second, needs_bias=ctx.needs_input_grad[2])

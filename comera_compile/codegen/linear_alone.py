"""A graph that is one tensor-train linear, run as it is: one operation of autograd, one call of C++ each way.

AOTAutograd and Inductor have nothing to fuse there, and what they put around the call takes longer than the layer at
few rows (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from comera_compile.codegen.cpu import linear_kernels, skinny_kernels
from comera_compile.codegen.cpu.linear_kernels import LinearKernel
from comera_compile.planning.alone import AloneLinear


def call_linear_alone(found: AloneLinear, x: torch.Tensor) -> Callable[..., tuple[torch.Tensor]] | None:
    """What runs the graph, given its inputs; None where the kernels do not take tensors like ``x``."""
    if not skinny_kernels.takes(x, found.plan.bond) or not linear_kernels.available(x.dtype):
        return None
    kernel = LinearKernel(found.plan.encode(), found.scale)
    x_at, bias_at, packed_at = found.x, found.bias, found.packed

    def call(*inputs: Any) -> tuple[torch.Tensor]:
        bias = None if bias_at is None else inputs[bias_at]
        y: torch.Tensor = LinearAlone.apply(kernel, inputs[x_at], bias, inputs[packed_at])  # type: ignore[no-untyped-call]
        return (y,)

    return call


class LinearAlone(torch.autograd.Function):
    """Rows, bias and packed vector to y."""

    @staticmethod
    def forward(
        ctx: Any, kernel: LinearKernel, x: torch.Tensor, bias: torch.Tensor | None, packed: torch.Tensor
    ) -> torch.Tensor:
        """``x``: ``[..., inputs]``; returns ``[..., outputs]``."""
        bias = None if bias is None else bias.contiguous()
        y, kept = kernel.forward(x.contiguous(), bias, packed.contiguous())
        ctx.kernel = kernel
        ctx.save_for_backward(x, packed, kept)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, bias and the packed vector; with ``create_graph`` they can't be differentiated again."""
        return _gradients_once(ctx, *grads) if torch.is_grad_enabled() else _gradients(ctx, *grads)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, packed, kept = ctx.saved_tensors
    _, needs_x, needs_bias, _ = ctx.needs_input_grad
    operands = grad.contiguous(), x.contiguous(), packed.contiguous(), kept
    return None, *ctx.kernel.backward(*operands, needs_x=needs_x, needs_bias=needs_bias)


_gradients_once = once_differentiable(_gradients)

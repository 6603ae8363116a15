"""Rows through a weight whose halves are both merged, ``y = (x F^T) S + bias``, by operators of C++."""

from __future__ import annotations

import math
from typing import Any

import torch

from comera_compile.codegen.contract import of_its_own, viewed
from comera_compile.codegen.cpu import skinny_kernels
from comera_compile.planning.linear_plan import LinearPlan


def has_kernels(
    plan: LinearPlan, x: torch.Tensor, bias: torch.Tensor | None, operands: tuple[torch.Tensor, ...]
) -> bool:
    """Whether these rows and operands are to be given to :class:`ApplyMerged`."""
    others = [x] if bias is None else [x, bias]
    no_gradients = not torch.is_grad_enabled() or not any(t.requires_grad for t in (*others, *operands))
    # With a half that is not trained most of what the backward operator does would be for nothing.
    wanted = no_gradients or all(o.requires_grad for o in operands)
    return plan.merged and wanted and skinny_kernels.available(x, plan.bond)


class ApplyMerged(torch.autograd.Function):
    """Rows, bias and both merged halves to y; the backward is one operator, which reads x and dy once."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        """``x``: ``[..., inputs]``; ``first``, ``second``: ``[bond, inputs]``, ``[bond, outputs]``."""
        rows = viewed(x, [math.prod(x.shape[:-1]), x.shape[-1]])
        h = skinny_kernels.narrow(rows, first)
        y = skinny_kernels.wide(h, second, bias)
        ctx.x_shape, ctx.outputs = x.shape, second.shape[1]
        ctx.save_for_backward(rows, h, first if ctx.needs_input_grad[0] else None, second)
        return of_its_own(y, [*x.shape[:-1], ctx.outputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, bias and both halves."""
        rows, h, first, second = ctx.saved_tensors
        grad = viewed(grads[0], [rows.shape[0], ctx.outputs])
        dx, *rest, dbias = skinny_kernels.backward(rows, h, grad, first, second, needs_bias=ctx.needs_input_grad[1])
        return None if dx is None else viewed(dx, ctx.x_shape), dbias, *rest

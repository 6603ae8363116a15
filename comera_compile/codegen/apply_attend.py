"""Attention between the bonds of its linear layers, by operators of C++ that keep nothing but those bonds."""

from __future__ import annotations

from typing import Any

import torch

from comera_compile.codegen.cpu import attend_kernels


class Attend(torch.autograd.Function):
    """Operands and settings of :func:`attend_kernels.attend` to the bond of the output projection.

    The mask gets no gradient: one that needs it is the caller's to refuse.
    """

    @staticmethod
    def forward(ctx: Any, settings: attend_kernels.Settings, *operands: torch.Tensor | None) -> torch.Tensor:
        """``operands``: the eleven of :data:`attend_kernels.Operands`, each a tensor of its own or None."""
        ctx.settings = settings
        ctx.save_for_backward(*operands)
        return attend_kernels.attend(operands, settings)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of all operands but the mask."""
        made = attend_kernels.backward(grads[0], ctx.saved_tensors, ctx.settings)
        wanted = zip(made, ctx.needs_input_grad[1:], strict=False)
        return None, *(grad if needed else None for grad, needed in wanted), None

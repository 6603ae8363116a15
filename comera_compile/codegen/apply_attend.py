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
    def forward(
        ctx: Any,
        settings: attend_kernels.Settings,
        dropout: float,
        seed: torch.Tensor | None,
        *operands: torch.Tensor | None,
    ) -> torch.Tensor:
        """``operands``: the eleven of :data:`attend_kernels.Operands`, each a tensor of its own or None."""
        ctx.settings, ctx.dropout = settings, dropout
        ctx.save_for_backward(seed, *operands)
        return attend_kernels.attend(operands, settings, dropout, seed)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of all operands but the mask."""
        seed, *operands = ctx.saved_tensors
        made = attend_kernels.backward(grads[0], tuple(operands), ctx.settings, ctx.dropout, seed)
        wanted = zip(made, ctx.needs_input_grad[3:], strict=False)
        return None, None, None, *(grad if needed else None for grad, needed in wanted), None

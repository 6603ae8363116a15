"""A graph that is one lookup in a tensor-train-matrix table, run as it is: one operation of autograd, no compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from comera_compile.codegen.cpu import lookup_kernels
from comera_compile.codegen.lookup import look_up, packed_gradient
from comera_compile.planning.alone import AloneLookup
from comera_compile.tt.shape import TTShape


def call_lookup_alone(
    found: AloneLookup, ids: torch.Tensor, packed: torch.Tensor
) -> Callable[..., tuple[torch.Tensor]] | None:
    """What runs the graph, given its inputs; None where there are no kernels for tensors like these."""
    if not lookup_kernels.applies(packed, ids, TTShape.decode(found.layout)):
        return None
    layout, ids_at, packed_at = found.layout, found.ids, found.packed

    def call(*inputs: Any) -> tuple[torch.Tensor]:
        rows: torch.Tensor = LookupAlone.apply(inputs[packed_at], inputs[ids_at], layout)  # type: ignore[no-untyped-call]
        return (rows,)

    return call


class LookupAlone(torch.autograd.Function):
    """Packed vector and ids to rows."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, ids: torch.Tensor, layout: str) -> torch.Tensor:
        """``ids``: int32 or int64, any shape; returns ``[*ids.shape, columns]``."""
        ctx.save_for_backward(packed, ids)
        ctx.layout = layout
        return look_up(packed, ids, layout)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the packed vector; with ``create_graph`` it can't be differentiated again."""
        return _gradients_once(ctx, *grads) if torch.is_grad_enabled() else _gradients(ctx, *grads)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    packed, ids = ctx.saved_tensors
    return packed_gradient(packed, ids, grad, ctx.layout), None, None


_gradients_once = once_differentiable(_gradients)

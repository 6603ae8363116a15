"""Rows through two weights with merged halves and what lies between: narrow, then bridges from bond to bond, then wide.

Each is traced to its operators, which are leaves; nothing wider than x is kept for the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_compile.codegen.apply_merged import has_kernels
from comera_compile.codegen.contract import viewed
from comera_compile.codegen.cpu import bridge_kernels, dropout_seed, skinny_kernels
from comera_compile.codegen.run_plan import apply_operands
from comera_compile.planning.linear_plan import LinearPlan

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def apply_bridge(
    activation: str,
    dropout: float,
    texts: Sequence[str],
    rows: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *operands: Tensor,
) -> Tensor:
    """y of a last linear layer whose x is ``act(value)``, or ``act(gate) * value``, of others, dropped out.

    Args:
        activation: act.
        dropout: probability with which each element of x is dropped; torch's generator is asked for one number if it
            is not 0.
        texts: plans of the value's, the gate's (if there is one) and the last layer, all with merged halves.
        rows: x of the value and of the gate, ``[..., inputs]``.
        biases: of the layers, in the order of ``texts``.
        operands: two a layer, in the order of ``texts``.
    """
    plans, pairs = [LinearPlan.decode(text) for text in texts], list(zip(operands[::2], operands[1::2], strict=True))
    if _has_kernels(plans, rows, biases, pairs):
        return _by_kernels(activation, dropout, plans, rows, biases, pairs)
    value, *gate = (apply_operands(texts[k], x, biases[k], *pairs[k]) for k, x in enumerate(rows))
    made = _FUNCTIONS[activation](gate[0]) * value if gate else _FUNCTIONS[activation](value)
    return apply_operands(texts[-1], F.dropout(made, dropout) if dropout else made, biases[-1], *pairs[-1])


def _has_kernels(
    plans: Sequence[LinearPlan],
    rows: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    pairs: Sequence[tuple[Tensor, Tensor]],
) -> bool:
    """Whether every layer has, as it would alone, and nothing is to be cast."""
    tensors = [*rows, *(b for b in biases if b is not None), *(o for pair in pairs for o in pair)]
    if torch.is_autocast_enabled(rows[0].device.type) or any(t.dtype != rows[0].dtype for t in tensors):
        return False
    alone = zip(plans, [*rows, rows[0]], biases, pairs, strict=True)
    bonds = [plan.bond for plan in plans]
    return all(has_kernels(*layer) for layer in alone) and bridge_kernels.available(rows[0], *bonds)


def _by_kernels(
    activation: str,
    dropout: float,
    plans: Sequence[LinearPlan],
    rows: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    pairs: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    halves = [pair[::-1] if plan.contracts == "cols" else pair for plan, pair in zip(plans, pairs, strict=True)]
    sides: list[tuple[Any, Any, Any]] = [
        (Narrow.apply(x, first), second, bias)  # type: ignore[no-untyped-call]
        for x, (first, second), bias in zip(rows, halves, biases, strict=False)
    ]
    value, gate = sides[0], sides[1] if len(sides) == 2 else (None, None, None)
    first, second = halves[-1]
    seed = dropout_seed.draw(dropout, rows[0].device)
    h = Bridge.apply(*value, *gate, first, activation, dropout, seed)  # type: ignore[no-untyped-call]
    y: Tensor = Wide.apply(h, second, biases[-1])  # type: ignore[no-untyped-call]
    return viewed(y, [*rows[0].shape[:-1], second.shape[1]])


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
        dropout: float = 0.0,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Shapes are those of :func:`bridge_kernels.bridge`."""
        operands = h, second, bias, h_gate, second_gate, bias_gate, first
        ctx.settings = activation, dropout
        ctx.save_for_backward(*operands, seed)
        return bridge_kernels.bridge(*operands, activation, dropout, seed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all tensors; the wide one is made again from h, and what was dropped is found again."""
        h, second, bias, h_gate, second_gate, bias_gate, first, seed = ctx.saved_tensors
        gate, (activation, dropout) = (h_gate, second_gate, bias_gate), ctx.settings
        made = bridge_kernels.backward(grads[0], h, second, bias, *gate, first, activation, dropout, seed)
        return *made, None, None, None


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

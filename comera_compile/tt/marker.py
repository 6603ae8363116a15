"""The marker op ``comera::tt_weight``: the dense meaning of a packed weight, and what graph passes look for.

Eager code that reads ``module.weight`` gets this op's result, so code that nobody foresaw stays right, only slower.
In a traced graph the passes replace it, together with its known uses, by planned contractions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import fx

from comera_compile.tt.dense_gradient import dense_gradient
from comera_compile.tt.packing import to_dense
from comera_compile.tt.shape import TTShape


@lru_cache(maxsize=65536)
def decode(layout: str) -> TTShape:
    """``TTShape.decode``, remembered: a model asks for the same few layouts at every call."""
    return TTShape.decode(layout)


@torch.library.custom_op("comera::tt_weight", mutates_args=())
def tt_weight(packed: torch.Tensor, layout: str) -> torch.Tensor:
    """Dense ``(rows, cols)`` matrix of a packed weight of ``layout`` (``TTShape.encode()``)."""
    # Autocast is about what is computed with a weight; the weight itself has the dtype of its parameter.
    with torch.autocast(packed.device.type, enabled=False):
        return to_dense(packed, decode(layout)).contiguous()


@tt_weight.register_fake
def _fake(packed: torch.Tensor, layout: str) -> torch.Tensor:
    shape = decode(layout)
    return packed.new_empty((shape.rows, shape.cols))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.layout = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (packed,) = ctx.saved_tensors
    return tt_weight_backward(packed, grad, ctx.layout), None


@torch.library.custom_op("comera::tt_weight_backward", mutates_args=())
def tt_weight_backward(packed: torch.Tensor, grad: torch.Tensor, layout: str) -> torch.Tensor:
    """Gradient of the packed vector from the gradient of the dense ``(rows, cols)`` matrix."""
    with torch.autocast(packed.device.type, enabled=False):
        return dense_gradient(packed, grad, decode(layout))


@tt_weight_backward.register_fake
def _backward_fake(packed: torch.Tensor, grad: torch.Tensor, layout: str) -> torch.Tensor:
    return torch.empty_like(packed)


tt_weight.register_autograd(_backward, setup_context=_setup_context)
MARKERS = (torch.ops.comera.tt_weight, torch.ops.comera.tt_weight.default, tt_weight)


def is_marker(node: fx.Node) -> bool:
    """Whether a node of a graph is the marker op."""
    return node.op == "call_function" and node.target in MARKERS

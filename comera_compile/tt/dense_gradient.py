"""Gradient of the packed vector from the gradient of the dense matrix, written by hand.

The body of a custom op runs below autograd, and ``torch.func`` fails there as soon as a dispatch mode is active
(counting FLOPs, selective activation checkpointing), so the adjoint of ``packing.to_dense`` is spelled out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_compile.tt.packing import cores_of, merge_cols, merge_pair, merge_rows, zero_row
from comera_compile.tt.shape import TTShape


def dense_gradient(packed: Tensor, grad: Tensor, shape: TTShape) -> Tensor:
    """Adjoint of ``to_dense``.

    Args:
        packed: ``(shape.numel,)`` stored cores.
        grad: ``(shape.rows, shape.cols)``.
        shape: what they mean.

    Returns:
        ``(shape.numel,)``.

    Raises:
        ShapeError: the packed vector has another length.
    """
    cores = cores_of(packed, shape)
    grad = zero_row(grad, shape.zero_row)
    grads = _tt_gradients(cores, grad, shape) if shape.format == "tt" else _ttm_gradients(cores, grad, shape)
    # core = scale * stored, so the gradient of a stored core is scale times that of the core.
    return torch.cat([g.reshape(-1) for g in grads]) * shape.scale


def _tt_gradients(cores: Sequence[Tensor], grad: Tensor, shape: TTShape) -> list[Tensor]:
    """W = left right: the gradient of each factor, then of the cores it was merged from."""
    rows, cols = cores[: len(shape.row_modes)], cores[len(shape.row_modes) :]
    left, right = merge_rows(rows)[: shape.rows], merge_cols(cols)[:, : shape.cols]
    of_left = F.pad(torch.mm(grad, right.t()), [0, 0, 0, math.prod(shape.row_modes) - shape.rows])
    of_right = F.pad(torch.mm(left.t(), grad), [0, math.prod(shape.col_modes) - shape.cols])
    return _row_gradients(rows, of_left) + _col_gradients(cols, of_right)


def _row_gradients(cores: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Adjoint of ``merge_rows``: from the last core, each with the product of those before it."""
    grads: list[Tensor] = []
    for k in range(len(cores) - 1, 0, -1):
        before, core = merge_rows(cores[:k]), cores[k].reshape(cores[k].shape[0], -1)
        grad = grad.reshape(before.shape[0], -1)
        grads.append(torch.mm(before.t(), grad))
        grad = torch.mm(grad, core.t())
    return [grad, *reversed(grads)]


def _col_gradients(cores: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Adjoint of ``merge_cols``: from the first core, each with the product of those behind it."""
    grads: list[Tensor] = []
    for k in range(len(cores) - 1):
        behind, core = merge_cols(cores[k + 1 :]), cores[k].reshape(-1, cores[k].shape[-1])
        grad = grad.reshape(-1, behind.shape[1])
        grads.append(torch.mm(grad, behind.t()))
        grad = torch.mm(core.t(), grad)
    return [*grads, grad]


def _ttm_gradients(cores: Sequence[Tensor], grad: Tensor, shape: TTShape) -> list[Tensor]:
    rows, cols = math.prod(shape.row_modes), math.prod(shape.col_modes)
    grad = F.pad(grad, [0, cols - shape.cols, 0, rows - shape.rows])
    return _chain_gradients(cores, grad.reshape(1, rows, cols, 1))


def _chain_gradients(cores: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Gradients of neighbouring cores from that of their product: of its two halves, then within each."""
    if len(cores) == 1:
        return [grad]
    left, right = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    of_left, of_right = split_pair(grad, reduce(merge_pair, left), reduce(merge_pair, right))
    return _chain_gradients(left, of_left) + _chain_gradients(right, of_right)


def split_pair(grad: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Adjoint of ``merge_pair``: gradients of both from that of their product ``(a, v * w, e * f, b)``."""
    a, v, e, r = left.shape
    _, w, f, b = right.shape
    wide = grad.reshape(a, v, w, e, f, b).permute(0, 1, 3, 2, 4, 5).reshape(a * v * e, w * f * b)
    of_left = torch.mm(wide, right.reshape(r, -1).t()).reshape(left.shape)
    return of_left, torch.mm(left.reshape(-1, r).t(), wide).reshape(right.shape)

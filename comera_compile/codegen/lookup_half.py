"""One half of a tensor-train-matrix lookup: the product of neighbouring cores at many indices, and its gradient.

The same value either gathered (only the indices that occur, small batched products) or as a table (every index, one
large product a core). Written by hand in both directions, since it runs inside a custom op, below autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comera_compile.tt.packing import merge_pair


@dataclass(frozen=True)
class Half:
    """Values of one half and what its gradient needs.

    Args:
        values: ``[n, left rank, columns, right rank]``.
        position: which of the n values each index uses.
        digits: index into each core's rows of each value (gathered), or None (table).
        partial: products of the first k cores, k = 1, 2, ... without the last.
    """

    values: Tensor
    position: Tensor
    digits: tuple[Tensor, ...] | None
    partial: tuple[Tensor, ...]


def gathered_half(cores: Sequence[Tensor], indices: Tensor) -> Half:
    """Only the indices that occur, each once. ``cores``: ``(r, v, e, r')`` each; ``indices``: ``[n]``."""
    needed, position = torch.unique(indices, return_inverse=True)
    digits = _digits(needed, [core.shape[1] for core in cores])
    count, left = needed.numel(), cores[0].shape[0]
    product = _slices(cores[0], digits[0]).reshape(count, left * cores[0].shape[2], cores[0].shape[3])
    partial = []
    for core, digit in zip(cores[1:], digits[1:], strict=True):
        partial.append(product)
        piece = _slices(core, digit).reshape(count, core.shape[0], core.shape[2] * core.shape[3])
        product = torch.bmm(product, piece).reshape(count, product.shape[1] * core.shape[2], core.shape[3])
    values = product.reshape(count, left, product.shape[1] // left, cores[-1].shape[3])
    return Half(values, position, tuple(digits), tuple(partial))


def table_half(cores: Sequence[Tensor], indices: Tensor) -> Half:
    """Every index of the half: ``[product of v, left rank, columns, right rank]``."""
    product = cores[0]
    partial = []
    for core in cores[1:]:
        partial.append(product)
        product = merge_pair(product, core)
    return Half(product.permute(1, 0, 2, 3), indices, None, tuple(partial))


def half_gradients(half: Half, cores: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Gradients of the cores from the gradient of ``half.values``."""
    if half.digits is None:
        return _table_gradients(half, cores, grad)
    count = grad.shape[0]
    grads: list[Tensor] = []
    grad = grad.reshape(count, -1, cores[-1].shape[3])
    for core, digit, product in zip(cores[:0:-1], half.digits[:0:-1], half.partial[::-1], strict=True):
        rank, _, e, following = core.shape
        wide = grad.reshape(count, product.shape[1], e * following)
        grads.append(_scatter(torch.bmm(product.transpose(1, 2), wide), digit, core))
        grad = torch.bmm(wide, _slices(core, digit).reshape(count, rank, e * following).transpose(1, 2))
    grads.append(_scatter(grad, half.digits[0], cores[0]))
    return grads[::-1]


def _table_gradients(half: Half, cores: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    grad = grad.permute(1, 0, 2, 3)
    grads: list[Tensor] = []
    for core, product in zip(cores[:0:-1], half.partial[::-1], strict=True):
        a, v, e, r = product.shape
        _, w, f, b = core.shape
        wide = grad.reshape(a, v, w, e, f, b).permute(0, 1, 3, 2, 4, 5).reshape(a * v * e, w * f * b)
        grads.append(torch.mm(product.reshape(-1, r).t(), wide).reshape(core.shape))
        grad = torch.mm(wide, core.reshape(r, -1).t()).reshape(a, v, e, r)
    return [grad.contiguous(), *grads[::-1]]


def _slices(core: Tensor, digit: Tensor) -> Tensor:
    """``[n, r, e, r']``: the core at each digit (rows first, so that each slice is one contiguous copy)."""
    return core.transpose(0, 1).contiguous().index_select(0, digit)


def _scatter(grad: Tensor, digit: Tensor, core: Tensor) -> Tensor:
    """Adjoint of ``_slices``: sums of equal digits."""
    r, v, e, following = core.shape
    total = sum_rows(grad.reshape(digit.numel(), -1), digit, v)
    return total.reshape(v, r, e, following).transpose(0, 1)


def sum_rows(rows: Tensor, position: Tensor, count: int) -> Tensor:
    """``[count, width]``: sums of the rows of equal position.

    The gradient of an embedding lookup is this very sum, and runs in parallel; ``index_add_`` adds row by row.
    """
    total: Tensor = torch.ops.aten.embedding_dense_backward(rows.contiguous(), position, count, -1, False)
    return total


def _digits(indices: Tensor, modes: Sequence[int]) -> list[Tensor]:
    """Row-major digits of each index over the modes."""
    digits = []
    for mode in reversed(modes):
        digits.append(indices % mode)
        indices = indices // mode
    return digits[::-1]

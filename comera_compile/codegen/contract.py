"""Run one planned step with view, permute and a single mm or bmm: what Inductor then lowers to its GEMM calls."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from comera_compile.planning.step import Axes, MatrixForm, Step, Tensor


def contract(step: Step, left: torch.Tensor, right: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
    """``left . right`` of a step.

    Args:
        step: what is contracted with what.
        left, right: operands whose elements are in the order of ``step.left.axes`` and ``step.right.axes``.
        sizes: size of each axis (``t`` may be symbolic).

    Returns:
        Tensor of shape ``[sizes[a] for a in step.out.axes]``.
    """
    pairs = (step.left, left), (step.right, right)
    (first, a), (second, b) = pairs[::-1] if step.swapped else pairs
    rows, cols = step.free(first), step.free(second)
    a = _matrix(a, first, step.form(first, rows_first=True), (step.batch, rows, step.summed), sizes)
    b = _matrix(b, second, step.form(second, rows_first=False), (step.batch, step.summed, cols), sizes)
    product = torch.bmm(a, b) if step.batch else torch.mm(a, b)
    product = product.reshape([sizes[x] for x in step.product_axes])
    if step.product_axes == step.out.axes:
        return product
    return product.permute([step.product_axes.index(x) for x in step.out.axes]).contiguous()


def _matrix(
    value: torch.Tensor, tensor: Tensor, form: MatrixForm, groups: tuple[Axes, Axes, Axes], sizes: Mapping[str, int]
) -> torch.Tensor:
    """``value`` as a (batch, rows, columns) or (rows, columns) matrix of the given axis groups."""
    batch, rows, cols = (math.prod(sizes[a] for a in axes) for axes in groups)
    value = value.reshape([sizes[a] for a in tensor.axes])
    if form.copies:
        value = value.permute([tensor.axes.index(a) for a in form.order])
    shape = [cols, rows] if form.transposed else [rows, cols]
    value = value.reshape([batch, *shape] if groups[0] else shape)
    return value.transpose(-1, -2) if form.transposed else value

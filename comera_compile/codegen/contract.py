"""Run one planned step with view, permute and a single mm or bmm: what Inductor then lowers to its GEMM calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from comera_compile.planning.step import Axes, MatrixForm, Step, Tensor


def contract(step: Step, left: torch.Tensor, right: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
    """``left . right`` of a step.

    Args:
        step: what is contracted with what.
        left, right: operands whose elements are in the order of ``step.left.axes`` and ``step.right.axes``.
        sizes: size of each axis (``t`` may be symbolic).

    Returns:
        Tensor whose elements are in the order of ``step.out.axes``; its shape is that of the matrix product where no
        copy was needed. Each view that is not made is one node less for every stage of the compiler.
    """
    pairs = (step.left, left), (step.right, right)
    (first, a), (second, b) = pairs[::-1] if step.swapped else pairs
    rows, cols = step.free(first), step.free(second)
    a = _matrix(a, first, step.form(first, rows_first=True), (step.batch, rows, step.summed), sizes)
    b = _matrix(b, second, step.form(second, rows_first=False), (step.batch, step.summed, cols), sizes)
    product = torch.bmm(a, b) if step.batch else torch.mm(a, b)
    if step.product_axes == step.out.axes:
        return product
    product = product.reshape([sizes[x] for x in step.product_axes])
    return product.permute([step.product_axes.index(x) for x in step.out.axes]).contiguous()


def _matrix(
    value: torch.Tensor, tensor: Tensor, form: MatrixForm, groups: tuple[Axes, Axes, Axes], sizes: Mapping[str, int]
) -> torch.Tensor:
    """``value`` as a (batch, rows, columns) or (rows, columns) matrix of the given axis groups."""
    batch, rows, cols = (math.prod(sizes[a] for a in axes) for axes in groups)
    if form.copies:
        value = value.reshape([sizes[a] for a in tensor.axes])
        value = value.permute([tensor.axes.index(a) for a in form.order])
    shape = [cols, rows] if form.transposed else [rows, cols]
    value = viewed(value, [batch, *shape] if groups[0] else shape)
    return value.transpose(-1, -2) if form.transposed else value


def viewed(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``value.reshape(shape)``, and no view where the shape is that already (symbolic sizes are not compared)."""
    known = all(isinstance(size, int) for size in (*value.shape, *shape))
    return value if known and tuple(value.shape) == tuple(shape) else value.reshape(list(shape))


def of_its_own(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``value`` of another shape, where nothing else will read it: a result of an ``autograd.Function``.

    To autograd it is no view. A view that such a function returns may not be written to in place, which models do to
    the output of a layer (``h += x``, ``h.relu_()``).
    """
    if viewed(value, shape) is value and not value._is_view():
        return value
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(value, list(shape))
    return result

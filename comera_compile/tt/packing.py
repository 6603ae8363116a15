"""From the packed vector of one tensor-train weight to its cores and to the dense matrix, and back.

Everything here is differentiable and made of pairwise steps only (``mm``, ``reshape``, ``permute``, ``where``), so it
works under autograd, ``torch.func``, fake tensors and in a traced graph alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera_compile.errors import ShapeError
from comera_compile.tt.shape import TTShape


def unpack(packed: Tensor, shape: TTShape) -> list[Tensor]:
    """The stored cores as views of the packed vector; a core of the weight is ``shape.scale`` times its stored one.

    Args:
        packed: ``(shape.numel,)``, all stored cores one after the other, each row-major.
        shape: what the vector means.

    Returns:
        One tensor a core, in ``shape.core_shapes``.

    Raises:
        ShapeError: the vector is not one-dimensional of length ``shape.numel``.
    """
    if packed.dim() != 1 or packed.shape[0] != shape.numel:
        raise ShapeError(f"a packed weight of '{shape.encode()}' is ({shape.numel},), got {tuple(packed.shape)}")
    parts = packed.split_with_sizes(list(shape.core_sizes))
    return [part.view(size) for part, size in zip(parts, shape.core_shapes, strict=True)]


def cores_of(packed: Tensor, shape: TTShape) -> list[Tensor]:
    """The cores of the weight, ``shape.scale`` times the stored ones, in ``shape.core_shapes``.

    Raises:
        ShapeError: as :func:`unpack`.
    """
    stored = unpack(packed, shape)
    return stored if shape.scale == 1.0 else [core * shape.scale for core in stored]


def pack(cores: Sequence[Tensor], shape: TTShape) -> Tensor:
    """Inverse of :func:`cores_of`: a new ``(shape.numel,)`` vector of the cores divided by ``shape.scale``.

    Raises:
        ShapeError: number or sizes of the cores differ from ``shape.core_shapes``.
    """
    got = tuple(tuple(core.shape) for core in cores)
    if got != shape.core_shapes:
        raise ShapeError(f"cores of sizes {shape.core_shapes} expected for '{shape.encode()}', got {got}")
    packed = torch.cat([core.reshape(-1) for core in cores])
    return packed if shape.scale == 1.0 else packed / shape.scale


def merge_rows(cores: Sequence[Tensor]) -> Tensor:
    """Prefix product of the row cores of a ``tt`` weight: ``(prod of row modes, bond)``, first mode outermost."""
    merged = cores[0].reshape(-1, cores[0].shape[-1])
    for core in cores[1:]:
        merged = torch.mm(merged, core.reshape(core.shape[0], -1)).reshape(-1, core.shape[-1])
    return merged


def merge_cols(cores: Sequence[Tensor]) -> Tensor:
    """Suffix product of the column cores of a ``tt`` weight: ``(bond, prod of column modes)``.

    From the rank-1 end inwards: the cheaper order, since ranks shrink towards the end.
    """
    merged = cores[-1].reshape(cores[-1].shape[0], -1)
    for core in reversed(cores[:-1]):
        merged = torch.mm(core.reshape(-1, core.shape[-1]), merged).reshape(core.shape[0], -1)
    return merged


def merge_pair(left: Tensor, right: Tensor) -> Tensor:
    """Product of two neighbouring ``ttm`` cores: ``(a, v, e, r)`` and ``(r, w, f, b)`` to ``(a, v * w, e * f, b)``."""
    a, v, e, r = left.shape
    _, w, f, b = right.shape
    merged = torch.mm(left.reshape(-1, r), right.reshape(r, -1)).reshape(a, v, e, w, f, b)
    return merged.permute(0, 1, 3, 2, 4, 5).reshape(a, v * w, e * f, b)


def halves(cores: Sequence[Tensor], shape: TTShape) -> tuple[Tensor, Tensor]:
    """The two factors whose product holds the dense weight, cropped to the rows and columns that it needs.

    Args:
        cores: scaled cores of :func:`cores_of`.
        shape: what they mean.

    Returns:
        ``tt``: ``(rows, bond)`` and ``(bond, cols)``; the zero row is not applied. ``ttm``: one core
        ``(1, v, e, r)`` of the first ``order // 2`` cores and one ``(r, w, f, 1)`` of the others.
    """
    if shape.format == "tt":
        split = len(shape.row_modes)
        return merge_rows(cores[:split])[: shape.rows], merge_cols(cores[split:])[:, : shape.cols]
    split = max(1, len(cores) // 2)
    left = _chain(cores[:split])
    if split == len(cores):  # one core only: the other half is the number one
        return left, left.new_ones(1, 1, 1, 1)
    needed_rows = -(-shape.rows // math.prod(shape.row_modes[split:]))
    return left[:, :needed_rows], _chain(cores[split:])


def to_dense(packed: Tensor, shape: TTShape) -> Tensor:
    """The dense weight.

    ``tt``: ``W[i, j] = G_1[0, i_1, :] ... G_d[:, i_d, :] G_d+1[:, j_1, :] ... G_2d[:, j_d, 0]``; ``ttm``:
    ``W[i, j] = G_1[0, i_1, j_1, :] ... G_d[:, i_d, j_d, 0]``, where ``i_1 .. i_d`` are the row-major digits of ``i``
    over ``shape.row_modes`` and ``j_1 .. j_d`` those of ``j`` over ``shape.col_modes`` (CoMERA, arXiv 2405.14377,
    section 3, rows and columns exchanged: a ``nn.Linear`` weight has its outputs first).

    Args:
        packed: ``(shape.numel,)`` stored cores.
        shape: what they mean.

    Returns:
        ``(shape.rows, shape.cols)``; padding cropped, row ``shape.zero_row`` zero.

    Raises:
        ShapeError: as :func:`unpack`.
    """
    left, right = halves(cores_of(packed, shape), shape)
    if shape.format == "tt":
        return torch.mm(zero_row(left, shape.zero_row), right)
    return zero_row(merge_pair(left, right)[0, : shape.rows, : shape.cols, :].squeeze(-1), shape.zero_row)


def zero_row(matrix: Tensor, row: int) -> Tensor:
    """The matrix with one row set to zero and no gradient through it; unchanged when ``row`` is -1."""
    if row < 0:
        return matrix
    kept = torch.arange(matrix.shape[0], device=matrix.device) != row
    return torch.where(kept.unsqueeze(1), matrix, matrix.new_zeros(()))


def _chain(cores: Sequence[Tensor]) -> Tensor:
    """Product of neighbouring ``ttm`` cores, left to right."""
    merged = cores[0]
    for core in cores[1:]:
        merged = merge_pair(merged, core)
    return merged

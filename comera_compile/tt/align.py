"""Bring the cores of one tensor train as near to those of another as its freedom of gauge allows.

Between two neighbouring cores any invertible matrix and its inverse can be put in without changing the weight: two
decompositions of nearly the same weight may have quite different cores. Whoever averages cores must average like with
like.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comera_compile.tt.packing import cores_of, pack
from comera_compile.tt.shape import TTShape

_STRETCH = 1e4  # a gauge that stretches or shrinks by more joins weights that are not alike
_RIDGE = 1e-8


def align(packed: Tensor, reference: Tensor, shape: TTShape) -> Tensor | None:
    """The same weight as ``packed``, with cores near those of ``reference``.

    At every bond the products of all cores to its left span the column space of an unfolding. The matrix that takes
    the span of ``packed`` to that of ``reference`` with the smallest squared error is put in at the bond, its
    inverse on the other side.

    Args:
        packed, reference: ``(shape.numel,)``.
        shape: of both.

    Returns:
        A packed vector, or None where the two weights have too little in common for it.
    """
    ours = [_three_axes(core.double()) for core in cores_of(packed, shape)]
    theirs = [_three_axes(core.double()) for core in cores_of(reference, shape)]
    gauges = _gauges(ours, theirs)
    if gauges is None:
        return None
    aligned, left = [], ours[0].new_ones(1, 1)
    for core, right, size in zip(ours, [*gauges, left], shape.core_shapes, strict=True):
        solved = torch.linalg.solve(left, core.reshape(core.shape[0], -1)).reshape(core.shape)
        aligned.append((solved @ right).reshape(size))
        left = right
    return pack(aligned, shape).to(packed.dtype)


def _three_axes(core: Tensor) -> Tensor:
    return core.reshape(core.shape[0], -1, core.shape[-1])


def _gauges(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Tensor] | None:
    """One matrix a bond: the least-squares map between the left products, from their Gram matrices."""
    own = mixed = ours[0].new_ones(1, 1)
    gauges = []
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        own = torch.tensordot(a, torch.tensordot(own, a, 1), ([0, 1], [0, 1]))
        mixed = torch.tensordot(a, torch.tensordot(mixed, b, 1), ([0, 1], [0, 1]))
        # Directions that carry nothing (a weight of lower rank than its shape allows) are left as they are.
        ridge = torch.eye(len(own), dtype=own.dtype, device=own.device) * (_RIDGE * own.trace() / len(own))
        gauge = torch.linalg.solve(own + ridge, mixed + ridge)
        stretch = torch.linalg.svdvals(gauge)
        if not bool((stretch[0] < _STRETCH) & (stretch[-1] > 1 / _STRETCH)):
            return None
        gauges.append(gauge)
    return gauges

"""Look up rows of a tensor-train-matrix table: one op forward, one op backward, duplicates computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from comera_compile.planning.lookup_plan import LookupPlan
from comera_compile.tt.packing import cores_of, merge_pair
from comera_compile.tt.shape import TTShape


@torch.library.custom_op("comera::ttm_lookup", mutates_args=())
def ttm_lookup(packed: torch.Tensor, ids: torch.Tensor, layout: str) -> torch.Tensor:
    """Rows ``ids`` of the table: shape ``[*ids.shape, cols]``.

    Raises:
        IndexError: an id is negative or not below the number of rows, as ``nn.Embedding`` does.
    """
    plan = LookupPlan.decode(layout)
    unique, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
    _check_ids(unique, plan.shape)
    rows = _unique_rows(packed, unique, plan)
    return rows.index_select(0, inverse).reshape([*ids.shape, plan.shape.cols])


@ttm_lookup.register_fake
def _fake(packed: torch.Tensor, ids: torch.Tensor, layout: str) -> torch.Tensor:
    return packed.new_empty([*ids.shape, LookupPlan.decode(layout).shape.cols])


@torch.library.custom_op("comera::ttm_lookup_backward", mutates_args=())
def ttm_lookup_backward(packed: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor, layout: str) -> torch.Tensor:
    """Gradient of the packed vector from the gradient ``[*ids.shape, cols]`` of the looked-up rows.

    Gradients of equal ids are added first, so every core product is differentiated once a unique id.
    """
    plan = LookupPlan.decode(layout)
    unique, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
    summed = grad.new_zeros([unique.numel(), plan.shape.cols])
    summed.index_add_(0, inverse, grad.reshape(-1, plan.shape.cols))
    # The body of a custom op runs below autograd; torch.func brings its own differentiation.
    _, pullback = torch.func.vjp(lambda p: _unique_rows(p, unique, plan), packed.detach())
    gradient: torch.Tensor = pullback(summed.to(packed.dtype))[0]
    return gradient.contiguous()


@ttm_lookup_backward.register_fake
def _backward_fake(packed: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor, layout: str) -> torch.Tensor:
    return torch.empty_like(packed)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.layout = inputs[2]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    packed, ids = ctx.saved_tensors
    return ttm_lookup_backward(packed, ids, grad, ctx.layout), None, None


ttm_lookup.register_autograd(_backward, setup_context=_setup_context)


def _check_ids(unique: torch.Tensor, shape: TTShape) -> None:
    # `unique` is sorted. On a GPU the check would wait for the device; there an id too large is caught by the gathers.
    if unique.device.type == "cpu" and unique.numel() and (int(unique[0]) < 0 or int(unique[-1]) >= shape.rows):
        raise IndexError(f"index out of range in embedding: expected 0 to {shape.rows - 1}, got {unique.tolist()[-1]}")


def _unique_rows(packed: torch.Tensor, ids: torch.Tensor, plan: LookupPlan) -> torch.Tensor:
    """``[len(ids), cols]`` for ids without duplicates."""
    shape = plan.shape
    cores = cores_of(packed, shape)
    right_rows = math.prod(shape.row_modes[plan.split :])
    left = _half(cores[: plan.split], ids // right_rows, plan, 0)
    right = _half(cores[plan.split :], ids % right_rows, plan, 1) if plan.split < len(cores) else None
    rows = left if right is None else torch.bmm(left, right)
    rows = rows.reshape(ids.numel(), math.prod(shape.col_modes))[:, : shape.cols]
    if shape.zero_row >= 0:
        rows = torch.where((ids != shape.zero_row).unsqueeze(1), rows, rows.new_zeros(()))
    return rows


def _half(cores: Sequence[torch.Tensor], indices: torch.Tensor, plan: LookupPlan, half: int) -> torch.Tensor:
    """Product of neighbouring cores at each index: ``[n, columns, rank]`` (first half) or ``[n, rank, columns]``."""
    needed, inverse = torch.unique(indices, return_inverse=True)
    if plan.uses_table(needed.numel(), half):
        values, position = _table(cores), indices
    else:
        values, position = _gathered(cores, needed), inverse
    rank = cores[-1].shape[-1] if half == 0 else cores[0].shape[0]
    size = (-1, rank) if half == 0 else (rank, -1)
    if values.shape[0] == 0:
        return values.reshape(0, *(math.prod(values.shape[1:]) // rank if s < 0 else s for s in size))
    return values.index_select(0, position).reshape(indices.numel(), *size)


def _table(cores: Sequence[torch.Tensor]) -> torch.Tensor:
    """All indices: ``[rows, left rank, columns, right rank]``."""
    merged = cores[0]
    for core in cores[1:]:
        merged = merge_pair(merged, core)
    return merged.permute(1, 0, 2, 3).contiguous()


def _gathered(cores: Sequence[torch.Tensor], indices: torch.Tensor) -> torch.Tensor:
    """Only the given indices: ``[n, left rank, columns, right rank]``."""
    digits = _digits(indices, [core.shape[1] for core in cores])
    count, left = indices.numel(), cores[0].shape[0]
    product = cores[0].index_select(1, digits[0]).permute(1, 0, 2, 3).reshape(count, -1, cores[0].shape[3])
    columns = cores[0].shape[2]
    for core, digit in zip(cores[1:], digits[1:], strict=True):
        rank, _, e, following = core.shape
        piece = core.index_select(1, digit).permute(1, 0, 2, 3).reshape(count, rank, e * following)
        product = torch.bmm(product, piece).reshape(count, left * columns * e, following)
        columns *= e
    return product.reshape(count, left, columns, cores[-1].shape[3])


def _digits(indices: torch.Tensor, modes: Sequence[int]) -> list[torch.Tensor]:
    digits = []
    for mode in reversed(modes):
        digits.append(indices % mode)
        indices = indices // mode
    return digits[::-1]

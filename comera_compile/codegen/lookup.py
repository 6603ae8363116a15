"""Look up rows of a tensor-train-matrix table: one op forward, one op backward, duplicates computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from comera_compile.codegen.lookup_half import Half, gathered_half, half_gradients, sum_rows, table_half
from comera_compile.planning.lookup_plan import LookupPlan
from comera_compile.tt.packing import cores_of
from comera_compile.tt.shape import TTShape


@torch.library.custom_op("comera::ttm_lookup", mutates_args=())
def ttm_lookup(packed: torch.Tensor, ids: torch.Tensor, layout: str) -> torch.Tensor:
    """Rows ``ids`` of the table: shape ``[*ids.shape, cols]``.

    Raises:
        IndexError: an id is negative or not below the number of rows, as ``nn.Embedding`` does.
    """
    plan = LookupPlan.decode(layout)
    if ids.numel() == 0:
        return packed.new_empty([*ids.shape, plan.shape.cols])
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
    if ids.numel() == 0:
        return torch.zeros_like(packed)
    unique, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
    summed = sum_rows(grad.reshape(-1, plan.shape.cols), inverse, unique.numel())
    return _unique_gradient(packed, unique, summed.to(packed.dtype), plan)


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
    # On a GPU the check would wait for the device; there an id too large is caught by the gathers.
    if unique.device.type != "cpu":
        return
    smallest, largest = int(unique[0]), int(unique[-1])  # `unique` is sorted
    if smallest < 0 or largest >= shape.rows:
        wrong = smallest if smallest < 0 else largest
        raise IndexError(f"index out of range in embedding: expected 0 to {shape.rows - 1}, got {wrong}")


def _unique_rows(packed: torch.Tensor, ids: torch.Tensor, plan: LookupPlan) -> torch.Tensor:
    """``[len(ids), cols]`` for ids without duplicates."""
    left, right = _halves(packed, ids, plan)
    rows = torch.bmm(_at(left, 0), _at(right, 1)) if right is not None else _at(left, 0)
    rows = rows.reshape(ids.numel(), math.prod(plan.shape.col_modes))[:, : plan.shape.cols]
    return _masked(rows, ids, plan.shape)


def _unique_gradient(packed: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor, plan: LookupPlan) -> torch.Tensor:
    """Gradient of the packed vector from ``grad``: ``[len(ids), cols]``."""
    shape = plan.shape
    cores = cores_of(packed, shape)
    left, right = _halves(packed, ids, plan)
    grad = F.pad(_masked(grad, ids, shape), [0, math.prod(shape.col_modes) - shape.cols])
    if right is None:
        grads = half_gradients(left, cores, _added(grad, left))
    else:
        a, b = _at(left, 0), _at(right, 1)
        grad = grad.reshape(ids.numel(), a.shape[1], b.shape[2])
        first = half_gradients(left, cores[: plan.split], _added(torch.bmm(grad, b.transpose(1, 2)), left))
        second = half_gradients(right, cores[plan.split :], _added(torch.bmm(a.transpose(1, 2), grad), right))
        grads = first + second
    # core = scale * stored, so the stored core's gradient is scale times the core's.
    return torch.cat([g.reshape(-1) for g in grads]) * shape.scale


def _halves(packed: torch.Tensor, ids: torch.Tensor, plan: LookupPlan) -> tuple[Half, Half | None]:
    cores = cores_of(packed, plan.shape)
    below = math.prod(plan.shape.row_modes[plan.split :])
    left = _half(cores[: plan.split], ids // below, plan, 0)
    return left, _half(cores[plan.split :], ids % below, plan, 1) if plan.split < len(cores) else None


def _half(cores: Sequence[torch.Tensor], indices: torch.Tensor, plan: LookupPlan, half: int) -> Half:
    needed = torch.unique(indices).numel()
    return table_half(cores, indices) if plan.uses_table(needed, half) else gathered_half(cores, indices)


def _at(half: Half, side: int) -> torch.Tensor:
    """The half at each id: ``[ids, columns, rank]`` (side 0) or ``[ids, rank, columns]`` (side 1)."""
    n, left, columns, right = half.values.shape
    flat = half.values.reshape(n, left * columns * right).index_select(0, half.position)
    return flat.reshape(-1, left * columns, right) if side == 0 else flat.reshape(-1, left, columns * right)


def _added(grad: torch.Tensor, half: Half) -> torch.Tensor:
    """Adjoint of ``_at``: gradients of ids that share a value of the half are added."""
    n = half.values.shape[0]
    return sum_rows(grad.reshape(half.position.numel(), -1), half.position, n).reshape(half.values.shape)


def _masked(rows: torch.Tensor, ids: torch.Tensor, shape: TTShape) -> torch.Tensor:
    """The padding row is zero and passes no gradient."""
    if shape.zero_row < 0:
        return rows
    return torch.where((ids != shape.zero_row).unsqueeze(1), rows, rows.new_zeros(()))

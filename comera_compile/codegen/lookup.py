"""Look up rows of a tensor-train-matrix table: one op forward, one op backward, duplicates computed once."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_compile.codegen.cpu import lookup_kernels
from comera_compile.codegen.lookup_groups import sum_rows
from comera_compile.codegen.lookup_join import Join, gradients, joins, values
from comera_compile.planning.lookup_plan import LookupPlan
from comera_compile.tt.packing import unpack
from comera_compile.tt.shape import TTShape

_operators = torch.library.Library("comera", "FRAGMENT")
_operators.define("ttm_lookup(Tensor packed, Tensor ids, str layout) -> Tensor")
_operators.define("ttm_lookup_backward(Tensor packed, Tensor ids, Tensor grad, str layout) -> Tensor")


def ttm_lookup(packed: Tensor, ids: Tensor, layout: str) -> Tensor:
    """Rows ``ids`` of the table: shape ``[*ids.shape, cols]``.

    Raises:
        IndexError: an id is negative or not below the number of rows, as ``nn.Embedding`` does.
    """
    rows: Tensor = Lookup.apply(packed, ids, layout)  # type: ignore[no-untyped-call]
    return rows


def ttm_lookup_backward(packed: Tensor, ids: Tensor, grad: Tensor, layout: str) -> Tensor:
    """Gradient of the packed vector from the gradient ``[*ids.shape, cols]`` of the looked-up rows.

    Gradients of equal ids are added first, so every core product is differentiated once a unique id.
    """
    made: Tensor = torch.ops.comera.ttm_lookup_backward.default(packed, ids, grad, layout)
    return made


class Lookup(torch.autograd.Function):
    """:func:`ttm_lookup`, differentiable in the packed vector; an operator each way."""

    @staticmethod
    def forward(packed: Tensor, ids: Tensor, layout: str) -> Tensor:
        """``packed``: ``(numel,)``; ``ids``: int32 or int64, any shape."""
        rows: Tensor = torch.ops.comera.ttm_lookup.default(packed, ids, layout)
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps the packed vector and the ids."""
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.layout = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of the packed vector."""
        packed, ids = ctx.saved_tensors
        return ttm_lookup_backward(packed, ids, grads[0], ctx.layout), None, None


@torch.library.impl(_operators, "ttm_lookup", "CompositeExplicitAutograd")
def look_up(packed: Tensor, ids: Tensor, layout: str) -> Tensor:
    """:func:`ttm_lookup` without torch's dispatcher, and not differentiable."""
    plan = LookupPlan.decode(layout)
    if ids.numel() == 0:
        return packed.new_empty([*ids.shape, plan.shape.cols])
    made = lookup_kernels.lookup(packed, ids, plan.shape)
    return _lookup(packed, ids, plan) if made is None else made


@torch.library.impl(_operators, "ttm_lookup", "Meta")
def _forward_meta(packed: Tensor, ids: Tensor, layout: str) -> Tensor:
    return packed.new_empty([*ids.shape, LookupPlan.decode(layout).shape.cols])


@torch.no_grad()
def _lookup(packed: Tensor, ids: Tensor, plan: LookupPlan) -> Tensor:
    """The lookup by torch's own operators."""
    unique, inverse = torch.unique(ids.reshape(-1).long(), return_inverse=True)
    _check_ids(unique, plan.shape)
    steps = joins(unique, plan)
    rows = _chain(_rows_first(packed, plan.shape), steps)[-1]
    rows = _zeroed(rows.reshape(rows.shape[0], -1)[:, : plan.shape.cols].contiguous(), unique, steps, plan.shape)
    return rows.index_select(0, _slots(unique, steps).index_select(0, inverse)).reshape([*ids.shape, plan.shape.cols])


@torch.library.impl(_operators, "ttm_lookup_backward", "CompositeExplicitAutograd")
def packed_gradient(packed: Tensor, ids: Tensor, grad: Tensor, layout: str) -> Tensor:
    """:func:`ttm_lookup_backward` without torch's dispatcher."""
    plan = LookupPlan.decode(layout)
    if ids.numel() == 0:
        return torch.zeros_like(packed)
    made = lookup_kernels.gradient(packed, ids, grad, plan.shape)
    return _lookup_backward(packed, ids, grad, plan) if made is None else made


@torch.library.impl(_operators, "ttm_lookup_backward", "Meta")
def _backward_meta(packed: Tensor, ids: Tensor, grad: Tensor, layout: str) -> Tensor:
    return torch.empty_like(packed)


@torch.no_grad()
def _lookup_backward(packed: Tensor, ids: Tensor, grad: Tensor, plan: LookupPlan) -> Tensor:
    """The gradient by torch's own operators."""
    unique, inverse = torch.unique(ids.reshape(-1).long(), return_inverse=True)
    steps = joins(unique, plan)
    count = steps[-1].groups.member.numel() if steps else plan.shape.row_modes[0]
    grad = grad.reshape(-1, plan.shape.cols).contiguous()
    summed = sum_rows(grad, _slots(unique, steps).index_select(0, inverse), count).to(packed.dtype)
    summed = F.pad(_zeroed(summed, unique, steps, plan.shape), [0, math.prod(plan.shape.col_modes) - plan.shape.cols])
    return _core_gradients(packed, steps, summed, plan.shape)


def _check_ids(unique: torch.Tensor, shape: TTShape) -> None:
    # On a GPU the check would wait for the device; there an id too large is caught by the gathers.
    if unique.device.type != "cpu":
        return
    smallest, largest = int(unique[0]), int(unique[-1])  # `unique` is sorted
    if smallest < 0 or largest >= shape.rows:
        wrong = smallest if smallest < 0 else largest
        raise IndexError(f"index out of range in embedding: expected 0 to {shape.rows - 1}, got {wrong}")


def _slots(unique: Tensor, steps: list[Join]) -> Tensor:
    """Where the row of each distinct id lies."""
    return steps[-1].groups.slot if steps else unique


def _zeroed(rows: Tensor, unique: Tensor, steps: list[Join], shape: TTShape) -> Tensor:
    """The padding row is zero and passes no gradient; in place."""
    if shape.zero_row < 0:
        return rows
    return rows.index_fill_(0, _slots(unique, steps)[unique == shape.zero_row], 0)


def _rows_first(packed: Tensor, shape: TTShape) -> list[Tensor]:
    """The scaled cores, ``(v, r, e * r')`` each, never views: the slice of a row is one contiguous block."""
    cores = []
    for stored in unpack(packed, shape):
        r, v, e, following = stored.shape
        core = packed.new_empty(v, r, e, following)
        cores.append(torch.mul(stored.transpose(0, 1), shape.scale, out=core).view(v, r, e * following))
    return cores


def _chain(cores: list[Tensor], steps: list[Join]) -> list[Tensor]:
    """Values of the distinct prefixes of one digit, of two, ..., ``[n, columns, rank]`` each."""
    made = [cores[0].view(cores[0].shape[0], -1, _rank(cores, 0))]
    for k, step in enumerate(steps, 1):
        made.append(values(step, made[-1], cores[k]).view(step.groups.member.numel(), -1, _rank(cores, k)))
    return made


def _rank(cores: list[Tensor], k: int) -> int:
    """Rank between core k and the next one."""
    return cores[k + 1].shape[1] if k + 1 < len(cores) else 1


def _core_gradients(packed: Tensor, steps: list[Join], grad: Tensor, shape: TTShape) -> Tensor:
    """Gradient of the packed vector from that of the rows in their slots."""
    cores = _rows_first(packed, shape)
    before = _chain(cores, steps[:-1])
    total = torch.empty_like(packed)
    for k in range(len(steps), 0, -1):
        core = cores[k]
        wide = grad.view(grad.shape[0], before[k - 1].shape[1], core.shape[2])
        grad, core_grad = gradients(steps[k - 1], before[k - 1], core, wide)
        _store(total, k, core_grad, shape)
    _store(total, 0, grad, shape)
    return total


def _store(total: Tensor, k: int, core_grad: Tensor, shape: TTShape) -> None:
    """Write a core's gradient to its place: core = scale * stored, so the stored core's is scale times it."""
    r, v, e, following = shape.core_shapes[k]
    place = unpack(total, shape)[k]
    torch.mul(core_grad.reshape(v, r, e, following).transpose(0, 1), shape.scale, out=place)

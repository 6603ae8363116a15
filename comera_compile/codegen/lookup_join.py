"""Joining the values of distinct prefixes with one more core of a tensor-train-matrix table, and its gradient.

Written by hand in both directions, since it runs inside a custom op, below autograd. A core has its rows first here:
``(v, r, w)`` with w columns times right rank; a prefix's value is ``(c, r)`` with c columns. The pair's value is their
product ``(c, w)``, and lies in the slot that the grouping gives to the pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comera_compile.codegen.lookup_groups import Groups, group, product, product_into, sum_rows
from comera_compile.planning.lookup_plan import LookupPlan


@dataclass(frozen=True)
class Join:
    """The pairs of one join.

    Args:
        prefix: ``[pairs]``, where the value of each pair's prefix lies among the values before.
        digit: ``[pairs]``, each pair's row of the core.
        groups: of the pairs, by digit or by prefix.
        by_digit: which of the two.
    """

    prefix: Tensor
    digit: Tensor
    groups: Groups
    by_digit: bool


def joins(ids: Tensor, plan: LookupPlan) -> list[Join]:
    """The joins that lead to distinct ids, in ascending order, from the second core on; none for an order of 1."""
    modes = plan.shape.row_modes
    needed: list[tuple[Tensor, Tensor, int]] = []  # digit, index of the prefix among the distinct ones, their number
    for k in range(len(modes) - 1, 0, -1):
        digit, ids = ids % modes[k], ids // modes[k]
        if k == 1:  # the first core's slices are all there
            needed.append((digit, ids, modes[0]))
        else:
            ids, index = torch.unique_consecutive(ids, return_inverse=True)
            needed.append((digit, index, ids.numel()))
    made: list[Join] = []
    for k, (digit, index, prefixes) in enumerate(reversed(needed), 1):
        by_digit = plan.groups_by_digit(k, pairs=digit.numel(), prefixes=prefixes)
        groups = group(digit, modes[k]) if by_digit else group(index, prefixes)
        made.append(Join(made[-1].groups.slot.index_select(0, index) if made else index, digit, groups, by_digit))
    return made


def values(join: Join, before: Tensor, core: Tensor) -> Tensor:
    """``[slots, c, w]`` from the values before, ``[n, c, r]``, and the core, ``[v, r, w]``.

    Slots that no pair has hold some pair's value.
    """
    c, r, w = before.shape[1], core.shape[1], core.shape[2]
    left, right = _operands(join, before, core)
    out = before.new_empty(join.groups.member.numel(), c, w)
    for b in join.groups.buckets:
        if join.by_digit:
            product_into(out[b.slots].view(b.count, -1, w), left[b.slots].view(b.count, -1, r), right[b.groups])
        else:
            made = product(left[b.groups], _side_by_side(right[b.slots], b.count))
            out[b.slots].view(b.count, b.width, c, w).copy_(made.unflatten(2, (b.width, w)).transpose(1, 2))
    return out


def gradients(join: Join, before: Tensor, core: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the values before and of the core, from that of the pairs' values (zero in unowned slots)."""
    left, right = _operands(join, before, core)
    run = _digit_gradients if join.by_digit else _prefix_gradients
    left_grad, right_grad = run(join, left, right, grad)
    if join.by_digit:
        place = join.prefix.index_select(0, join.groups.member)
        before_grad = sum_rows(left_grad.flatten(1), place, before.shape[0]).view_as(before)
        return before_grad, _placed(right_grad, join.groups.keys, core)
    core_grad = sum_rows(right_grad.flatten(1), join.digit.index_select(0, join.groups.member), core.shape[0]).view_as(
        core
    )
    return _placed(left_grad, _group_prefix(join), before), core_grad


def _operands(join: Join, before: Tensor, core: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the prefixes and slices of the core: one a slot of what is gathered, one a group of what is shared."""
    member = join.groups.member
    if join.by_digit:
        whole = join.groups.keys.numel() == core.shape[0] and len(join.groups.buckets) == 1
        shared = core if whole else core.index_select(0, join.groups.keys)
        return before.index_select(0, join.prefix.index_select(0, member)), shared
    return before.index_select(0, _group_prefix(join)), core.index_select(0, join.digit.index_select(0, member))


def _group_prefix(join: Join) -> Tensor:
    """Where the value of each group's prefix lies (grouped by prefix)."""
    first = torch.cat([torch.arange(b.slots.start, b.slots.stop, b.width) for b in join.groups.buckets])
    member = join.groups.member.index_select(0, first.to(join.prefix.device))
    return join.prefix.index_select(0, member)


def _side_by_side(slots: Tensor, groups: int) -> Tensor:
    """``[slots, a, w]`` to ``[groups, a, width * w]``."""
    return slots.view(groups, -1, *slots.shape[1:]).transpose(1, 2).flatten(2)


def _digit_gradients(join: Join, left: Tensor, right: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    r, w = right.shape[1], right.shape[2]
    left_grad, right_grad = torch.empty_like(left), torch.empty_like(right)
    for b in join.groups.buckets:
        wide = grad[b.slots].view(b.count, -1, w)
        mine = left[b.slots].view(b.count, -1, r)
        product_into(right_grad[b.groups], mine.transpose(1, 2), wide)
        product_into(left_grad[b.slots].view(b.count, -1, r), wide, right[b.groups].transpose(1, 2))
    return left_grad, right_grad


def _prefix_gradients(join: Join, left: Tensor, right: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    r, w = right.shape[1], right.shape[2]
    left_grad, right_grad = torch.empty_like(left), torch.empty_like(right)
    for b in join.groups.buckets:
        wide = _side_by_side(grad[b.slots], b.count)
        product_into(left_grad[b.groups], wide, _side_by_side(right[b.slots], b.count).transpose(1, 2))
        made = product(left[b.groups].transpose(1, 2), wide)
        right_grad[b.slots].view(b.count, b.width, r, w).copy_(made.unflatten(2, (b.width, w)).transpose(1, 2))
    return left_grad, right_grad


def _placed(rows: Tensor, place: Tensor, like: Tensor) -> Tensor:
    """The rows at their distinct places, zeros elsewhere."""
    count = like.shape[0]
    source = torch.full([count], -1, dtype=place.dtype, device=place.device)
    source.index_copy_(0, place, torch.arange(place.numel(), device=place.device))
    made = rows.index_select(0, source.clamp(min=0))  # faster than to copy row by row to its place
    return made if place.numel() == count else made.index_fill_(0, (source < 0).nonzero().squeeze(1), 0)

"""Members of equal key side by side: groups padded to a few widths, so that many small products are few large ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

# All groups get the largest one's width if that makes at most this many times as many slots as there are members.
EVEN = 1.3


@dataclass(frozen=True)
class Bucket:
    """Neighbouring groups of one width, and their slots."""

    groups: slice
    slots: slice
    width: int

    @property
    def count(self) -> int:
        """Number of groups."""
        return int(self.groups.stop - self.groups.start)


@dataclass(frozen=True)
class Groups:
    """Where each member lies.

    Args:
        keys: ``[groups]``, the key of each group; groups of one width are neighbours.
        slot: ``[members]``, the slot of each member. Slots of a group are neighbours.
        member: ``[slots]``, the member of each slot; 0 in a slot that nobody has.
        buckets: groups and slots by width.
    """

    keys: Tensor
    slot: Tensor
    member: Tensor
    buckets: tuple[Bucket, ...]


def group(keys: Tensor, count: int) -> Groups:
    """Group members by key.

    Args:
        keys: ``[members]`` int64 in ``[0, count)``, at least one.
        count: number of possible keys.
    """
    sizes = torch.bincount(keys, minlength=count)
    present = sizes.nonzero().squeeze(1)
    largest = int(sizes.max())
    if present.numel() * largest <= EVEN * keys.numel():
        widths = torch.full_like(present, largest)
        buckets = _buckets([(present.numel(), largest)])
    else:
        present, widths, buckets = _by_width(present, sizes.index_select(0, present), largest)
    first = torch.empty_like(sizes).index_copy_(0, present, widths.cumsum(0) - widths)
    ordered, order = torch.sort(keys)
    # the k-th of all members in order is the (k - members before its group)-th of its group
    shift = first - (sizes.cumsum(0) - sizes)
    slots = shift.index_select(0, ordered).add_(torch.arange(keys.numel(), device=keys.device))
    slot = torch.empty_like(keys).index_copy_(0, order, slots)
    member = torch.zeros(buckets[-1].slots.stop, dtype=keys.dtype, device=keys.device).index_copy_(0, slots, order)
    return Groups(present, slot, member, buckets)


def _by_width(present: Tensor, sizes: Tensor, largest: int) -> tuple[Tensor, Tensor, tuple[Bucket, ...]]:
    """Keys, widths and buckets with the widths rounded up to one of :func:`_widths`, narrow groups first."""
    allowed = _widths(largest)
    steps = torch.tensor(allowed, device=sizes.device)
    classes, order = torch.sort(torch.bucketize(sizes, steps))
    counts = torch.bincount(classes).tolist()
    buckets = _buckets([(number, width) for number, width in zip(counts, allowed, strict=False) if number])
    return present.index_select(0, order), steps.index_select(0, classes), buckets


@lru_cache(maxsize=1024)
def _widths(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to the first that is enough for the largest group."""
    made = [1]
    while made[-1] < largest:
        made.append(
            made[-1] * 3 // 2 if made[-1] & (made[-1] - 1) == 0 and made[-1] > 1 else 2 ** made[-1].bit_length()
        )
    return made


def _buckets(counts: list[tuple[int, int]]) -> tuple[Bucket, ...]:
    """Buckets of ``(number of groups, width)``, one after the other."""
    made: list[Bucket] = []
    group_at = slot_at = 0
    for number, width in counts:
        groups, slots = slice(group_at, group_at + number), slice(slot_at, slot_at + number * width)
        made.append(Bucket(groups, slots, width))
        group_at, slot_at = groups.stop, slots.stop
    return tuple(made)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``bmm`` for a reader that takes any strides: as its transpose where that is faster.

    MKL is slow at a few columns, and at a number of columns that is no multiple of 16.

    Returns:
        ``[n, rows of a, columns of b]``, not always contiguous.
    """
    if _transposed(a, b, deep=0):
        return torch.bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(a, b)


def product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """:func:`product`, written to a contiguous tensor: transposed only where that is worth the copy."""
    if _transposed(a, b, deep=64):
        out.copy_(torch.bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2))
    else:
        torch.bmm(a, b, out=out)


def _transposed(a: Tensor, b: Tensor, deep: int) -> bool:
    rows, columns = a.shape[1], b.shape[2]
    return columns < rows and (columns < 12 or (columns % 16 != 0 and a.shape[2] >= deep))


def sum_rows(rows: Tensor, position: Tensor, count: int) -> Tensor:
    """``[count, width]``: sums of the rows of equal position.

    Args:
        rows: ``[n, width]``.
        position: ``[n]`` int64 in ``[0, count)``.

    The bags of an embedding bag are sums of gathered rows: vectorized and parallel, unlike ``index_add_`` (row by row)
    and the gradient of an embedding (a call a row).
    """
    sizes = torch.bincount(position, minlength=count)
    total: Tensor = F.embedding_bag(torch.argsort(position), rows, sizes.cumsum(0) - sizes, mode="sum")
    return total

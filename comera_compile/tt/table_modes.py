"""Pairs and order of the modes of a table in tensor-train-matrix form: by parameters, then by a lookup's work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

Sizes = tuple[int, ...]
Pairs = tuple[Sizes, Sizes]  # row modes and column modes

_OTHER_PARAMETERS = 0.03  # modes for which a lookup multiplies less may change the parameters by this part
_LARGER_PAIR = 3  # and their largest row mode times column mode may be this many times as large
_VECTOR = 8  # the last core's columns are multiplied in whole vectors


def pair_modes(row_modes: Sizes, col_modes: Sizes) -> Pairs:
    """Small row modes with large column modes; pairs of large product outside, of small product in the middle.

    Args:
        row_modes, col_modes: as many of each, ascending.
    """
    pairs = sorted(zip(row_modes, col_modes[::-1], strict=True), key=lambda p: (-p[0] * p[1], p))
    arranged = [*pairs[0::2], *pairs[1::2][::-1]]
    return tuple(v for v, _ in arranged), tuple(e for _, e in arranged)


def cheapest_lookup(balanced: Pairs, ranks_of: Callable[[Pairs], Sizes]) -> Pairs:
    """The modes with which a row takes the fewest multiplications, at the parameters of the balanced ones, about.

    A product with a core has as many rows as there are columns before it, so small column modes come first: 768 columns
    as 3.8.32 take a quarter of the work of 12.8.8 in front of the last core. No rank becomes smaller.

    Args:
        balanced: what :func:`pair_modes` gives.
        ranks_of: the ranks that modes get, boundary ones included.
    """
    ranks = ranks_of(balanced)
    parameters = _parameters(balanced, ranks)
    found, least = balanced, (_row_work(balanced, ranks), parameters)
    for columns in _ordered_factors(math.prod(balanced[1]), len(balanced[1]), min(2, *balanced[1])):
        for modes in _row_orders(balanced, columns, ranks):
            if _largest(modes) > _LARGER_PAIR * _largest(balanced):
                continue
            new = ranks_of(modes)
            cost = _row_work(modes, new), _parameters(modes, new)
            same = abs(cost[1] - parameters) <= _OTHER_PARAMETERS * parameters
            if same and cost < least and all(a >= b for a, b in zip(new, ranks, strict=True)):
                found, least = modes, cost
    return found


def _row_orders(balanced: Pairs, columns: Sizes, ranks: Sizes) -> Iterator[Pairs]:
    """Row modes for these column modes: the smallest where a row costs most, and in the balanced ones' order."""
    places = _by_price(columns, ranks)
    for order in (sorted(balanced[0]), [balanced[0][k] for k in _by_price(balanced[1], ranks)]):
        yield tuple(mode for _, mode in sorted(zip(places, order, strict=True))), columns


def _by_price(col_modes: Sizes, ranks: Sizes) -> list[int]:
    """Places in the order of the parameters of one row there, most first."""
    return sorted(range(len(col_modes)), key=lambda k: -ranks[k] * col_modes[k] * ranks[k + 1])


def _row_work(modes: Pairs, ranks: Sizes) -> int:
    """Multiplications of one row, from the first core on."""
    wide = [*modes[1][:-1], -(-modes[1][-1] // _VECTOR) * _VECTOR]
    return sum(math.prod(wide[:k]) * ranks[k] * wide[k] * ranks[k + 1] for k in range(1, len(wide)))


def _parameters(modes: Pairs, ranks: Sizes) -> int:
    return sum(ranks[k] * v * e * ranks[k + 1] for k, (v, e) in enumerate(zip(*modes, strict=True)))


def _largest(modes: Pairs) -> int:
    return max(v * e for v, e in zip(*modes, strict=True))


def _ordered_factors(size: int, order: int, smallest: int) -> Iterator[Sizes]:
    """All factorizations of ``size`` into ``order`` factors of at least ``smallest``, in every order."""
    if order == 1:
        if size >= smallest:
            yield (size,)
        return
    for factor in range(smallest, size + 1):
        if size % factor == 0:
            for rest in _ordered_factors(size // factor, order - 1, smallest):
                yield (factor, *rest)

"""Which modes and ranks a weight of a given size gets: replaces the hand-written shape tables of other packages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeGuard

from comera_compile.errors import ShapeError
from comera_compile.tt.shape import Format, TTShape
from comera_compile.tt.table_modes import cheapest_lookup, pair_modes

Rank = int | float | Sequence[int]
Modes = tuple[Sequence[int], Sequence[int]]

MAX_ORDER = 6
_MAX_PADDING = 0.065  # padded rows cost work in the merged half and nothing in parameters
_EXACT_IS_FINE = 1.25  # an exact factorization is kept up to this many times the smallest conceivable sum of modes
_WIDEST_SEARCH = 0.7  # padded factors smaller than this times the geometric mean are never better balanced
_RANKS_ALLOWED = "an int of at least 1, a fraction strictly between 0 and 1, or a list of inner ranks of at least 1"


@lru_cache(maxsize=4096, typed=True)  # typed: 2.0 and True are refused, not found as 2 and 1
def choose_modes(size: int, order: int) -> tuple[int, ...]:
    """Balanced factors of ``size``, ascending.

    The parameters of a tensor train of given ranks grow with the *sum* of its modes, so that is what is kept small.
    An exact factorization wins whenever its sum is within 25 % of the smallest conceivable one,
    ``order * size ** (1 / order)``; else a padded one may win, with at most 6.5 % padding. Multiples of 8
    are slightly preferred, which makes splitting a token id into its digits cheap. Sizes that have no ``order``
    factors of at least 2 within that padding get leading ones, so every positive size has modes.

    Args:
        size: number of rows or columns, at least 1.
        order: number of modes, 1 to 6.

    Returns:
        ``order`` factors whose product is ``size`` or the nearest well balanced size above it.

    Raises:
        ShapeError: size or order is no positive int, or order is above 6.
    """
    _check_order(order)
    if not _is_int(size) or size < 1:
        raise ShapeError(f"a size of at least 1 has modes, got {size!r}; leave such a weight dense")
    exact = min(_exact_factors(size, order, 1), key=lambda modes: _score(modes, size))
    if 1 not in exact and _sum_ratio(exact, size) <= _EXACT_IS_FINE:
        return exact
    padded = (modes for modes in _padded_factors(size, order) if math.prod(modes) <= size * (1 + _MAX_PADDING))
    return min([exact, *padded], key=lambda modes: _score(modes, size))


def max_ranks(row_modes: Sequence[int], col_modes: Sequence[int], format: Format) -> tuple[int, ...]:
    """Largest useful ranks, boundary ones included.

    Rank k is the matrix rank of the unfolding between cores k and k + 1, hence at most the smaller of the products of
    the mode sizes (``ttm``: row mode times column mode) on its left and on its right.
    """
    sizes = [*row_modes, *col_modes]
    if format == "ttm":
        sizes = [v * e for v, e in zip(row_modes, col_modes, strict=True)]
    return tuple(min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(len(sizes) + 1))


def choose_shape(
    rows: int,
    cols: int,
    *,
    format: Format,
    rank: Rank,
    modes: Modes | None = None,
    order: int = 3,
    zero_row: int = -1,
) -> TTShape:
    """The tensor-train shape of a ``(rows, cols)`` weight.

    ``tt``: row modes descending and column modes ascending, so that the largest modes meet the smallest ranks (CoMERA,
    arXiv 2405.14377: 768 x 3072 as 12.8.8 x 12.16.16). ``ttm``: large row modes are paired with small column modes and
    the smallest pair goes to the middle, where both of its ranks are large; where modes of another balance make a
    lookup cheaper at as many parameters, they are taken (``table_modes``).

    Args:
        rows: rows of the dense weight.
        cols: columns of the dense weight.
        format: ``"tt"`` for linear weights, ``"ttm"`` for embedding tables.
        rank: one rank for all places, a fraction of the largest useful rank of each place, or the list of inner ranks.
            Whatever exceeds the largest useful rank of its place, given its neighbours, is clamped to it.
        modes: row modes and column modes, if not to be chosen here; kept in the order given.
        order: modes a side, 1 to 6; ignored when ``modes`` is given.
        zero_row: row that is always zero (``padding_idx``), or -1.

    Raises:
        ShapeError: impossible rank, order, modes or zero_row.
    """
    if not -1 <= zero_row < rows:
        raise ShapeError(f"zero_row must be -1 or a row below {rows}, got {zero_row}")
    if modes is not None:
        row_modes, col_modes = _check_modes(rows, cols, modes, format)
    elif format == "tt":
        row_modes, col_modes = choose_modes(rows, order)[::-1], choose_modes(cols, order)
    else:
        balanced = pair_modes(choose_modes(rows, order), choose_modes(cols, order))
        row_modes, col_modes = cheapest_lookup(balanced, lambda modes: _choose_ranks(*modes, format, rank))
    ranks = _choose_ranks(row_modes, col_modes, format, rank)
    return TTShape(format, rows, cols, row_modes, col_modes, ranks, zero_row=zero_row)


def _choose_ranks(
    row_modes: tuple[int, ...], col_modes: tuple[int, ...], format: Format, rank: Rank
) -> tuple[int, ...]:
    """All ranks for the asked ``rank``, clamped so that no core is wider than its neighbours can make use of."""
    largest = max_ranks(row_modes, col_modes, format)
    inner = largest[1:-1]
    if _is_int(rank) and rank >= 1:
        asked = [rank] * len(inner)
    elif isinstance(rank, float) and 0 < rank < 1:
        asked = [max(1, int(rank * r + 0.5)) for r in inner]
    elif isinstance(rank, (list, tuple)) and all(_is_int(r) and r >= 1 for r in rank):
        if len(rank) != len(inner):
            raise ShapeError(f"modes {row_modes} x {col_modes} need {len(inner)} inner ranks, got {list(rank)}")
        asked = list(rank)
    else:
        raise ShapeError(f"rank must be {_RANKS_ALLOWED}, got {rank!r}")
    sizes = [*row_modes, *col_modes]
    if format == "ttm":
        sizes = [v * e for v, e in zip(row_modes, col_modes, strict=True)]
    return _clamp([1, *asked, 1], sizes)


def _clamp(ranks: list[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Each rank at most mode times the rank beyond it, from the left and from the right."""
    for k, size in enumerate(sizes):
        ranks[k + 1] = min(ranks[k + 1], ranks[k] * size)
    for k in reversed(range(len(sizes))):
        ranks[k] = min(ranks[k], ranks[k + 1] * sizes[k])
    return tuple(ranks)


def _check_modes(rows: int, cols: int, modes: Modes, format: Format) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The modes a user gave, as tuples, if their products fit the weight."""
    if not isinstance(modes, (list, tuple)) or len(modes) != 2 or not all(map(_is_modes, modes)):
        raise ShapeError(f"modes must be (row modes, col modes), each a tuple of ints of at least 1, got {modes!r}")
    row_modes, col_modes = tuple(modes[0]), tuple(modes[1])
    got = math.prod(row_modes), math.prod(col_modes)
    rows_fit = got[0] == rows or (format == "ttm" and got[0] > rows)
    if not rows_fit or got[1] != cols:
        wanted = f"at least {rows}" if format == "ttm" else str(rows)
        hint = "; the two tuples are swapped" if got == (cols, rows) else ""
        raise ShapeError(
            f"modes {row_modes} x {col_modes} multiply to {got[0]} x {got[1]}, but the weight is {rows} x {cols} "
            f"(rows: {wanted}, columns: {cols}){hint}"
        )
    if format == "ttm" and len(row_modes) != len(col_modes):
        raise ShapeError(f"an embedding needs as many row modes as column modes, got {row_modes} and {col_modes}")
    return row_modes, col_modes


def _check_order(order: int) -> None:
    if not _is_int(order) or not 1 <= order <= MAX_ORDER:
        raise ShapeError(f"order (modes a side) must be an int from 1 to {MAX_ORDER}, got {order!r}")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_modes(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(_is_int(m) and m >= 1 for m in value)


def _sum_ratio(modes: Sequence[int], size: int) -> float:
    """Sum of the modes over the smallest conceivable sum."""
    return sum(modes) / (len(modes) * math.pow(size, 1 / len(modes)))


def _score(modes: tuple[int, ...], size: int) -> tuple[float, tuple[int, ...]]:
    """Smaller is better: sum, half the padding, and a small bonus for multiples of 8; ties by the modes themselves."""
    padding = math.prod(modes) / size - 1
    return _sum_ratio(modes, size) + padding / 2 - 0.002 * sum(m % 8 == 0 for m in modes), modes


def _exact_factors(size: int, order: int, smallest: int) -> Iterator[tuple[int, ...]]:
    """All ascending factorizations of ``size`` into ``order`` factors of at least ``smallest``."""
    if order == 1:
        yield (size,)
        return
    for factor in range(smallest, int(math.pow(size, 1 / order) + 1e-9) + 1):
        if size % factor == 0:
            for rest in _exact_factors(size // factor, order - 1, factor):
                yield (factor, *rest)


def _padded_factors(size: int, order: int) -> Iterator[tuple[int, ...]]:
    """Ascending near-equal factors whose product is just above ``size``: the last is the smallest that suffices."""
    smallest = max(2, int(_WIDEST_SEARCH * math.pow(size, 1 / order)))
    yield from _padded_from(size, order, smallest)


def _padded_from(size: int, order: int, smallest: int) -> Iterator[tuple[int, ...]]:
    if order == 1:
        yield (max(size, smallest),)
        return
    for factor in range(smallest, int(math.pow(size, 1 / order)) + 2):
        for rest in _padded_from(-(-size // factor), order - 1, factor):
            yield (factor, *rest)

"""Modes and ranks: known tables, properties over many sizes, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from comera_compile.errors import ShapeError
from comera_compile.tt.factorize import choose_modes, choose_shape, max_ranks
from comera_compile.tt.packing import to_dense
from comera_compile.tt.table_modes import pair_modes


@pytest.mark.parametrize(
    ("size", "order", "expected"),
    [
        (768, 3, (8, 8, 12)),  # the modes of CoMERA's BERT
        (3072, 3, (12, 16, 16)),
        (512, 3, (8, 8, 8)),
        (4096, 3, (16, 16, 16)),
        (4096, 2, (64, 64)),
        (30522, 3, (30, 32, 32)),  # 2 * 3 * 5087 has no balanced factors: padded by 0.65 %
        (997, 3, (10, 10, 10)),  # a prime, padded by 0.3 %
        (7, 3, (1, 1, 7)),  # 8 would be padded by 14 %
        (1, 3, (1, 1, 1)),
        (12, 1, (12,)),
    ],
)
def test_known_modes(size: int, order: int, expected: tuple[int, ...]) -> None:
    assert choose_modes(size, order) == expected


def test_modes_of_all_sizes() -> None:
    for size in [*range(1, 1200), 1042, 11008, 50257, 99991]:
        for order in (1, 2, 3, 4):
            modes = choose_modes(size, order)
            assert len(modes) == order and list(modes) == sorted(modes)
            assert size <= math.prod(modes) <= 1.065 * size
            if size > 100:  # the padding leaves room for factors of at least 2 everywhere
                assert modes[0] >= 2


def test_balanced_over_large_sizes() -> None:
    # Common vocabularies and widths: the sum of the modes, hence the parameters, within 25 % of the least possible.
    for size in (30522, 32000, 50257, 50304, 128256, 151936, 250002, 5504, 11008, 14336, 18944, 99999989, 10**8):
        for order in (2, 3, 4):
            assert sum(choose_modes(size, order)) <= 1.25 * order * size ** (1 / order)


def test_max_ranks_are_the_ranks_of_random_unfoldings() -> None:
    row_modes, col_modes = (3, 2), (2, 4)
    assert max_ranks(row_modes, col_modes, "tt") == (1, 3, 6, 4, 1)
    tensor = torch.randn(3, 2, 2, 4, dtype=torch.float64)
    measured = [int(torch.linalg.matrix_rank(tensor.reshape(size, -1))) for size in (3, 6, 12)]
    assert measured == [3, 6, 4]
    # Embeddings pair the modes: cores of 3 * 2 and 2 * 4 entries.
    assert max_ranks(row_modes, col_modes, "ttm") == (1, 6, 1)


def test_comera_sizes() -> None:
    # CoMERA (arXiv 2405.14377), six-encoder BERT: 25 attention-like, 6 + 6 feed-forward weights, one embedding.
    attention = choose_shape(768, 768, format="tt", rank=30)
    assert (attention.row_modes, attention.col_modes) == ((12, 8, 8), (8, 8, 12))
    assert attention.ranks == (1, 12, 30, 30, 30, 12, 1)
    up = choose_shape(3072, 768, format="tt", rank=30)
    assert (up.row_modes, up.ranks) == ((16, 16, 12), (1, 16, 30, 30, 30, 12, 1))
    down = choose_shape(768, 3072, format="tt", rank=30)
    assert (down.row_modes, down.col_modes) == ((12, 8, 8), (12, 16, 16))
    words = choose_shape(30522, 768, format="ttm", rank=32, modes=((16, 20, 10, 10), (4, 4, 8, 6)))
    assert (attention.numel, up.numel, down.numel, words.numel) == (20448, 28960, 28960, 167808)
    assert 25 * attention.numel + 6 * (up.numel + down.numel) + words.numel == 1026528


def test_embedding_pairs_are_balanced() -> None:
    pairs = [v * e for v, e in zip(*pair_modes(choose_modes(30522, 4), choose_modes(768, 4)), strict=True)]
    # Parameters grow with the sum of the pairs: within 5 % of what four equal pairs would have.
    assert sum(pairs) <= 1.05 * 4 * (30522 * 768) ** (1 / 4)
    # The inner cores have two ranks each: they get the smaller pairs.
    assert max(pairs[1:3]) <= min(pairs[0], pairs[3])


@pytest.mark.parametrize(
    ("rows", "cols", "rank", "expected"),
    [
        (30522, 768, 30, ((32, 30, 32), (3, 8, 32))),
        (1_000_000, 32, 32, ((100, 100, 100), (2, 2, 8))),
        (50257, 1024, 64, ((40, 37, 34), (4, 8, 32))),
    ],
)
def test_tables_get_small_column_modes_first(rows: int, cols: int, rank: int, expected: Any) -> None:
    # The product with the middle core has as many rows as the first column mode, so that is what a lookup pays for.
    shape = choose_shape(rows, cols, format="ttm", rank=rank)
    assert (shape.row_modes, shape.col_modes) == expected


@pytest.mark.parametrize("rank", [1, 8, 30, 0.1, [20, 5], 10**6])
@pytest.mark.parametrize(("rows", "cols"), [(30522, 768), (10**6, 128), (512, 768), (997, 54), (64, 64), (2, 8)])
def test_modes_for_cheap_lookups_keep_parameters_and_ranks(rows: int, cols: int, rank: Any) -> None:
    # Only the work may change, not what the table can hold: one of fewer parameters is cheaper to look up, too.
    balanced = pair_modes(choose_modes(rows, 3), choose_modes(cols, 3))
    before = choose_shape(rows, cols, format="ttm", rank=rank, modes=balanced)
    shape = choose_shape(rows, cols, format="ttm", rank=rank)
    assert sorted(shape.row_modes) == sorted(before.row_modes) and math.prod(shape.col_modes) == cols
    assert abs(shape.numel - before.numel) <= 0.03 * before.numel
    assert all(a >= b for a, b in zip(shape.ranks, before.ranks, strict=True))
    products = [math.prod(s.col_modes[:-1]) for s in (shape, before)]
    assert products[0] <= products[1]


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (8, (1, 8, 8, 8, 8, 8, 1)),
        (10**6, (1, 12, 96, 768, 96, 12, 1)),
        (0.25, (1, 3, 24, 192, 24, 3, 1)),
        (0.0001, (1, 1, 1, 1, 1, 1, 1)),
        ([4, 5, 6, 7, 8], (1, 4, 5, 6, 7, 8, 1)),
        ((99, 5, 6, 7, 99), (1, 12, 5, 6, 7, 12, 1)),
        ([1, 99, 99, 99, 99], (1, 1, 8, 64, 96, 12, 1)),  # rank 1 times mode 8 feeds no more than 8
    ],
)
def test_ranks(rank: Any, expected: tuple[int, ...]) -> None:
    assert choose_shape(768, 768, format="tt", rank=rank).ranks == expected


def test_largest_ranks_hold_any_matrix() -> None:
    # A full-rank matrix needs exactly the largest bond: at one less, no choice of cores reaches it.
    shape = choose_shape(12, 8, format="tt", rank=10**6, order=2)
    assert shape.bond == 8
    assert int(torch.linalg.matrix_rank(to_dense(torch.randn(shape.numel, dtype=torch.float64), shape))) == 8


@pytest.mark.parametrize("rank", [0, -1, 2.5, 1.0, 0.0, "8", True, None, [4, 5, 0, 7, 8], [4, 5.0, 6, 7, 8], {"a": 1}])
def test_impossible_ranks_name_the_value(rank: Any) -> None:
    with pytest.raises(ShapeError, match="rank must be an int of at least 1") as error:
        choose_shape(768, 768, format="tt", rank=rank)
    assert repr(rank) in str(error.value)


def test_rank_lists_of_wrong_length_say_the_right_one() -> None:
    with pytest.raises(ShapeError, match="need 5 inner ranks"):
        choose_shape(768, 768, format="tt", rank=[4, 5])
    with pytest.raises(ShapeError, match="need 2 inner ranks"):
        choose_shape(768, 768, format="ttm", rank=[4, 5, 6])


@pytest.mark.parametrize(
    ("modes", "format", "message"),
    [
        (((12, 8, 8), (8, 8, 11)), "tt", "768 x 704, but the weight is 768 x 768"),
        (((12, 8, 9), (8, 8, 12)), "tt", "864 x 768"),  # a linear weight's modes must be exact
        (((12, 8, 7), (8, 8, 12)), "ttm", "at least 768"),
        (((12, 8, 8), (8, 96)), "ttm", "as many row modes"),
        (((12, 8, 8),), "tt", "modes must be"),
        (((12, 8, 8), 768), "tt", "modes must be"),
        (((12, 8, 8.0), (8, 8, 12)), "tt", "modes must be"),
    ],
)
def test_impossible_modes(modes: Any, format: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        choose_shape(768, 768, format=format, rank=8, modes=modes)


def test_swapped_modes_are_named() -> None:
    with pytest.raises(ShapeError, match="swapped"):
        choose_shape(768, 3072, format="tt", rank=8, modes=((16, 16, 12), (8, 8, 12)))


@pytest.mark.parametrize("order", [0, 7, 2.0, True, "3"])
def test_impossible_orders(order: Any) -> None:
    with pytest.raises(ShapeError, match="order"):
        choose_shape(768, 768, format="tt", rank=8, order=order)


@pytest.mark.parametrize("size", [0, -5, 2.0])
def test_impossible_sizes(size: Any) -> None:
    with pytest.raises(ShapeError, match="size of at least 1"):
        choose_modes(size, 3)


def test_zero_row_must_be_a_row() -> None:
    assert choose_shape(100, 16, format="ttm", rank=4, zero_row=99).zero_row == 99
    with pytest.raises(ShapeError, match="zero_row"):
        choose_shape(100, 16, format="ttm", rank=4, zero_row=100)

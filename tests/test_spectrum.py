"""Telling untrained weights from structured ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from comera_compile.tt.spectrum import energy_kept, looks_random

UNTRAINED: dict[str, Callable[[int, int], Tensor]] = {
    "linear": lambda m, n: nn.Linear(n, m).weight.detach(),
    "normal": lambda m, n: 3.0 * torch.randn(m, n),
    "truncated": lambda m, n: nn.init.trunc_normal_(torch.empty(m, n), std=0.02),
    "xavier": lambda m, n: nn.init.xavier_uniform_(torch.empty(m, n)),
    "kaiming": lambda m, n: nn.init.kaiming_normal_(torch.empty(m, n)),
}


def spiked(m: int, n: int, share: float) -> Tensor:
    """Noise plus one direction of ``share`` times the largest singular value of the noise."""
    u, v = torch.randn(m), torch.randn(n)
    top = math.sqrt(m) + math.sqrt(n)
    return torch.randn(m, n) + share * top * torch.outer(u / u.norm(), v / v.norm())


def flat_but_for_one(m: int, n: int) -> Tensor:
    """All singular values 1, but for one that is as large as that of noise."""
    weight = torch.eye(m, n)
    weight[0, 0] = (math.sqrt(m) + math.sqrt(n)) / math.sqrt(max(m, n))
    return weight


STRUCTURED: dict[str, Callable[[int, int], Tensor]] = {
    "column scales": lambda m, n: torch.randn(m, n) * torch.arange(1, n + 1) ** -0.4,
    "row scales": lambda m, n: torch.randn(m, n) * torch.exp(0.3 * torch.randn(m, 1)),
    "low rank": lambda m, n: torch.randn(m, 8) @ torch.randn(8, n),
    "one learned direction": lambda m, n: spiked(m, n, 1.3),
    "a learned update of rank 4": lambda m, n: torch.randn(m, n) + 0.3 * torch.randn(m, 4) @ torch.randn(4, n),
    "orthogonal": lambda m, n: nn.init.orthogonal_(torch.empty(m, n)),
    "identity": lambda m, n: torch.eye(m, n),
    "identity but for one direction": flat_but_for_one,
    "mean": lambda m, n: torch.rand(m, n),
    "constant": lambda m, n: torch.ones(m, n),
}

SHAPES = [(64, 64), (64, 256), (256, 64), (384, 384), (1536, 384)]


@pytest.mark.parametrize("law", UNTRAINED)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_untrained_weights_are_random(law: str, m: int, n: int) -> None:
    for _ in range(20 if m * n < 10**5 else 2):
        found = looks_random(UNTRAINED[law](m, n), 32)
        assert found.random, found


@pytest.mark.parametrize("law", STRUCTURED)
@pytest.mark.parametrize(("m", "n"), [(64, 64), (384, 384), (1536, 384)])
def test_structured_weights_are_not(law: str, m: int, n: int) -> None:
    if law == "orthogonal" and m == n == 64:
        m, n = 96, 64
    for _ in range(5 if m * n < 10**5 else 1):
        found = looks_random(STRUCTURED[law](m, n), 32)
        assert not found.random, found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    assert looks_random((0.02 * torch.randn(256, 256)).to(dtype), 32).random
    assert not looks_random((0.02 * STRUCTURED["column scales"](256, 256)).to(dtype), 32).random


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_extreme_sizes_neither_overflow_nor_vanish(size: float) -> None:
    # Squares of these leave float32.
    assert looks_random(size * torch.randn(128, 128), 32).random
    assert not looks_random(size * STRUCTURED["low rank"](128, 128), 32).random


def test_energy_is_that_of_the_svd() -> None:
    weight = torch.randn(300, 200) * torch.arange(1, 201) ** -1.0
    squares = torch.linalg.svdvals(weight.double()).square()
    for rank in (1, 8, 32):
        expected = float(squares[:rank].sum() / squares.sum())
        assert energy_kept(weight, rank) == pytest.approx(expected, rel=2e-3)
    assert energy_kept(weight, 200) == pytest.approx(1.0, abs=1e-5)
    # The largest singular value, over the norm.
    assert looks_random(weight, 32).top == pytest.approx(float((squares[0] / squares.sum()).sqrt()), rel=1e-4)


def test_random_matrices_keep_what_theory_says() -> None:
    # The largest singular value of an m x n matrix of independent entries of variance 1 is sqrt(m) + sqrt(n), its norm
    # sqrt(m n): 0.0541 at 1024 x 512 (the sketch sees a few percent less).
    found = looks_random(torch.randn(1024, 512), 32)
    assert found.top_if_random == pytest.approx((32 + math.sqrt(512)) / math.sqrt(1024 * 512), rel=0.05)
    assert found.top == pytest.approx(found.top_if_random, rel=0.03)


def test_zero_weight_is_random() -> None:
    found = looks_random(torch.zeros(128, 128), 32)
    assert found.random and found.kept == 1.0


def test_embedding_with_a_padding_row_is_random() -> None:
    assert looks_random(nn.Embedding(2000, 128, padding_idx=0).weight.detach(), 32).random


def test_large_tables_are_sampled_alike_on_both_sides() -> None:
    table = torch.randn(30000, 96)
    found = looks_random(table, 24)
    assert found.random
    # 4096 of 30000 rows: top is that of the sample, (sqrt(4096) + sqrt(96)) / sqrt(4096 * 96).
    assert found.top == pytest.approx((math.sqrt(4096) + math.sqrt(96)) / math.sqrt(4096 * 96), rel=0.05)
    assert not looks_random(table * torch.arange(1, 97) ** -0.2, 24).random
    assert looks_random(table.T, 24).random  # wide ones likewise


def test_global_random_state_is_left_alone() -> None:
    weight = torch.randn(100, 90)
    state = torch.get_rng_state()
    first = looks_random(weight, 16)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert looks_random(weight, 16) == first


def test_rank_looked_at_is_bounded() -> None:
    # At rank 64 of 64 every matrix keeps all its energy: that would tell nothing.
    assert looks_random(torch.randn(64, 64), 64).rank == 16
    assert looks_random(torch.randn(2, 3), 5).rank == 1

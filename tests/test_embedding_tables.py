"""Tables of a recommendation model: any number of rows, right shapes or a reason, values of the rebuilt table."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import comera_compile as comera
from comera_compile.errors import ShapeError
from tests import tiny_models as tiny

Near = Callable[..., None]
ROWS, WIDTH = (3, 10, 583, 1461, 142_572), 16


class Tables(nn.Module):
    """One table a categorical feature, their rows side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for rows in ROWS)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)


def indices(count: int) -> Tensor:
    """Random rows, the first and the last of each table among them."""
    random = torch.stack([torch.randint(0, rows, (count,)) for rows in ROWS], 1)
    return torch.cat([random, torch.zeros(1, len(ROWS), dtype=torch.long), torch.tensor([[r - 1 for r in ROWS]])])


def test_every_number_of_rows(assert_near: Near) -> None:
    # Small tables stay dense with the reason; for the others modes are found whatever the factors of the row count.
    model = Tables()
    call, ids = torch.compile(model, backend="comera", options={"rank": 8, "inner": "aot_eager"}), indices(50)
    call(ids)
    report = comera.report(model)
    assert [line.decision.shape is None for line in report.lines] == [True, True, True, True, False]
    assert "min_elements=100,000" in report["tables.0.weight"].decision.reason
    assert report["tables.4.weight"].decision.numel < ROWS[4] * WIDTH / 20
    rebuilt = [table.weight.detach() for table in model.tables]
    expected = torch.cat([weight[ids[:, k]] for k, weight in enumerate(rebuilt)], 1)
    assert_near(call(ids).detach(), expected)
    tiny.assert_as_eager(call, model, [ids], assert_near)


def test_all_tables_with_small_ones_too(assert_near: Near) -> None:
    # min_elements=0 looks at all: where cores would not be smaller, that is the reason.
    model = tiny.double(Tables())
    comera.tensorize(model, rank=8, min_elements=0)
    shapes = [line.decision.shape for line in comera.report(model).lines]
    assert shapes[0] is None and shapes[1] is None and all(shape is not None for shape in shapes[2:])
    assert "too little to gain" in comera.report(model)["tables.0.weight"].decision.reason
    call, ids = torch.compile(model, backend="comera", options=tiny.OPTIONS), indices(20)
    call(ids)
    tiny.assert_as_eager(call, model, [ids], assert_near)


@pytest.mark.parametrize("rank", [[8, 16, 32, 64], [8]])
def test_a_rank_list_of_another_length_is_refused(rank: list[int]) -> None:
    # The message names the table and the length that is expected; the tables stay as they were.
    model = Tables()
    before = tiny.snapshot(model)
    with pytest.raises(
        ShapeError, match=rf"tables\.4\.weight.*need 2 inner ranks, got {str(rank)[:-1]}".replace("[", r"\[")
    ):
        comera.tensorize(model, rank=rank)
    tiny.assert_unchanged(before, model)


def test_an_index_outside_the_table_is_refused() -> None:
    # As nn.Embedding does: modes stand for more rows than the table has, which must not be readable.
    table = comera.tensorize(nn.Embedding(583, WIDTH), rank=4, order=2, min_elements=0)
    call = torch.compile(table, backend="comera", options=tiny.OPTIONS)
    call(torch.tensor([582]))
    for index in (583, -1):
        with pytest.raises(IndexError, match="out of range"):
            copy.deepcopy(table)(torch.tensor([index]))
        with pytest.raises(IndexError, match="out of range"):
            call(torch.tensor([index]))


OPTIONS_WITH_REASON: dict[str, tuple[dict[str, object], str]] = {
    "max_norm": ({"max_norm": 1.0}, "max_norm"),
    "scale_grad_by_freq": ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
    "sparse": ({"sparse": True}, "sparse gradients"),
}


@pytest.mark.parametrize("case", list(OPTIONS_WITH_REASON))
def test_tables_that_stay_dense(case: str, assert_near: Near) -> None:
    # What a lookup in cores cannot do as documented stays dense, with its reason, and works.
    settings, reason = OPTIONS_WITH_REASON[case]
    table, ids = nn.Embedding(583, WIDTH, **settings), torch.randint(0, 583, (20,))
    twin = copy.deepcopy(table)
    call = torch.compile(table, backend="comera", options=tiny.OPTIONS)
    assert_near(call(ids).detach(), twin(ids).detach())
    assert reason in comera.report(table)["weight"].decision.reason


def test_bags_stay_dense_and_right(assert_near: Near) -> None:
    # Empty bags are zeros, for each way of reducing.
    for mode in ("sum", "mean", "max"):
        bag = nn.EmbeddingBag(583, WIDTH, mode=mode)
        ids, offsets = torch.randint(0, 583, (6,)), torch.tensor([0, 0, 3, 3])
        call = torch.compile(bag, backend="comera", options=tiny.OPTIONS)
        assert_near(call(ids, offsets).detach(), bag(ids, offsets).detach())
        assert "EmbeddingBag is not rewritten" in comera.report(bag)["weight"].decision.reason

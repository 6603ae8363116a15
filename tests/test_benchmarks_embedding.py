"""The embedding benchmark: its ids, its keys, and that everything it times computes the same rows and gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F

from benchmarks import embedding_step, embedding_times, paired
from benchmarks.embedding_cases import DENSE, NAIVES, OURS, SPARSE, TABLES, TUNED, Table, lookup_flops, sharing
from benchmarks.embedding_variants import VARIANTS, NaiveTTEmbedding, build
from comera_compile.tt.packing import pack, to_dense
from comera_compile.tt.shape import TTShape

SMALL = Table(60, 12, 3, 20, "zipf")


def weight_of(variant, learned):
    """The dense table of a variant's parameters in float64."""
    if variant in NAIVES:
        return to_dense(pack(learned, SMALL.balanced_shape), SMALL.balanced_shape)
    if variant in TUNED:
        return to_dense(pack([core.transpose(0, 1) for core in learned], SMALL.shape), SMALL.shape)
    return learned[0]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_variant_looks_up_and_differentiates_its_own_table(variant):
    ids, grads = SMALL.ids(), SMALL.gradients()
    step = build(variant, SMALL, ids, grads, inner="aot_eager")
    step.step()
    assert all(p.grad is None for p in step.module.parameters())  # dropped: else they add up
    learned = [p.detach().double().requires_grad_() for p in step.module.parameters()]
    if variant == OURS:
        shape = TTShape.from_tensor(step.module.state_dict()["weight_tt"])
        assert shape.core_shapes == SMALL.shape.core_shapes  # it is a tensor train, of the shape the floor assumes
        weight = to_dense(learned[0], shape)
    else:
        weight = weight_of(variant, learned)
    rows = step.gradients()
    expected = F.embedding(ids[1], weight)
    assert (rows.double() - expected).norm() <= 1e-5 * expected.norm()
    right = torch.autograd.grad(expected, learned, grads[1].double())
    for parameter, gradient in zip(step.module.parameters(), right, strict=True):
        assert (parameter.grad.to_dense().double() - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_variant_updates_its_parameters(variant):
    step = build(variant, SMALL, SMALL.ids(), SMALL.gradients(), inner="aot_eager")
    step.step()
    before = copy.deepcopy(list(step.module.parameters()))
    step.step()
    # a step without its update would be too cheap
    assert all(not torch.equal(a, b) for a, b in zip(before, step.module.parameters(), strict=True))


@pytest.mark.parametrize("rows_first", [False, True])
def test_the_naive_lookup_repeats_what_ids_share(rows_first):
    layer = NaiveTTEmbedding(SMALL.shape, rows_first=rows_first)
    once, twice = layer(torch.tensor([7])), layer(torch.tensor([7, 7]))
    torch.testing.assert_close(twice, once.expand(2, -1))


def test_ids_are_fresh_and_follow_their_distribution():
    table = Table(1000, 8, 2, 4096, "zipf")
    zipf = table.ids()
    assert len(zipf) == 8 and not torch.equal(zipf[0], zipf[1])
    weights = torch.arange(1, 1001, dtype=torch.float64) ** -1.05
    share = torch.stack(zipf).eq(0).double().mean().item()
    # 32,768 draws of an event of 15 %: four standard deviations are 0.8 %
    assert abs(share - (weights[0] / weights.sum()).item()) < 0.008
    shuffled = Table(1000, 8, 2, 4096, "shuffled").ids()
    assert [s.unique().numel() for s in shuffled] == [z.unique().numel() for z in zipf]  # the same, renamed
    assert torch.stack(shuffled).mode().values.ne(0).any()
    uniform = torch.stack(Table(1000, 8, 2, 4096, "uniform").ids())
    assert uniform.flatten().bincount(minlength=1000).max() < 3 * 32.768  # 33 expected of each


def test_least_work_counts_each_prefix_once():
    shape = TTShape("ttm", 24, 8, (2, 3, 4), (2, 2, 2), (1, 5, 7, 1))
    ids = torch.tensor([0, 1, 1, 4, 23])  # digits 000, 001, 010, 123: three prefixes of two digits, four ids
    second, third = 3 * (2 * 5 * 2 * 7), 4 * (2 * 2 * 7 * 2)
    assert lookup_flops(shape, ids) == 2 * (second + third)
    assert sharing(Table(60, 12, 3, 5, "zipf"), [torch.tensor([3, 3, 4])])["unique"] == 2


def test_least_traffic_is_rows_and_what_the_optimizer_passes_over():
    ids = [torch.tensor([0, 0, 5])]
    table = Table(60, 12, 3, 3, "zipf")
    both = 2 * 3 * 12  # rows written, their gradients read
    assert table.work(DENSE, ids).bytes == 4 * (both + 8 * 60 * 12)
    assert table.work(SPARSE, ids).bytes == 4 * (both + 8 * 2 * 12)
    assert table.work(OURS, ids).bytes == 4 * (both + 10 * table.shape.numel)
    assert table.work(NAIVES[0], ids) is None


def test_figures_have_the_keys_of_the_bars(monkeypatch):
    times = {OURS: 1.0, DENSE: 5.0, SPARSE: 2.0, NAIVES[0]: 40.0, NAIVES[1]: 30.0, TUNED[0]: 10.0, TUNED[1]: 11.0}

    def measured(steps, *, rounds, seconds):
        assert rounds <= 7
        return paired.Timing({name: [times[name]] * 3 for name in steps}, processor=1.0)

    monkeypatch.setattr(paired, "measure", measured)
    small = {name: SMALL for name in ("lm", "table", "table_uniform")}
    monkeypatch.setattr(embedding_times, "TABLES", small)
    monkeypatch.setattr(embedding_step, "TABLES", small)
    result = embedding_times.measure(list(small), rounds=7, seconds=1.0, naive=True)
    speedup = result["speedup"]
    assert speedup["lm_vs_dense_adamw"] == 5.0 and speedup["table_vs_sparse_adam"] == 2.0
    assert speedup["lm_vs_naive_tt"] == speedup["table_vs_naive_tt"] == 30.0  # the faster of the two naive ones
    assert speedup["lm_vs_tuned_tt"] == 10.0
    assert speedup["lm_vs_naive_tt_eager"] == 40.0 and "table_uniform_vs_naive_tt" not in speedup
    floors = embedding_step.floors(result, embedding_step.floor.Machine(1e9, 1e9))
    assert set(floors["lm"]) == {OURS, DENSE} and floors["lm"][DENSE] > 0
    result |= {"floor": {"gemm_gflops": 1.0, "stream_gb_s": 1.0, **floors}, "speedup_default_malloc": {}}
    embedding_step.show(result)


def test_the_tables_are_those_that_have_bars():
    assert (TABLES["lm"].rows, TABLES["lm"].width, TABLES["lm"].rank) == (30522, 768, 30)
    assert (TABLES["table"].rows, TABLES["table"].width, TABLES["table"].rank) == (1_000_000, 32, 32)
    assert {t.count for t in TABLES.values()} == {4096}
    assert {t.distribution for name, t in TABLES.items() if name in ("lm", "table")} == {"zipf"}


def test_the_naive_tables_have_as_many_parameters_and_near_equal_modes():
    for name in ("lm", "table"):
        ours, naive = TABLES[name].shape, TABLES[name].balanced_shape
        assert abs(naive.numel / ours.numel - 1) <= 0.03
        assert max(naive.row_modes) <= 2 * min(naive.row_modes) and max(naive.col_modes) <= 2 * min(naive.col_modes)


def test_tables_are_chosen_by_pattern_and_wrong_ones_refused(capsys):
    assert embedding_step.parse(["--tables", "table*"]).chosen == ["table", "table_shuffled", "table_uniform"]
    with pytest.raises(SystemExit):
        embedding_step.parse(["--tables", "lookup"])
    assert "lm_shuffled" in capsys.readouterr().err

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bookkeeping, floor, memory, output, peers, process, step_table, transformer_step
from benchmarks.plain_tt import PlainTTEmbedding, PlainTTLinear
from benchmarks.six_encoders import SixEncoders, Sizes, zipf_batches
from benchmarks.training import Setting, Training
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.packing import pack, to_dense

TINY = Sizes(width=16, hidden=32, heads=2, sequence=8, vocabulary=60, classes=3, encoders=2)


def test_model_has_the_parameters_of_the_described_classifier():
    with torch.device("meta"):
        model = SixEncoders(Sizes())
    # two tables, two norms, and per encoder 4 x 768x768 + 2 x 768x3072 with biases; a layer left out would show here
    encoder = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 2 * 2 * 768
    expected = 30522 * 768 + 128 * 768 + 2 * 768 + 6 * encoder + 3 * 768 + 3
    assert sum(p.numel() for p in model.parameters()) == expected == 66_070_275


def test_every_parameter_of_the_model_gets_a_gradient():
    model = SixEncoders(TINY)
    model(*zipf_batches(2, TINY)[0]).backward()
    # a parameter outside the graph would make the step cheaper than the model claims
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_batches_differ_and_follow_the_zipf_law():
    batches = zipf_batches(64, Sizes())
    ids = torch.stack([batch[0] for batch in batches])
    assert ids.shape == (4, 64, 128) and not torch.equal(ids[0], ids[1])  # fresh input each step
    weights = torch.arange(1, 30523, dtype=torch.float64) ** -1.05
    expected = (weights[0] / weights.sum()).item()
    # 32,768 draws of an event of 13 %: four standard deviations are 0.75 %
    assert abs((ids == 0).double().mean().item() - expected) < 0.0075


def test_training_goes_round_its_batches_and_learns():
    model = SixEncoders(TINY)
    training = Training(model, model, torch.optim.AdamW(model.parameters(), lr=1e-2), zipf_batches(2, TINY))
    training.run(1)
    first = training.loss
    training.run(40)
    # 40 steps on four memorable batches: a step that forgot backward or update would not get there
    assert training.done == 41 and training.loss < first / 4
    assert all(p.grad is None for p in model.parameters())  # dropped: gradients of steps must not add up


def large_training():
    model = nn.EmbeddingBag(2**14, 1024)  # 64 MiB
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def forward(ids, targets):
        if not optimizer.state:
            torch.ones(2**27)  # 512 MiB in the first step only, as tuning or a decomposition takes
        return model(ids).square().sum()

    return Training(model, forward, optimizer, zipf_batches(2, TINY))


def test_memory_counts_weight_gradient_and_both_moments():
    peak = memory.measure(large_training)
    # 64 MiB each; the first step's extra does not count, and the interpreter belongs to the residue
    assert 0.95 * 256 < peak.figure / memory.MIB < 1.3 * 256 < peak.peak / memory.MIB


def test_memory_refuses_a_residue_that_holds_the_first_run():
    kept = []

    def build():
        kept.append(large_training())
        return kept[-1]

    with pytest.raises(memory.MemoryLeakError, match="alive"):
        memory.measure(build)


def test_comera_bookkeeping_is_the_papers():
    parts = {b.name: b.shape.numel for b in bookkeeping.blocks()}
    # facts of the released shapes: one matrix of each kind, the sum, and the ratio of the paper's 253 MB part
    assert list(parts.values()) == [20_448, 28_960, 28_960, 167_808]
    assert bookkeeping.totals() == (1_026_528, 66_498_048)
    assert round(66_498_048 / 1_026_528, 1) == 64.8


@pytest.mark.parametrize("rank", [1, 4])
def test_plain_linear_is_the_weight_that_its_cores_stand_for(rank):
    layer = PlainTTLinear(nn.Linear(24, 36), rank)
    dense = to_dense(pack(list(layer.cores), layer.shape), layer.shape)
    x = torch.randn(2, 5, 24)
    # the hand-written rival must compute the same function, else the comparison says nothing
    torch.testing.assert_close(layer(x), F.linear(x, dense, layer.bias))


def test_plain_embedding_looks_up_the_rows_that_its_cores_stand_for():
    layer = PlainTTEmbedding(nn.Embedding(53, 12), rank=3)  # 53 rows are padded: digits of an id must still be right
    dense = to_dense(pack(list(layer.cores), layer.shape), layer.shape)
    ids = torch.arange(53).reshape(1, 53)
    torch.testing.assert_close(layer(ids), F.embedding(ids, dense))


def test_plain_cores_give_the_dense_models_spread():
    torch.manual_seed(0)
    layer = PlainTTLinear(nn.Linear(768, 768), 32)
    dense = to_dense(pack(list(layer.cores), layer.shape), layer.shape)
    # CoMERA's initialisation: the variance does not depend on ranks; entries are correlated, hence the wide margin
    assert 0.5 < dense.std().item() / 0.02 < 2


def test_least_work_of_dense_is_what_torch_counts():
    model = SixEncoders(TINY)
    with FlopCounterMode(display=False) as counter:
        model(*zipf_batches(3, TINY)[0]).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if "attention" not in str(op))
    head = 6 * 3 * TINY.width * TINY.classes
    attention = 3.5 * TINY.encoders * 4 * 3 * TINY.sequence**2 * TINY.width
    least = floor.work("dense", Setting(3, 8, TINY), 0)
    # the floor is 6 x rows x outputs x inputs per linear; only the tiny head is left out
    assert least is not None and least.flops - attention == products - head


def test_least_work_of_a_tensor_train_is_what_torch_counts():
    layer, x = PlainTTLinear(nn.Linear(768, 3072), 32), torch.randn(40, 768, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    expected = 6 * 40 * layer.shape.bond * (768 + 3072) + 3 * floor.merge_flops(layer.shape)
    assert counter.get_total_flops() == expected  # merges, two products, and two gradients of each


def result_of_a_run():
    spread = {"speedup": {"comera": 4.5}, "speedup_range": {"comera": [4.25, 4.75]}}
    named = {key: {"dense": value, "comera": value} for key, value in {"milliseconds": 8.0, "parameters": 7}.items()}
    rates = {"gemm_gflops": 100.0, "stream_gb_s": 10.0, "dense": {"floor_ms": 1.0, "gflop": 0.1, "gbyte": 0.01}}
    return {**spread, **named, "processor_share": 0.5, "speedup_default_malloc": {"comera": 4.0}, "floor": rates}


def test_result_is_the_last_line_and_the_file_holds_the_rounds(capsys, tmp_path):
    file = tmp_path / "figures.json"
    result = {"name": "x", "conditions": output.conditions(rank=32), **result_of_a_run()}
    step_table.show(result, {"dense": 3, "comera": 3})
    output.emit(result, raw={"seconds": [1.23456789]}, json_file=file)
    *table, last = capsys.readouterr().out.splitlines()
    assert last.startswith("RESULT ") and not any(line.startswith("RESULT") for line in table)
    read = json.loads(last.removeprefix("RESULT "))
    assert read["speedup"]["comera"] == 4.5  # the path that a reader of figures looks up
    assert read["conditions"]["rank"] == 32 and read["conditions"]["threads"] == torch.get_num_threads()
    assert json.loads(file.read_text())["raw"] == {"seconds": [1.23456789]}  # unrounded
    assert any("comera" in line and "4.5" in line and "4.25-4.75" in line for line in table)


def test_rounding_keeps_what_a_figure_means():
    assert output.rounded({"a": [4.56789, 1026528, None], "b": math.pi * 1e-6}) == {
        "a": [4.568, 1026528, None],
        "b": 3.142e-06,
    }


def test_a_childs_result_is_read_and_its_failure_is_told(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text(
        "import os; print('RESULT {\"mmap\": \"' + os.environ['MALLOC_MMAP_THRESHOLD_'] + '\"}')"
    )
    (tmp_path / "bad.py").write_text("raise SystemExit('no such thing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert process.run_child("good", [], allocator="return") == {"mmap": "65536"}
    with pytest.raises(process.ChildError, match="no such thing"):
        process.run_child("bad", [], allocator="default")


def test_the_default_allocator_drops_settings_of_the_caller(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert "MALLOC_TRIM_THRESHOLD_" not in process.environment("default")
    assert process.environment("keep")["MALLOC_TRIM_THRESHOLD_"] == "8589934592"


def test_peers_are_measured_by_default_at_batch_one_only():
    assert set(transformer_step.parse(["--batch", "1"]).variants) == {
        "dense",
        "comera",
        "tt_autograd",
        "tensorly",
        "galore",
    }
    assert transformer_step.parse(["--batch", "8"]).variants == ("dense", "comera", "tt_autograd")
    assert transformer_step.parse(["--variants", "galore,comera"]).variants == ("comera", "galore")


def test_an_unknown_variant_is_refused_with_the_right_ones(capsys):
    with pytest.raises(SystemExit):
        transformer_step.parse(["--variants", "tensorrt"])
    assert "comera" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_named_with_its_reason(monkeypatch):
    def missing(name):
        raise peers.PeerMissingError("not installed")

    monkeypatch.setattr(peers, "require", missing)
    assert transformer_step.installed(("dense", "galore")) == (("dense",), {"galore": "not installed"})


def test_tensorly_gets_at_most_our_parameters_and_not_much_less():
    ours = choose_shape(768, 3072, format="tt", rank=32)
    ranks = peers.block_ranks(ours)
    assert ranks[0] == ranks[-1] == 1 and len(ranks) == 4
    made = peers.block_numel(ours, ranks)
    # one rank more would be more parameters than ours: the comparison is at equal size
    assert 0.85 * ours.numel < made <= ours.numel < peers.block_numel(ours, (1, ranks[1] + 1, ranks[1] + 1, 1))


def test_stubs_vanish_after_the_import():
    import sys

    before = dict(sys.modules)
    with peers.stubbed({"no_such_package": {"answer": 42}, "json": {}}):
        import no_such_package

        assert no_such_package.answer == 42
    assert sys.modules == before and sys.modules["json"] is json  # what was there comes back

"""The ablation: each switch changes what it names, nothing else, and only while it is on."""

import argparse
import json
from dataclasses import replace

import pytest
import torch

import comera_compile as comera
from benchmarks import ablation
from benchmarks.ablation import build, measure
from benchmarks.ablation_parts import PARTS, UNEVEN_RANK, WHOLE
from benchmarks.six_encoders import Sizes
from benchmarks.training import Setting
from comera_compile import pipeline
from comera_compile.codegen import lower_plans
from comera_compile.planning import choose

SIZES = Sizes(width=64, hidden=128, heads=2, sequence=8, vocabulary=60, classes=3, encoders=1)
SETTING = Setting(2, 8, SIZES)
SMALL = {"min_elements": 500, "inner": "aot_eager"}


def graphs_of(part, setting=SETTING, **options):
    """The rewritten graphs of a model compiled without a part, and the model."""
    seen, lower = [], pipeline.lower_plans

    def recorded(graph_module):
        done = lower(graph_module)
        seen.append([(str(n.target), n.args) for n in done.graph.nodes if n.op == "call_function"])
        return done

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "lower_plans", recorded)
        torch._dynamo.reset()
        training = build(part, setting, **SMALL | options)
    return seen[-1], training


def calls(nodes, name):
    return [args for target, args in nodes if name in target]


def bonds(nodes):
    """Padded to: the number before the layout in each plan's text."""
    return {text.split(" | ")[0].split()[-1] for args in calls(nodes, "apply_attention") for text in args[3]}


def test_the_whole_is_what_a_user_gets():
    nodes, training = graphs_of(WHOLE)
    # per encoder four linear layers around attention and two of a bridge; equal shapes and plans are merged in one call
    found = [len(calls(nodes, name)) for name in ("apply_operands", "apply_attention", "apply_bridge")]
    assert found == [0, SIZES.encoders, SIZES.encoders]
    assert len(calls(nodes, "merge_cores")) < 6 * SIZES.encoders
    assert training.done == 1 and len(comera.report(training.model).tensorized) == 7


def test_without_sharing_every_weight_is_merged_on_its_own():
    nodes, _ = graphs_of(PARTS["sharing"])
    assert len(calls(nodes, "merge_cores")) == 6 * SIZES.encoders
    # the plans are those of the whole: nothing else was switched off
    together, _ = graphs_of(WHOLE)
    for name, place in (("apply_attention", 3), ("apply_bridge", 2)):
        assert [a[place] for a in calls(nodes, name)] == [a[place] for a in calls(together, name)]


def test_without_padding_bonds_stay_as_they_are():
    uneven = replace(SETTING, rank=6)
    assert bonds(graphs_of(WHOLE, uneven)[0]) == {"8"} and bonds(graphs_of(PARTS["padding"], uneven)[0]) == {"1"}
    assert choose.CPU_BOND_MULTIPLE == 8
    assert bonds(graphs_of(WHOLE, uneven)[0]) == {"8"}  # nothing unpadded is left in a cache
    assert UNEVEN_RANK % 8 and PARTS["padding"].rank == UNEVEN_RANK


def test_without_the_joint_plan_it_is_the_one_of_fewest_operations_in_the_forward():
    asked, plan = [], choose.plans_by_rows

    def recorded(*settings):
        asked.append(settings)
        return plan(*settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("comera_compile.passes.plan_contractions.plans_by_rows", recorded)
        graphs_of(PARTS["joint_plan"])
        without = set(asked)
        asked.clear()
        graphs_of(WHOLE)
    assert {(s[5], s[7]) for s in without} == {(False, "flops")}  # training, objective
    assert {(s[5], s[7]) for s in asked} == {(True, "time")}


@pytest.mark.parametrize(("part", "gone"), [("bridges", "apply_bridge"), ("attention", "apply_attention")])
def test_without_a_region_its_layers_run_one_by_one(part, gone):
    nodes, _ = graphs_of(PARTS[part])
    together, _ = graphs_of(WHOLE)
    names = ("apply_bridge", "apply_attention", "apply_operands")
    counts = {name: len(calls(nodes, name)) for name in names}
    assert counts[gone] == 0 and counts["apply_operands"] == {"bridges": 2, "attention": 4}[part] * SIZES.encoders
    others = set(names) - {gone, "apply_operands"}
    assert all(counts[name] == len(calls(together, name)) > 0 for name in others)


@pytest.mark.parametrize(
    ("name", "left"),
    [("whole", {"merge", "attend", "bridge"}), ("merge_kernel", {"attend", "bridge"}), ("own_kernels", set())],
)
def test_without_kernels_torch_does_the_same(name, left):
    training = build(PARTS.get(name, WHOLE), SETTING, **SMALL)
    with torch.profiler.profile() as profile:
        training.step()
    ran = {event.key for event in profile.key_averages()}
    assert "aten::native_layer_norm" in ran
    assert {op for op in ("merge", "attend", "bridge") if f"comera::{op}" in ran} == left


def test_switches_go_back_and_training_is_the_same():
    before = pipeline.plan_contractions, lower_plans._merge_all, choose.CPU_BOND_MULTIPLE
    losses = []
    for part in (WHOLE, *PARTS.values()):
        training = build(replace(part, rank=None), SETTING, **SMALL)
        training.run(2)
        losses.append(training.loss)
    assert before == (pipeline.plan_contractions, lower_plans._merge_all, choose.CPU_BOND_MULTIPLE)
    # three steps from the same cores: other orders of the same sums, so equal up to rounding
    assert max(losses) - min(losses) < 1e-5


def test_figures_of_every_part(capsys, tmp_path):
    chosen = ("joint_plan", "padding")
    parts = {name: replace(PARTS[name], rank=PARTS[name].rank and 6) for name in chosen}
    result = measure(parts, SETTING, rounds=2, seconds=30.0, **SMALL)
    assert result["ranks"] == {"joint_plan": 8, "padding": 6}  # each beside a whole of its own rank
    for name in chosen:
        assert result["time_over_whole"][name] > 0 and result["rounds"][name] >= 2
        raw = result["raw_seconds"][name]
        ratios = sorted(off / on for off, on in zip(raw[name], raw["whole"], strict=True))
        assert ratios[0] <= result["time_over_whole"][name] <= ratios[-1]  # without over whole, round by round
        assert sum(result["plans"][name].values()) == 6 * SIZES.encoders + 1  # the layers and the table
    ablation.show(result)
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[2:]] == list(chosen)
    json.dumps(result)


def test_the_allocator_takes_turns_in_processes_of_its_own(monkeypatch):
    order = []

    def child(module, arguments, *, allocator):
        order.append(allocator)
        assert "--measure=whole" in arguments and "--batch=8" in arguments
        return {"milliseconds": {"keep": 100.0, "default": 150.0}[allocator] * len(order)}

    monkeypatch.setattr(ablation.process, "run_child", child)
    options = ablation.parse(["--sessions", "2"])
    found = ablation.measure_allocator(options)
    # the order turns round, so that a machine that slows down favours neither: 150 * 2 / 100 and 150 * 3 / 400
    assert order == ["keep", "default", "default", "keep"]
    assert found["time_over_whole"] == pytest.approx((3.0 + 1.125) / 2)


@pytest.mark.parametrize("arguments", [["--parts", "speed"], ["--rounds", "0"], ["--sessions", "-1"]])
def test_a_wrong_command_line_ends_with_what_is_right(arguments, capsys):
    with pytest.raises(SystemExit):
        ablation.parse(arguments)
    assert "--parts" in capsys.readouterr().err
    assert isinstance(ablation.parse([]), argparse.Namespace)

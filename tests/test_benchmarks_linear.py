"""The linear benchmark: its cases and keys, and that everything it times computes the same product."""

import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import linear_against_dense, linear_grid, linear_step, linear_table, paired
from benchmarks.fixed_strategies import STRATEGIES, FixedLinear, pairwise_steps
from benchmarks.floor import Machine
from benchmarks.linear_cases import DEFAULT, DENSE, EAGER, OURS, TENSORLY, Case, build, grid
from benchmarks.tensorly_linear import nearest_ranks
from comera_compile.tt.packing import pack, to_dense
from comera_compile.tt.shape import TTShape

SMALL = Case(24, 36, 3, 5)
SHAPES = {
    "three modes, all sizes different": TTShape("tt", 24, 30, (4, 3, 2), (2, 3, 5), (1, 3, 4, 7, 6, 2, 1)),
    "rank 1": TTShape("tt", 6, 4, (3, 2), (2, 2), (1, 1, 1, 1, 1)),
    "one mode a side": TTShape("tt", 5, 7, (5,), (7,), (1, 3, 1)),
    "unequal orders": TTShape("tt", 12, 7, (3, 2, 2), (7,), (1, 3, 2, 4, 1)),
}


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_fixed_strategy_is_the_product_with_the_rebuilt_weight(strategy, shape):
    # a rival that computes something else, or drops a gradient, would make the comparison worthless
    layer = FixedLinear(shape, strategy, rows=4).double()
    for core in layer.cores:
        torch.nn.init.normal_(core)
    x, grad = torch.randn(4, shape.cols, dtype=torch.float64, requires_grad=True), torch.randn(4, shape.rows).double()
    inputs = [x, *layer.cores]
    y, expected = layer(x), x @ to_dense(pack(list(layer.cores), shape), shape).t()
    torch.testing.assert_close(y, expected)
    ours, right = (torch.autograd.grad(out, inputs, grad) for out in (y, expected))
    torch.testing.assert_close(ours, right)


def test_a_fixed_strategy_refuses_padded_modes():
    with pytest.raises(ValueError, match="multiply to 23 x 4"):
        FixedLinear(TTShape("tt", 23, 4, (6, 4), (2, 2), (1, 2, 2, 2, 1)), "rebuilt", rows=1)


@pytest.mark.parametrize(("rank", "rows", "fewest"), [(32, 512, "merged_halves"), (64, 32, "core_by_core")])
def test_no_strategy_has_fewer_operations_than_the_optimal_path(rank, rows, fewest):
    # many rows: merging is best; few rows and a high rank: core by core is; rebuilding never
    flops = {}
    for name in STRATEGIES:
        with FlopCounterMode(display=False) as counter:
            FixedLinear(Case(768, 768, rank, rows).shape, name, rows=rows)(torch.randn(rows, 768))
        flops[name] = counter.get_total_flops()
    optimal = flops.pop("opt_einsum")
    assert optimal <= min(flops.values()) and len(set(flops.values())) == 3
    assert min(flops, key=flops.get) == fewest and max(flops, key=flops.get) == "rebuilt"


def test_the_optimal_path_is_pairwise_and_leaves_one_tensor():
    steps = pairwise_steps(SHAPES["three modes, all sizes different"], rows=4)
    assert len(steps) == 6 and all(len(positions) == 2 for positions, _ in steps)  # x and six cores


def gradients_of(variant, case):
    """Output and gradients of two steps of a variant, and the float64 reference of the second."""
    batches = case.batches()
    step = build(variant, case, batches, inner="aot_eager")
    step.step()
    assert [p.grad for p in step.layer.parameters()] == [None] * len(step.learned)  # dropped: else they add up
    x, grad = batches[1]
    assert batches[0][0].grad is None
    step.gradients()
    return step, x, grad


@pytest.mark.parametrize("variant", [DENSE, OURS, *STRATEGIES])
def test_every_variant_takes_all_gradients_of_its_own_weight(variant):
    step, x, grad = gradients_of(variant, SMALL)
    if variant == DENSE:
        learned = [p.detach().double().requires_grad_() for p in step.learned]
        [weight] = learned
    elif variant == OURS:
        shape = TTShape.from_tensor(step.layer.state_dict()["weight_tt"])
        assert shape.core_shapes == SMALL.shape.core_shapes  # it is a tensor train, of the shape the floor assumes
        learned = [step.learned[0].detach().double().requires_grad_()]
        weight = to_dense(learned[0], shape)
    else:
        learned = [p.detach().double().requires_grad_() for p in step.learned]
        weight = to_dense(pack(learned, SMALL.shape), SMALL.shape)
    x64 = x.detach().double().requires_grad_()
    expected = torch.autograd.grad(x64 @ weight.t(), [x64, *learned], grad.double())
    for got, right in zip([x.grad, *(p.grad for p in step.learned)], expected, strict=True):
        assert (got.double() - right).norm() <= 1e-5 * right.norm()


@pytest.mark.parametrize("variant", [*TENSORLY, *(name + EAGER for name in TENSORLY)])
def test_tensorly_is_the_product_with_its_own_matrix(variant):
    pytest.importorskip("tltorch")
    step, x, grad = gradients_of(variant, SMALL)
    weight = step.layer.weight.to_matrix()
    assert step.layer.bias is None and weight.shape == (36, 24)
    torch.testing.assert_close(x.grad, grad @ weight)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in step.learned)


def test_tensorly_gets_as_many_parameters_as_ours():
    shape = linear_against_dense.PEER_CASE.shape
    pairs = [m * n for m, n in zip(shape.row_modes, shape.col_modes, strict=True)]
    ranks = nearest_ranks(shape)
    numel = sum(a * p * b for a, p, b in zip(ranks[:-1], pairs, ranks[1:], strict=True))
    assert abs(numel / shape.numel - 1) < 0.02


def test_the_default_cases_are_those_that_have_bars():
    names = {case.name for case in DEFAULT}
    square, wide = "768x768_r{}_T{}", "768x3072_r{}_T{}"
    assert names == {
        *(square.format(rank, 512) for rank in (16, 30, 32)),
        *(wide.format(rank, 512) for rank in (16, 32)),
        *("4096x4096_r32_T512", square.format(16, 32), wide.format(32, 4096)),
    }
    assert linear_against_dense.PEER_CASE in DEFAULT
    assert (wide_case := Case(768, 3072, 32, 1)).shape.cols == 768 and wide_case.shape.rows == 3072  # in x out


def test_the_grid_is_five_layers_four_ranks_three_row_counts():
    cases = list(grid())
    assert len(cases) == len({c.name for c in cases}) == 60
    assert {(c.inner, c.out) for c in cases} >= {(3072, 768), (1024, 4096)}
    assert not any(c.shape.padded for c in cases)  # every strategy can run them


def test_cases_are_chosen_by_pattern():
    options = linear_step.parse(["--cases", "768x768_r*_T512"])
    assert [c.name for c in options.chosen] == [f"768x768_r{r}_T512" for r in (32, 30, 16)]
    assert len(linear_step.parse(["--grid"]).chosen) == 60
    assert options.threads == 2 and options.measure == "all" and options.peer


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "768x769*"], "768x768_r32_T512"),
        (["--rounds", "0"], "at least 1"),
        (["--resume", "--grid"], "--json FILE"),
    ],
)
def test_a_wrong_command_line_says_what_is_right(arguments, said, capsys):
    with pytest.raises(SystemExit):
        linear_step.parse(arguments)
    assert said in capsys.readouterr().err


def test_least_work_is_what_torch_counts():
    case = Case(768, 3072, 32, 40)
    layers = {DENSE: torch.nn.Linear(768, 3072, bias=False), OURS: FixedLinear(case.shape, "merged_halves", 40)}
    for variant, layer in layers.items():
        x = torch.randn(40, 768, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        assert counter.get_total_flops() == case.work(variant).flops
    # y and dx written, x and dy read twice, the weight read twice and its gradient written
    assert case.work(DENSE).bytes == 4 * 3 * (40 * 768 + 40 * 3072 + 768 * 3072)


def timing_of(**seconds):
    return paired.Timing({name: list(each) for name, each in seconds.items()})


def test_figures_of_a_session_have_the_keys_of_the_bars(monkeypatch):
    cases = [Case(24, 36, 3, 5), Case(24, 36, 2, 5)]
    monkeypatch.setattr(linear_against_dense, "RANK_PAIR", (2, 3))

    def measured(steps, baseline, *, rounds, seconds):
        assert list(steps) == [DENSE, *(c.name for c in cases)] and baseline == DENSE
        taken = {DENSE: [8.0, 16.0, 24.0], cases[0].name: [2.0, 4.0, 6.0], cases[1].name: [1.0, 2.0, 3.0]}
        return dict.fromkeys(steps, paired.Timing(taken, processor=1.0))

    monkeypatch.setattr(paired, "compare", measured)
    result = linear_against_dense.measure(cases, rounds=3, seconds=1.0)
    assert result["speedup"] == {"24x36_r3_T5": 4.0, "24x36_r2_T5": 8.0}
    assert result["time_ratio_r30_over_r32"] == 0.5  # the lower rank's time over the higher one's
    assert result["milliseconds"]["24x36_r3_T5"] == {DENSE: 16e3, OURS: 4e3}
    floors = linear_table.floors(result, cases, Machine(1e9, 1e9))
    assert floors["24x36_r3_T5"]["floor_ms"][DENSE] == pytest.approx(1e3 * 6 * 5 * 24 * 36 / 1e9)


def row_of(ours, **others):
    seconds = {OURS: [ours] * 3, **{name: [others.get(name, 9.0)] * 3 for name in STRATEGIES}}
    return {"seconds": seconds, "plan": "merge both halves"}


def test_the_worst_case_of_the_grid_is_against_the_best_strategy():
    rows = {"a": row_of(2.0, rebuilt=4.0, opt_einsum=3.0), "b": row_of(2.0, core_by_core=1.0)}
    result = linear_grid.figures(rows)
    assert result["over_best_fixed"] == {"a": pytest.approx(2 / 3), "b": 2.0}
    assert result["worst_over_best_fixed"] == 2.0 and result["worst_case"] == "b"
    assert result["speedup_over"]["rebuilt"] == {"a": 2.0, "b": 4.5}
    # a longer session of the two decides, where there was one
    rows["b"]["again"] = {OURS: [2.0, 2.0], "core_by_core": [1.9, 1.9]}
    assert linear_grid.figures(rows)["worst_over_best_fixed"] == pytest.approx(2 / 1.9)


def test_a_grid_goes_on_where_it_was_ended(tmp_path, monkeypatch):
    file, cases = tmp_path / "grid.json", [Case(24, 36, 3, 5), Case(24, 36, 2, 5)]
    facts = {"threads": 2, "torch": "x", "processor": "y", "commit": "z"}
    asked = []

    def measured(case, **limits):
        asked.append(case.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return row_of(1.0)

    monkeypatch.setattr(linear_grid, "measure_case", measured)
    with pytest.raises(KeyboardInterrupt):
        linear_grid.measure(cases, linear_grid.Progress(file, facts, resume=False), rounds=1, seconds=1.0)
    assert list(json.loads(file.read_text())["raw"]["cases"]) == [cases[0].name]
    progress = linear_grid.Progress(file, facts, resume=True)
    linear_grid.measure(cases, progress, rounds=1, seconds=1.0)
    assert asked == [cases[0].name, cases[1].name, cases[1].name] and len(progress.rows) == 2
    with pytest.raises(SystemExit, match="other conditions"):
        linear_grid.Progress(file, {**facts, "threads": 1}, resume=True)


def test_a_case_of_the_grid_is_measured_with_all_strategies(monkeypatch):
    # eager lowering: what is tested is that steps, plan and rows come together, not Inductor
    def quick(variant, case, batches):
        return build(variant, case, batches, inner="aot_eager")

    monkeypatch.setattr(linear_grid, "build", quick)
    row = linear_grid.measure_case(SMALL, rounds=2, seconds=1.0)
    assert set(row["seconds"]) == {OURS, *STRATEGIES} and row["plan"] != "none"
    assert all(math.isfinite(t) for taken in row["seconds"].values() for t in taken)
    json.dumps(row)

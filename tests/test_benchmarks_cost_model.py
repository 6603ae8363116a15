"""Ranks, figures and what is run: the benchmark must not flatter the model."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import cost_model
from benchmarks.cost_model import Case, Measured, figures, ranks, spearman
from comera_compile import plan_timing
from comera_compile.plan_timing import traced
from comera_compile.planning.cost import Cost
from comera_compile.planning.device_model import cpu_model
from comera_compile.planning.linear_plan import candidates
from comera_compile.replay import replay
from comera_compile.tt.packing import to_dense

TINY = Case(60, 48, 6, 10)
PLANS = candidates(TINY.shape, "cols", 16)


def measured(predicted: list[float], flops: list[int], seconds: list[float]) -> Measured:
    costs = [Cost(f, 2 * f, p) for f, p in zip(flops, predicted, strict=True)]
    return Measured(TINY, PLANS[: len(costs)], costs, seconds)


def test_ranks_by_hand() -> None:
    assert ranks([3.0, 1.0, 2.0]) == [2.0, 0.0, 1.0]
    assert ranks([5.0, 1.0, 5.0, 0.0]) == [2.5, 1.0, 2.5, 0.0]  # equal values share the mean


def test_spearman_by_hand() -> None:
    assert spearman([1.0, 2.0, 30.0], [5.0, 6.0, 7.0]) == pytest.approx(1.0)
    assert spearman([1.0, 2.0, 3.0], [9.0, 4.0, 1.0]) == pytest.approx(-1.0)
    # 1 - 6 sum d^2 / (n (n^2 - 1)) with d = 1, 1, 0, 0
    assert spearman([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0]) == pytest.approx(0.8)


def test_figures_by_hand() -> None:
    rows = [
        # The order is right, each prediction 20 % short.
        measured([0.8, 1.6, 2.4], [1, 2, 3], [1.0, 2.0, 3.0]),
        # The plan that looks best takes 1.2 times the best; FLOPs choose the best one.
        measured([1.0, 2.0, 3.0], [3, 2, 6], [2.4, 2.0, 6.0]),
    ]
    time = figures(rows, "time")
    assert time.spearman == pytest.approx((1.0 + 0.5) / 2)
    assert time.within_10_percent == 0.5
    # 0.2 three times; 1.4/2.4, 0 and 0.5
    assert time.median_relative_error == pytest.approx(0.2)
    flops = figures(rows, "flops")
    # The one rate that suits most plans is a second a FLOP; only 3 FLOPs in 2.4 s miss it.
    assert flops.median_relative_error == 0.0 and flops.within_10_percent == 1.0
    assert figures(rows, "bytes") == flops  # two bytes a FLOP here: only the rate differs


STACKING = (torch.ops.comera.stack_packed.default, torch.ops.comera.join_cores.default)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_what_is_timed_gives_every_gradient(plan: cost_model.LinearPlan) -> None:
    packed = torch.randn(TINY.shape.numel)
    x, grad = torch.randn(TINY.rows, TINY.inner), torch.randn(TINY.rows, TINY.out)
    run = traced(plan, torch.zeros_like(packed), torch.zeros_like(x), torch.zeros_like(grad))
    got = run(packed, x, grad)
    packed.requires_grad_(), x.requires_grad_()
    y = x @ to_dense(packed, TINY.shape.with_scale(1.0)).t()
    expected = torch.autograd.grad(y, (packed, x), grad)
    for ours, right in zip(got, expected, strict=True):
        assert torch.allclose(ours, right, atol=1e-4 * float(right.abs().max()))


def test_what_is_timed_has_the_products_of_the_plan() -> None:
    # Autograd around it or an einsum in it would time something that compiled graphs do not hold.
    for plan in PLANS:
        packed, x = torch.randn(TINY.shape.numel), torch.randn(TINY.rows, TINY.inner)
        graph = traced(plan, packed, x, torch.randn(TINY.rows, TINY.out)).graph
        products = [n for n in graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)]
        # Merging is one operator each way, but where W is rebuilt; two merged halves are applied by three operators.
        targets = [n.target for n in graph.nodes if n.op == "call_function" and n.target not in STACKING]
        own = [t.name() for t in targets if "comera" in str(t)]
        merging = [] if plan.dense else ["comera::merge"]
        applying = ["comera::narrow", "comera::wide", "comera::skinny_backward"] if plan.merged else []
        assert own == [*merging, *applying, *(f"{name}_backward" for name in merging)]
        steps = () if plan.merged else plan.apply.steps
        assert len(products) == 3 * (len(steps) + (len(plan.merge.steps) if plan.dense else 0))


def chain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views, a product of transposed operands, padding, a copy into another order, a batched product, an input."""
    y = torch.mm(x, w.t())
    padded = torch.nn.functional.pad(y, [0, 2])
    turned = padded.reshape(2, -1, padded.shape[1]).permute(1, 0, 2).contiguous()
    return torch.bmm(turned, turned.transpose(1, 2)), y[1:], w


def test_a_replay_computes_what_the_graph_does() -> None:
    x, w = torch.randn(6, 5), torch.randn(4, 5)
    run = replay(make_fx(chain)(torch.randn(6, 5), torch.randn(4, 5)), (x, w))
    for _ in range(2):
        for ours, right in zip(run(), chain(x, w), strict=True):
            assert torch.equal(ours, right)
    x.mul_(2)  # it computes anew each time, from what its inputs hold then
    for ours, right in zip(run(), chain(x, w), strict=True):
        assert torch.equal(ours, right)


def test_a_replay_refuses_what_it_cannot_write_into_memory() -> None:
    graph = make_fx(lambda x: torch.unique(x))(torch.arange(3.0))
    with pytest.raises(ValueError, match="expected an operation that can write into given memory"):
        replay(graph, [torch.arange(3.0)])


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_a_replayed_plan_gives_the_gradient_of_x(plan: cost_model.LinearPlan) -> None:
    packed, x, grad = (
        torch.randn(TINY.shape.numel),
        torch.randn(TINY.rows, TINY.inner),
        torch.randn(TINY.rows, TINY.out),
    )
    run = replay(traced(plan, packed, x, grad), (packed, x, grad), plan_timing._SAME)
    expected = grad @ to_dense(packed, TINY.shape.with_scale(1.0))
    assert torch.allclose(run()[1], expected, atol=1e-4 * float(expected.abs().max()))


def test_enough_plans_of_enough_cases() -> None:
    counts = [len(candidates(case.shape, "cols", 16)) for case in cost_model.CASES]
    assert len(counts) >= 20 and min(counts) >= 8 and sum(counts) >= 200
    assert len({case.name for case in cost_model.CASES}) == len(counts)


def test_a_case_from_end_to_end() -> None:
    found = cost_model.measure(TINY, cpu_model(2), rounds=2, seconds=5.0)
    result = cost_model.result([found])
    assert result["plans"] == len(PLANS) == len(found.seconds) and all(s > 0 for s in found.seconds)
    for figure in (result, result["flops_only"], result["bytes_only"]):
        assert -1 <= figure["spearman"] <= 1 and figure["median_relative_error"] >= 0
        assert figure["within_10_percent"] in (0.0, 1.0)
    assert [row["predicted"] for row in cost_model.raw([found])[TINY.name]] == [c.seconds for c in found.costs]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--threads", "0"], "must be positive"),
        (["--seconds", "0"], "must be positive"),
        (["--cases", "1x1"], "--cases must be part of one of"),
        (["--shipped", "--calibrate"], "exclude each other"),
    ],
)
def test_wrong_command_lines(wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cost_model.parse(wrong)
    assert message in capsys.readouterr().err


def test_cases_can_be_chosen() -> None:
    assert [case.name for case in cost_model.parse(["--cases", "4096x4096"]).cases] == [
        "4096x4096_r16_T32",
        "4096x4096_r16_T256",
    ]

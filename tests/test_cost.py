"""Operations and bytes against figures counted by hand; how a predicted time is put together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from comera_compile.planning.cost import (
    CUDA_MODEL,
    IN_PLAN,
    DeviceModel,
    cost_by_rows,
    cpu_model,
    dense_cost,
    plan_cost,
    saved_bytes,
    step_cost,
    steps_cost,
)
from comera_compile.planning.device_model import ProductTimes
from comera_compile.planning.kernel_times import KernelTimes
from comera_compile.planning.linear_plan import LinearPlan, Side, candidates
from comera_compile.planning.step import Step, Tensor
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.shape import TTShape

# CoMERA's own modes and ranks (arXiv 2405.14377) for its attention and feed-forward matrices.
SQUARE = TTShape("tt", 768, 768, (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
WIDE = TTShape("tt", 768, 3072, (12, 8, 8), (12, 16, 16), (1, 12, 30, 30, 30, 16, 1))
PADDED = TTShape("tt", 23, 29, (4, 3, 2), (2, 3, 5), (1, 4, 6, 7, 5, 3, 1))
# Seconds are operations: nothing else takes time.
FLOPS_ONLY = DeviceModel(1.0, math.inf, 0.0, 0.0, 0.0)


def plan_named(name: str, shape: TTShape, contracts: Side = "cols", bond_multiple: int = 1) -> LinearPlan:
    return next(p for p in candidates(shape, contracts, bond_multiple) if p.name == name)


def multiplications(plan: LinearPlan, rows: int) -> int:
    """Multiply-adds of a forward."""
    return plan_cost(plan, rows, FLOPS_ONLY, training=False).flops // 2


def per_row_and_merge(plan: LinearPlan) -> tuple[int, int]:
    per_row = multiplications(plan, 1001) - multiplications(plan, 1000)
    return per_row, multiplications(plan, 1000) - 1000 * per_row


@pytest.mark.parametrize(
    ("shape", "name", "per_row", "merge"),
    [
        # 30 * (768 + 768) a row; merging a half: 12*12*8*30 + 96*30*8*30 from its rank-1 end.
        (SQUARE, "merge both halves", 46_080, 2 * 725_760),
        (WIDE, "merge both halves", 115_200, 725_760 + 2_887_680),
        # sum over cores of (modes still there) * (rank in) * (mode) * (rank out), inwards and outwards alike.
        (SQUARE, "core by core", 78_912, 0),
        (WIDE, "core by core", 191_568, 0),
        (SQUARE, "rebuild W", 768 * 768, 2 * 725_760 + 30 * 768 * 768),
        (WIDE, "rebuild W", 768 * 3072, 725_760 + 2_887_680 + 30 * 768 * 3072),
    ],
)
def test_forward_operations_by_hand(shape: TTShape, name: str, per_row: int, merge: int) -> None:
    for contracts in ("rows", "cols"):  # the same products in another order
        assert per_row_and_merge(plan_named(name, shape, contracts)) == (per_row, merge)


def test_padding_the_bond_costs_what_it_computes() -> None:
    # A bond of 30 becomes one of 32, in the two products with the rows only.
    assert per_row_and_merge(plan_named("merge both halves", SQUARE, "cols", 16)) == (32 * 1536, 2 * 725_760)


def test_training_takes_three_times_the_forward() -> None:
    # Each product has two adjoints of its own size; one whose gradient nobody wants does not exist here.
    for plan in candidates(SQUARE, "cols", 16):
        forward = plan_cost(plan, 64, FLOPS_ONLY, training=False)
        assert plan_cost(plan, 64, FLOPS_ONLY, training=True).flops == 3 * forward.flops


@pytest.mark.parametrize(("shape", "crossover"), [(SQUARE, 44.2), (WIDE, 47.3)])
def test_core_by_core_needs_fewer_operations_for_few_rows_only(shape: TTShape, crossover: float) -> None:
    # Merging pays once rows * (saving a row) exceeds the merge: 1,451,520 / 32,832 and 3,613,440 / 76,368. CoMERA's
    # prefix order, with its dearer merge of the right half, would cross at 52 and 65.
    merged, chained = (plan_named(name, shape) for name in ("merge both halves", "core by core"))
    below, above = math.floor(crossover), math.ceil(crossover)
    assert multiplications(chained, below) < multiplications(merged, below)
    assert multiplications(merged, above) < multiplications(chained, above)


def test_dense_rebuild_needs_fewest_operations_above_the_break_even_bond() -> None:
    # A row costs bond * (M + N) in two products and M * N in one: equal at 384 for 768 x 768.
    for bond, rebuild in ((383, False), (385, True)):
        shape = TTShape("tt", 768, 768, (768,), (768,), (1, bond, 1))
        merged, rebuilt = candidates(shape, "cols", 1)
        assert (per_row_and_merge(rebuilt)[0] < per_row_and_merge(merged)[0]) is rebuild


def test_time_of_a_step_by_hand() -> None:
    step = Step(Tensor("y", ("t", "m")), Tensor("x", ("t", "n")), Tensor("w", ("m", "n")))
    sizes = {"t": 100, "m": 20, "n": 30}
    flops, elements = 2 * 100 * 20 * 30, 100 * 30 + 20 * 30 + 100 * 20
    # Limited by arithmetic: the smallest dimension of 20 against a half-rate size of 20 gives half of the peak.
    busy = step_cost(step, sizes, DeviceModel(1e6, 1e12, 0.0, 0.0, 20.0), 4)
    assert (busy.flops, busy.bytes, busy.seconds) == (flops, 4 * elements, pytest.approx(flops / 5e5))
    # Limited by memory, in elements of two bytes.
    assert step_cost(step, sizes, DeviceModel(1e12, 1e3, 0.0, 0.0, 0.0), 2).seconds == 2 * elements / 1e3
    # Limited by the launch.
    assert step_cost(step, sizes, DeviceModel(1e15, 1e15, 1e-6, 0.0, 0.0), 4).seconds == 1e-6


def test_copies_and_batches_come_on_top() -> None:
    step = Step(Tensor("y", ("b", "m", "k")), Tensor("x", ("b", "m", "n")), Tensor("w", ("n", "b", "k")))
    sizes = {"b": 3, "m": 2, "n": 4, "k": 5}
    launches = DeviceModel(1e15, 1e3, 1.0, 0.01, 0.0)
    cost = step_cost(step, sizes, launches, 4)
    # w is copied: read and written once. Each of the three matrices of the product costs a hundredth.
    assert cost.seconds == pytest.approx(1.0 + 2 * 4 * 60 / 1e3 + 3 * 0.01)
    assert cost.bytes == 4 * (3 * 2 * 4 + 60 + 3 * 2 * 5) + 2 * 4 * 60


def test_a_plan_costs_the_sum_of_its_steps() -> None:
    # What is counted once and then used for any number of rows is what counting the steps anew gives.
    for device in (cpu_model(2), CUDA_MODEL):
        for plan in [*candidates(SQUARE, "cols", 16), *candidates(PADDED, "rows", 1)]:
            at = cost_by_rows(plan, device, 2, training=True)
            for rows in (1, 7, 5000):
                merge = plan.merge.steps + plan.merge.backward(plan.merge.input_names)
                apply = plan.apply.steps + plan.apply.backward(plan.apply.input_names)
                once = steps_cost(merge, plan.core_sizes, device, 2)
                expected = once + steps_cost(apply, {**plan.operand_sizes, "t": rows}, device, 2)
                assert at(rows) == plan_cost(plan, rows, device, 2) == expected
                assert expected.flops == sum(s.flops({**plan.core_sizes}) for s in merge) + sum(
                    s.flops({**plan.operand_sizes, "t": rows}) for s in apply
                )


@pytest.mark.parametrize("contracts", ["rows", "cols"])
def test_a_dense_layer_by_hand(contracts: Side) -> None:
    # y = x W', dx = dy W, dW = dy' x: three products of 2 * t * in * out operations, of which each reads two and writes
    # one of the tensors x, W, y or their gradients. No merge, no modes.
    flops, moved = 2 * 100 * 768 * 3072, 2 * (100 * 768 + 768 * 3072 + 100 * 3072)
    forward, step = (dense_cost(WIDE, 100, FLOPS_ONLY, 2, training=t, contracts=contracts) for t in (False, True))
    assert (forward.flops, forward.bytes, forward.seconds) == (flops, moved, flops)
    assert (step.flops, step.bytes, step.seconds) == (3 * flops, 3 * moved, 3 * flops)
    # Each product narrowed by its smallest size, 100 rows, which a half-rate size of 100 makes half as fast.
    assert dense_cost(WIDE, 100, DeviceModel(1e9, math.inf, 0.0, 0.0, 100.0)).seconds == pytest.approx(6 * flops / 1e9)


def test_dense_is_the_rebuild_without_its_merge() -> None:
    # The same product as the plan that makes W first, in the form and with the copies that it has there: none.
    for contracts in ("rows", "cols"):
        rebuilt = plan_named("rebuild W", WIDE, contracts)
        for device, training in ((cpu_model(2), True), (CUDA_MODEL, False)):
            steps = rebuilt.apply.steps + (rebuilt.apply.backward(("x", "W")) if training else ())
            applied = steps_cost(steps, {**rebuilt.operand_sizes, "t": 512}, device, 4)
            assert dense_cost(WIDE, 512, device, training=training, contracts=contracts) == applied


def test_no_rows_cost_the_merge_and_the_launches() -> None:
    plan = plan_named("merge both halves", SQUARE)
    cost = plan_cost(plan, 0, cpu_model(1))
    merge = steps_cost(plan.merge.steps + plan.merge.backward(plan.merge.input_names), plan.core_sizes, cpu_model(1), 4)
    assert cost.flops == merge.flops
    assert math.isfinite(cost.seconds) and cost.seconds > merge.seconds


def test_more_threads_take_no_longer() -> None:
    for plan in candidates(WIDE, "cols", 16):
        assert plan_cost(plan, 512, cpu_model(8)).seconds <= plan_cost(plan, 512, cpu_model(1)).seconds


def test_saved_bytes_by_hand() -> None:
    # For each row h (bond 32); for the weight both halves with their padded bond, and the inner merge result of each
    # half, 12*8*30 elements. x and the packed cores exist anyway.
    merged = plan_named("merge both halves", SQUARE, "cols", 16)
    assert saved_bytes(merged, 1000, 4) == 4 * (1000 * 32 + 2 * 32 * 768 + 2 * 12 * 8 * 30)
    assert saved_bytes(merged, 1000, 2) == saved_bytes(merged, 1000, 4) // 2
    # One product keeps nothing for each row but x, though W, both halves and their inner results.
    rebuilt = plan_named("rebuild W", SQUARE)
    assert saved_bytes(rebuilt, 1000, 4) == 4 * (768 * 768 + 2 * 30 * 768 + 2 * 12 * 8 * 30)
    # Core by core keeps every tensor between two cores, wider than x where a mode gives way to a larger rank.
    chained = plan_named("core by core", SQUARE)
    wide = [s.out.numel({**chained.operand_sizes, "t": 1}) for s in chained.apply.steps[:-1]]
    assert wide == [64 * 12, 8 * 30, 30, 8 * 30, 64 * 12]
    assert saved_bytes(chained, 1000, 4) == 4 * 1000 * sum(wide)


def test_merged_plans_are_priced_for_the_operators_that_run_them() -> None:
    # Two calls forward and one back, at one rate each; merging is a call each way. FLOPs and bytes are the steps'.
    kernels = KernelTimes(1.0, ((8, 2.0),), ((8, 4.0),), ((4, 8.0),))
    device = DeviceModel(1.0, math.inf, 0.0, 0.0, 0.0, kernels=kernels)
    plans = candidates(choose_shape(48, 32, format="tt", rank=4, order=2), "cols", 8)
    plan = next(p for p in plans if p.merged)
    steps, adjoint = plan.merge.steps, plan.merge.backward(plan.merge.input_names)
    merging = sum(s.flops(plan.core_sizes) for s in (*steps, *adjoint))
    once = 2 * 100 * 8 * (48 + 32)
    ours = plan_cost(plan, 100, device)
    assert ours.seconds == pytest.approx(3 + once / 2 + 2 * once / 4 + 2 + merging / 8)
    by_steps = plan_cost(plan, 100, replace(device, kernels=None))
    assert (ours.flops, ours.bytes) == (by_steps.flops, by_steps.bytes) == (3 * once + merging, ours.bytes)
    # The other plans, other dtypes and wide bonds take torch's products.
    for other in (p for p in plans if p.dense):
        assert plan_cost(other, 100, device) == plan_cost(other, 100, replace(device, kernels=None))
    assert plan_cost(plan, 100, device, 2) == plan_cost(plan, 100, replace(device, kernels=None), 2)
    # Memory may be what is slow.
    assert plan_cost(plan, 100, replace(device, bytes_per_second=1e-3)).seconds > 100 * (48 + 32) * 4 / 1e-3


def test_measured_products_take_longer_in_a_plan_beside_own_operators() -> None:
    kernels = KernelTimes(1.0, ((8, 2.0),), ((8, 4.0),), ((4, 8.0),))
    table = ProductTimes((1, 4096), (0.0,) * 8)  # every product takes a second
    copies = (((1.0, 1.0), (2.0, 1.0)),) * 3
    measured = DeviceModel(1.0, math.inf, 0.0, 0.0, 0.0, copies=copies, products=(table,) * 3, batched=(table,) * 3)
    both = replace(measured, kernels=kernels)
    plan, rebuilt = plan_named("core by core", SQUARE), plan_named("rebuild W", SQUARE)  # neither merges by operators
    alone = plan_cost(plan, 100, measured)
    assert alone.seconds > 5
    assert plan_cost(plan, 100, both) == replace(alone, seconds=pytest.approx(IN_PLAN * alone.seconds))
    assert plan_cost(rebuilt, 100, both) == plan_cost(rebuilt, 100, measured)

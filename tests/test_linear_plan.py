"""Candidate plans: which there are, what they are called, what they hand over, and the order in which cores merge."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from comera_compile.planning.linear_plan import LinearPlan, Side, candidates
from comera_compile.planning.merge_order import merge_steps
from comera_compile.planning.step import Tensor
from comera_compile.tt.shape import TTShape

SHAPES = {
    "order 1": TTShape("tt", 6, 10, (6,), (10,), (1, 3, 1)),
    "order 3": TTShape("tt", 24, 30, (4, 3, 2), (2, 3, 5), (1, 4, 6, 7, 5, 3, 1), 0.1 + 0.2),
    "uneven orders": TTShape("tt", 12, 10, (3, 2, 2), (10,), (1, 2, 4, 5, 1)),
    "rows padded": TTShape("tt", 11, 8, (3, 4), (2, 4), (1, 2, 5, 2, 1)),
    "columns padded": TTShape("tt", 12, 7, (3, 4), (2, 4), (1, 2, 5, 2, 1)),
    "both padded": TTShape("tt", 23, 29, (4, 3, 2), (2, 3, 5), (1, 4, 6, 7, 5, 3, 1)),
}
SIDES: tuple[Side, ...] = ("rows", "cols")
ALL = [(shape, side, multiple) for shape in SHAPES.values() for side in SIDES for multiple in (1, 16)]


def every_plan() -> list[LinearPlan]:
    return [plan for shape, side, multiple in ALL for plan in candidates(shape, side, multiple)]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # A half of d cores is cut in 2 ** (d - 1) ways; the dense rebuild comes on top. A padded half is merged whole.
        ("order 1", 1 * 1 + 1),
        ("order 3", 4 * 4 + 1),
        ("uneven orders", 4 * 1 + 1),
        ("rows padded", 1 * 2 + 1),
        ("columns padded", 2 * 1 + 1),
        ("both padded", 1 * 1 + 1),
    ],
)
def test_every_grouping_is_a_candidate_once(name: str, count: int) -> None:
    for side in SIDES:
        plans = candidates(SHAPES[name], side, 16)
        assert len(plans) == len(set(plans)) == count
        assert [p.dense for p in plans].count(True) == 1
        assert [p.merged for p in plans].count(True) == 1


def test_only_whole_halves_stand_for_padding() -> None:
    # A padded mode product cannot be cropped between two groups, so x could not be split into its modes.
    for plan in every_plan():
        shape = plan.shape
        for groups, modes, size in (
            (plan.row_groups, shape.row_modes, shape.rows),
            (plan.col_groups, shape.col_modes, shape.cols),
        ):
            assert sum(groups) == len(modes)
            assert len(groups) == 1 or math.prod(modes) == size


def test_plans_survive_their_text() -> None:
    for plan in every_plan():
        assert LinearPlan.decode(plan.encode()) == plan
    # The scale is kept to the bit, though candidates never carry one: layers of any scale share their plans.
    scaled = replace(candidates(SHAPES["order 3"], "cols", 16)[3], shape=SHAPES["order 3"])
    assert LinearPlan.decode(scaled.encode()).shape.scale == 0.1 + 0.2
    assert all(plan.shape.scale == 1.0 for plan in every_plan())


def test_texts_differ_where_plans_do() -> None:
    assert len({plan.encode() for plan in every_plan()}) == len(set(every_plan()))


@pytest.mark.parametrize(
    ("rows", "cols", "dense", "name"),
    [
        ((3,), (3,), False, "merge both halves"),
        ((1, 1, 1), (1, 1, 1), False, "core by core"),
        ((2, 1), (1, 2), False, "merge 2+1 | 1+2"),
        ((3,), (1, 1, 1), False, "merge 3 | 1+1+1"),
        ((3,), (3,), True, "rebuild W"),
    ],
)
def test_names(rows: tuple[int, ...], cols: tuple[int, ...], dense: bool, name: str) -> None:
    assert LinearPlan(SHAPES["order 3"], "cols", rows, cols, dense).name == name


def test_one_core_a_half_is_both_halves_merged() -> None:
    plan, rebuilt = candidates(SHAPES["order 1"], "cols", 1)
    assert plan.merged and plan.name == "merge both halves" and rebuilt.name == "rebuild W"
    assert plan.merge.steps == ()


def test_sizes_agree_with_the_shape() -> None:
    for plan in every_plan():
        shape, sizes = plan.shape, plan.core_sizes
        # Cores without their boundary ranks, in packing order and of the packed sizes.
        names = [t.name for t in plan.merge.inputs]
        d, e = len(shape.row_modes), len(shape.col_modes)
        assert names == [f"A{k + 1}" for k in range(d)] + [f"B{k + 1}" for k in range(e)]
        assert [t.numel(sizes) for t in plan.merge.inputs] == list(shape.core_sizes)
        x, *operands = plan.apply.inputs
        assert tuple(operands) == plan.operands
        taken, given = (shape.cols, shape.rows) if plan.contracts == "cols" else (shape.rows, shape.cols)
        applied = {**plan.operand_sizes, "t": 7}
        assert (x.numel(applied), plan.apply.outputs[0].numel(applied)) == (7 * taken, 7 * given)


def test_steps_read_what_is_there() -> None:
    # A tensor read under other axes than it was made with would be a wrong product.
    for plan in every_plan():
        for program, sizes in ((plan.merge, plan.core_sizes), (plan.apply, {**plan.operand_sizes, "t": 7})):
            made = {t.name: t for t in program.inputs}
            for step in program.steps:
                assert made[step.left.name] == step.left and made[step.right.name] == step.right
                assert {*step.out.axes} <= {*step.left.axes, *step.right.axes} <= sizes.keys()
                assert step.out.name not in made  # each tensor is made once
                made[step.out.name] = step.out
            assert all(made[t.name] == t for t in program.outputs)


def test_bond_is_padded_for_merged_halves_only() -> None:
    for plan in every_plan():
        padded = -(-plan.shape.bond // 16) * 16
        assert plan.bond == (padded if plan.merged and plan.bond_multiple == 16 else plan.shape.bond)
        assert plan.operand_sizes["r"] == plan.bond and plan.core_sizes["r"] == plan.shape.bond


def test_merged_operands_are_matrices_of_the_bond() -> None:
    for contracts in SIDES:
        merged, *_ = candidates(SHAPES["both padded"], contracts, 16)
        assert [t.axes for t in merged.operands] == [("r", "m"), ("r", "n")]
        assert [t.numel(merged.operand_sizes) for t in merged.operands] == [16 * 23, 16 * 29]
        # The rows meet the contracted side first: h = x B' has one number a row and bond, y = h A.
        first, second = merged.apply.steps
        assert first.right.name == ("B" if contracts == "cols" else "A")
        assert first.out.axes == ("t", "r") and second.out.axes[0] == "t"
        assert first.copied == second.copied == ()


def test_dense_rebuild_is_one_product_with_the_cropped_matrix() -> None:
    for contracts in SIDES:
        plan = candidates(SHAPES["both padded"], contracts, 16)[-1]
        (step,) = plan.apply.steps
        assert [t.numel(plan.operand_sizes) for t in plan.operands] == [23 * 29]
        assert step.copied == ()
        assert step.flops({**plan.operand_sizes, "t": 7}) == 2 * 7 * 23 * 29


def cheapest(tensors: tuple[frozenset[str], ...], final: frozenset[str], sizes: dict[str, int]) -> int:
    """Fewest operations over all pairwise orders, by trying each: shares nothing with the code under test."""
    if len(tensors) == 1:
        return 0
    best = None
    for left, right in itertools.combinations(range(len(tensors)), 2):
        rest = tuple(t for k, t in enumerate(tensors) if k not in (left, right))
        union = tensors[left] | tensors[right]
        kept = frozenset(a for a in union if a in final or any(a in t for t in rest))
        total = 2 * math.prod(sizes[a] for a in union) + cheapest((*rest, kept), final, sizes)
        best = total if best is None else min(best, total)
    assert best is not None
    return best


def chain(draw: random.Random, count: int) -> tuple[list[Tensor], tuple[str, ...], dict[str, int]]:
    """Neighbouring cores with random modes and ranks, sometimes with a boundary core among them."""
    ranks = [f"p{k}" for k in range(count + 1)]
    cores = [Tensor(f"A{k + 1}", (ranks[k], f"m{k + 1}", ranks[k + 1])) for k in range(count)]
    if draw.random() < 0.5:
        cores[0] = Tensor("A1", cores[0].axes[1:])
    # From 2 on: with a rank of 1 a product over it is an outer one, for which opt_einsum counts half the operations.
    sizes = {a: draw.choice((2, 3, 8, 13)) for core in cores for a in core.axes}
    seen = Counter(a for core in cores for a in core.axes)
    return cores, tuple(sorted(a for a, times in seen.items() if times == 1)), sizes


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_merging_costs_no_more_than_any_pairwise_order(count: int) -> None:
    draw = random.Random(count)
    for _ in range(30 if count < 5 else 6):
        cores, axes, sizes = chain(draw, count)
        merged, steps = merge_steps(cores, "A", axes, sizes)
        right = cheapest(tuple(frozenset(c.axes) for c in cores), frozenset(axes), sizes)
        assert sum(s.flops(sizes) for s in steps) == right
        assert merged == Tensor("A", axes) and len(steps) == count - 1


def test_merged_axes_come_as_asked_and_each_tensor_is_read_once() -> None:
    cores, axes, sizes = chain(random.Random(1), 4)
    for asked in itertools.islice(itertools.permutations(axes), 20):
        merged, steps = merge_steps(cores, "A", asked, sizes)
        assert merged.axes == asked
        read = Counter(t.name for s in steps for t in (s.left, s.right))
        assert read == Counter([c.name for c in cores] + [s.out.name for s in steps[:-1]])


def test_a_single_core_needs_no_merging() -> None:
    core = Tensor("A1", ("m1", "p1"))
    assert merge_steps([core], "A", ("p1", "m1"), {"m1": 2, "p1": 3}) == (core, [])


def test_the_right_half_is_merged_from_its_cheap_end() -> None:
    # From the bond outwards (as CoMERA's released code does) it would be 30*8*30*8*12 + 30*64*12*12: a third more.
    plan = candidates(TTShape("tt", 768, 768, (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1)), "cols", 1)[0]
    right = [s for s in plan.merge.steps if s.out.name.startswith("B")]
    assert [{s.left.name, s.right.name} for s in right] == [{"B2", "B3"}, {"B1", "B2B3"}]
    assert [s.flops(plan.core_sizes) // 2 for s in right] == [30 * 8 * 12 * 12, 30 * 8 * 30 * 96]

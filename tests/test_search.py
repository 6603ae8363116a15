"""The search against exhaustive enumeration, against an integer program, and its limits."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from functools import cache

import pytest

from comera_compile.errors import PlanningError
from comera_compile.planning.candidates import Candidates, Price, find_candidates
from comera_compile.planning.cost import OBJECTIVES, Objective, cpu_model, step_cost
from comera_compile.planning.layout import step_of
from comera_compile.planning.problem import Problem, linear_problem
from comera_compile.planning.search import Choice, search
from comera_compile.planning.step import Step, Tensor
from comera_compile.tt.shape import TTShape
from tests.exact_references import cheapest, enumerate_plans, integer_program

SIZES, RANKS, ROWS = (1, 2, 3, 8, 512), (1, 2, 3, 8, 32), (1, 7, 4096)
ITEMSIZE = 4
# 500 assignments in all; the first of each kind in every run, the others under -m slow.
SMALL, LARGE, OFTEN = 350, 150, (45, 15)


def _seeds(count: int, often: int, start: int = 0) -> Iterable[object]:
    return [pytest.param(start + k, marks=[pytest.mark.slow] if k >= often else []) for k in range(count)]


def _shape(rng: random.Random, rows: int, cols: int) -> TTShape:
    """So many row and column cores; every third side is padded."""
    modes = [rng.choice(SIZES) for _ in range(rows + cols)]
    ranks = (1, *(rng.choice(RANKS) for _ in range(rows + cols - 1)), 1)
    left, right = tuple(modes[:rows]), tuple(modes[rows:])
    padding = [rng.choice((0, 0, 1)) for _ in "AB"]
    sizes = [max(1, math.prod(side) - less) for side, less in zip((left, right), padding, strict=True)]
    return TTShape("tt", sizes[0], sizes[1], left, right, ranks)


def _price(problem: Problem, objective: Objective) -> Price:
    device, sizes = cpu_model(2), problem.size_of

    @cache
    def price(step: Step) -> float:
        return step_cost(step, sizes, device, ITEMSIZE).by(objective)

    return price


def _instance(seed: int, rows: int, cols: int) -> tuple[Candidates, Price, random.Random]:
    rng = random.Random(seed)
    shape = _shape(rng, rows, cols)
    training = rng.random() < 0.9
    problem = linear_problem(shape, rng.choice(("cols", "rows")), rng.choice(ROWS), training=training)
    return find_candidates(problem), _price(problem, rng.choice(OBJECTIVES)), rng


def _limits(free: Choice, rng: random.Random) -> list[int]:
    """No byte at all, and one between nothing and what the free plan saves."""
    return [0, int(free.saved_bytes * rng.random())]


def _check(problem: Problem, price: Price, choice: Choice) -> None:
    """A choice is a plan: steps in order, forward without the backward, all outputs, price and saved bytes added up."""
    steps = [step_of(problem, pair) for pair in (*choice.forward, *choice.backward)]
    assert choice.price == pytest.approx(sum(price(step) for step in steps))
    leaves = {1 << k for k in range(len(problem.leaves))}
    early, late = {leaf for leaf in leaves if problem.in_forward(leaf)}, {*leaves, *choice.saved}
    for there, pairs in ((early, choice.forward), (late, choice.backward)):
        for pair in pairs:
            assert there.issuperset(pair) and not pair[0] & pair[1]
            there.add(sum(pair))
    assert (early | late).issuperset(problem.outputs)
    assert early.issuperset(choice.saved)
    assert choice.saved_bytes == ITEMSIZE * sum(problem.numel(part) for part in choice.saved)


@pytest.mark.parametrize("seed", _seeds(SMALL, OFTEN[0]))
def test_search_equals_enumeration_of_every_plan(seed: int) -> None:
    candidates, price, rng = _instance(seed, *((1, 1), (2, 2), (1, 2), (2, 2), (2, 1))[seed % 5])
    graph, problem = candidates.graph(price), candidates.problem
    free = search(candidates, price)
    _check(problem, price, free)
    assert free.optimal
    assert free.price == pytest.approx(enumerate_plans(graph, problem, limited=False)[0][0], rel=1e-7)
    front = enumerate_plans(graph, problem, limited=True)
    for limit in (*_limits(free, rng), free.saved_bytes):
        found = search(candidates, price, saved_bytes=limit)
        _check(problem, price, found)
        assert found.optimal and found.saved_bytes <= limit
        assert found.price == pytest.approx(cheapest(front, limit / ITEMSIZE), rel=1e-7)


@pytest.mark.parametrize("seed", _seeds(LARGE, OFTEN[1], start=1000))
def test_search_equals_an_integer_program(seed: int) -> None:
    candidates, price, rng = _instance(seed, 3, 3)
    graph, problem = candidates.graph(price), candidates.problem
    free = search(candidates, price)
    _check(problem, price, free)
    assert free.optimal
    assert free.price == pytest.approx(integer_program(graph, problem, None), rel=1e-6)
    for limit in _limits(free, rng):
        found = search(candidates, price, saved_bytes=limit)
        _check(problem, price, found)
        assert found.optimal and found.saved_bytes <= limit
        assert found.price == pytest.approx(integer_program(graph, problem, limit / ITEMSIZE), rel=1e-6)


def test_an_inference_plan_makes_only_y() -> None:
    problem = linear_problem(_shape(random.Random(3), 3, 3), "cols", 32, training=False)
    found = search(find_candidates(problem), _price(problem, "flops"))
    assert not found.backward and not found.saved
    assert sum(found.forward[-1]) == problem.outputs[0]


def _many_cores(side: int, rows: int) -> tuple[Candidates, Price]:
    rng = random.Random(5)
    modes = [rng.choice((2, 3, 8)) for _ in range(2 * side)]
    ranks = (1, *(rng.choice((2, 8, 32)) for _ in range(2 * side - 1)), 1)
    left, right = tuple(modes[:side]), tuple(modes[side:])
    shape = TTShape("tt", math.prod(left), math.prod(right), left, right, ranks)
    problem = linear_problem(shape, "cols", rows)
    return find_candidates(problem), _price(problem, "time")


@pytest.mark.parametrize("limit", [None, 0, 40_000])
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.5])
def test_a_time_limit_still_gives_a_valid_plan(seconds: float, limit: int | None) -> None:
    candidates, price = _many_cores(6, 64)
    search(candidates, price, seconds=0.0)  # imports, prices
    start = time.thread_time()
    found = search(candidates, price, seconds=seconds, saved_bytes=limit)
    # Bounded generously for a busy machine; without a limit on time this takes minutes at worst.
    assert time.thread_time() - start < seconds + 5
    _check(candidates.problem, price, found)
    assert limit is None or found.saved_bytes <= limit


def test_without_time_no_plan_is_called_the_cheapest() -> None:
    candidates, price = _many_cores(3, 64)
    assert not search(candidates, price, seconds=0.0).optimal
    assert search(candidates, price).optimal


def test_sizes_whose_product_passes_64_bits_are_priced_rightly() -> None:
    shape = TTShape("tt", 1 << 36, 1 << 36, (1 << 12,) * 3, (1 << 12,) * 3, (1, 64, 64, 64, 64, 64, 1))
    problem = linear_problem(shape, "cols", 4096)
    assert problem.numel(sum(1 << k for k in range(1, 7))) == 1 << 72  # the matrix
    candidates, price = find_candidates(problem), _price(problem, "flops")
    found = search(candidates, price)
    assert found.optimal
    _check(problem, price, found)
    # From wide to narrow y costs as much as reading x with the first core; a step with the matrix 2^84 x 2.
    assert 0 < found.price < 2.0**70
    assert search(candidates, price, saved_bytes=0).price >= found.price


def test_a_smaller_limit_never_saves_more_nor_costs_less() -> None:
    candidates, price, _ = _instance(11, 2, 2)
    free = search(candidates, price)
    assert free.saved_bytes > 0
    found = [search(candidates, price, saved_bytes=free.saved_bytes * k // 8) for k in range(9)]
    assert [f.price for f in found] == sorted((f.price for f in found), reverse=True)
    assert found[-1].price == pytest.approx(free.price) and found[0].saved_bytes == 0


def test_no_rows_cost_nothing_where_flops_count() -> None:
    problem = linear_problem(_shape(random.Random(4), 2, 2), "rows", 0, training=False)
    found = search(find_candidates(problem), _price(problem, "flops"))
    assert found.optimal and found.price == 0
    _check(problem, _price(problem, "flops"), found)


def test_a_negative_limit_is_refused() -> None:
    candidates, price, _ = _instance(1, 2, 2)
    with pytest.raises(PlanningError, match="saved_bytes must be at least 0, got -1"):
        search(candidates, price, saved_bytes=-1)


def test_negative_rows_are_refused() -> None:
    with pytest.raises(PlanningError, match="rows must not be negative, got -3"):
        linear_problem(_shape(random.Random(0), 2, 2), "cols", -3)


A, B = Tensor("A", ("m", "r")), Tensor("B", ("r", "n"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((("m", 2), ("r", 3), ("r", 4), ("n", 5)), "axis 'r' has two sizes, 3 and 4"),
        ((("m", 2), ("n", 5)), r"axis 'r' of A\[m,r\] has no size: give it one beside m, n"),
        ((("m", 2), ("r", -3), ("n", 5)), "axis 'r' must not have a negative size, got -3"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(sizes: tuple[tuple[str, int], ...], message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        Problem((A, B), sizes, None, (3,))

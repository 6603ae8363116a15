"""Forward, backward and saved tensors of a straight line of steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from comera_compile.codegen.contract import contract
from comera_compile.planning.program import Program
from comera_compile.planning.step import Step, Tensor

Near = Callable[..., None]
SIZES = {"t": 5, "n": 4, "r": 3, "m": 6, "l": 2, "k": 2}
X, A, B = Tensor("x", ("t", "n")), Tensor("A", ("r", "m")), Tensor("B", ("r", "n"))
H, Y = Tensor("h", ("t", "r")), Tensor("y", ("t", "m"))
TWO_PRODUCTS = Program((X, A, B), (Step(H, X, B), Step(Y, H, A)), (Y,))


def run(steps: tuple[Step, ...], values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for step in steps:
        values[step.out.name] = contract(step, values[step.left.name], values[step.right.name], SIZES)
    return values


def random_inputs(program: Program) -> dict[str, torch.Tensor]:
    return {t.name: torch.randn([SIZES[a] for a in t.axes], dtype=torch.float64) for t in program.inputs}


@pytest.mark.parametrize(
    ("wanted", "made", "saved"),
    [
        # dh = dy A, dA = h dy, dx = dh B, dB = dh x: each gradient reads the other factor of its step.
        (("x", "A", "B"), ["dh", "dA", "dx", "dB"], ("x", "A", "B", "h")),
        (("x",), ["dh", "dx"], ("A", "B")),
        (("A",), ["dA"], ("h",)),
        (("B",), ["dh", "dB"], ("x", "A")),
        (("A", "B"), ["dh", "dA", "dB"], ("x", "A", "h")),
        ((), [], ()),
    ],
)
def test_only_what_is_wanted_is_computed_and_saved(
    wanted: tuple[str, ...], made: list[str], saved: tuple[str, ...]
) -> None:
    assert [s.out.name for s in TWO_PRODUCTS.backward(wanted)] == made
    assert TWO_PRODUCTS.saved(wanted) == saved


@pytest.mark.parametrize("wanted", [("x", "A", "B"), ("x",), ("A",), ("B",), ("x", "B")])
def test_backward_from_the_saved_tensors_alone_is_right(wanted: tuple[str, ...], assert_near: Near) -> None:
    values = random_inputs(TWO_PRODUCTS)
    grad = torch.randn(5, 6, dtype=torch.float64)
    leaves = {n: v.clone().requires_grad_() for n, v in values.items()}
    expected = torch.autograd.grad(leaves["x"] @ leaves["B"].T @ leaves["A"], [leaves[n] for n in wanted], grad)
    forward = run(TWO_PRODUCTS.steps, values)
    kept = {n: forward[n] for n in TWO_PRODUCTS.saved(wanted)} | {"dy": grad}
    result = run(TWO_PRODUCTS.backward(wanted), kept)
    for name, right in zip(wanted, expected, strict=True):
        assert_near(result[f"d{name}"], right)


def test_a_leading_layer_axis_runs_every_layer(assert_near: Near) -> None:
    stacked = TWO_PRODUCTS.with_layer_axis()
    assert all(t.axes[0] == "l" for t in (*stacked.inputs, *stacked.outputs))
    assert stacked.input_names == TWO_PRODUCTS.input_names
    values = random_inputs(stacked)
    together = run(stacked.steps, dict(values))["y"]
    for layer in range(SIZES["l"]):
        alone = run(TWO_PRODUCTS.steps, {n: v[layer] for n, v in values.items()})["y"]
        assert_near(together[layer], alone)


def test_the_graph_says_what_is_made_from_what() -> None:
    assert set(TWO_PRODUCTS.graph.edges) == {("x", "h"), ("B", "h"), ("h", "y"), ("A", "y")}
    assert TWO_PRODUCTS.graph.edges["x", "h"]["step"] == TWO_PRODUCTS.steps[0]


def test_outputs_of_separate_branches_do_not_mix() -> None:
    # Merging two halves is one program with two outputs: asking for one side's gradient leaves the other alone.
    c, d = Tensor("C", ("k", "r")), Tensor("D", ("r", "n"))
    p, q = Tensor("p", ("k", "n")), Tensor("q", ("t", "m"))
    program = Program((c, d, H, A), (Step(p, c, d), Step(q, H, A)), (p, q))
    assert [s.out.name for s in program.backward(["C"])] == ["dC"]
    assert program.saved(["h"]) == ("A",)

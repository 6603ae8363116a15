"""Rows through merged halves in C++: values, gradients, threads, what is written, and where they do not run."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comera_compile.codegen import apply_merged
from comera_compile.codegen.cpu import skinny_kernels as kernels
from comera_compile.codegen.run_plan import ApplyOperands, apply_operands
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.tt.factorize import choose_shape

# Largest error relative to the largest sum of absolute values: a sum that cancels has no digits of its own.
BARS = {torch.float64: 1e-15, torch.float32: 4e-7}
ROOT = Path(__file__).resolve().parents[1]
ROWS = (0, 1, 7, 100, 129)
SIZES = ((1, 1), (17, 5), (97, 200), (96, 31), (768, 96))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(rows: int, inputs: int, outputs: int, bond: int, dtype: torch.dtype) -> list[Tensor]:
    """x, bias, first and second half, gradient of y."""
    shapes = (rows, inputs), (outputs,), (bond, inputs), (bond, outputs), (rows, outputs)
    return [torch.randn(*s, dtype=dtype) for s in shapes]


def run(x: Tensor, bias: Tensor | None, first: Tensor, second: Tensor, grad: Tensor) -> list[Tensor]:
    """h, y, then the gradients of x, bias and both halves."""
    h = kernels.narrow(x, first)
    y = kernels.wide(h, second, bias)
    made = kernels.backward(x, h, grad, first, second, needs_bias=bias is not None)
    return [t for t in (h, y, *made) if t is not None]


def truth(x: Tensor, bias: Tensor | None, first: Tensor, second: Tensor, grad: Tensor) -> list[Tensor]:
    """The same by autograd in float64."""
    leaves = [t.double().requires_grad_() for t in (x, first, second, *([] if bias is None else [bias]))]
    h = leaves[0] @ leaves[1].t()
    y = h @ leaves[2] + (leaves[3] if bias is not None else 0)
    return [h, y, *torch.autograd.grad(y, leaves, grad.double())]


def assert_right(ours: list[Tensor], drawn: list[Any]) -> None:
    sums = truth(*(None if t is None else t.abs() for t in drawn))
    for a, b, most in zip(ours, truth(*drawn), sums, strict=True):
        assert a.shape == b.shape and a.dtype == drawn[0].dtype
        if a.numel():
            assert (a.double() - b).abs().max() <= BARS[a.dtype] * most.max(), a.shape


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("bond", [1, 3, 8, 12, 16, 24, 30, 32, 48, 128])
def test_values_and_gradients(bond: int, dtype: torch.dtype) -> None:
    for rows, (inputs, outputs), bias in itertools.product(ROWS, SIZES, (True, False)):
        drawn: list[Any] = draw(rows, inputs, outputs, bond, dtype)
        drawn[1] = drawn[1] if bias else None
        assert_right(run(*drawn), drawn)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_any_number_of_threads(count: int) -> None:
    torch.set_num_threads(count)
    for rows, (inputs, outputs) in itertools.product(ROWS, SIZES):
        drawn = draw(rows, inputs, outputs, 12, torch.float64)
        results = [run(*drawn) for _ in range(2)]
        assert_right(results[0], drawn)
        # sums are put together in one order, whichever thread comes first
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_outside_of_the_results_is_written(count: int) -> None:
    library = kernels._library(torch.float32)
    assert library is not None
    for rows, (inputs, outputs), bond in itertools.product((1, 50), SIZES, (3, 8)):
        x, bias, first, second, grad = draw(rows, inputs, outputs, bond, torch.float32)
        h = x @ first.t()
        bands = [torch.full((t.numel() + 64,), 7.0) for t in (h, grad, x, first, second, bias)]
        h_, y, dx, d_first, d_second, d_bias = (b[32:].data_ptr() for b in bands)
        read = {n: t.data_ptr() for n, t in zip("xbfsgh", (x, bias, first, second, grad, h), strict=True)}
        library.narrow(rows, inputs, bond, read["x"], read["f"], h_, count)
        library.wide(rows, outputs, bond, read["h"], read["s"], read["b"], y, count)
        halves = read["f"], read["s"]
        made = dx, d_first, d_second, d_bias
        library.backward(rows, inputs, outputs, bond, read["x"], read["h"], read["g"], *halves, *made, count)
        library.wide_backward(rows, outputs, bond, read["h"], read["g"], read["s"], h_, d_second, d_bias, count)
        library.narrow_backward(rows, inputs, bond, read["x"], read["h"], read["f"], dx, d_first, count)
        assert all((b[:32] == 7).all() and (b[-32:] == 7).all() for b in bands)


def test_gradients_that_nobody_wants_are_not_made() -> None:
    x, _, first, second, grad = draw(9, 20, 30, 4, torch.float64)
    h = kernels.narrow(x, first)
    all_made = kernels.backward(x, h, grad, first, second, needs_bias=True)
    for needs_x, needs_bias in itertools.product((False, True), repeat=2):
        made = kernels.backward(x, h, grad, first if needs_x else None, second, needs_bias=needs_bias)
        wanted = (needs_x, True, True, needs_bias)
        assert [t is not None for t in made] == list(wanted)
        assert all(torch.equal(a, b) for a, b in zip(made, all_made, strict=True) if a is not None)  # type: ignore[arg-type]


def test_strided_expanded_and_misaligned_inputs() -> None:
    plain = draw(10, 40, 24, 8, torch.float64)
    odd = [torch.cat([torch.zeros(1, dtype=torch.float64), t.flatten()])[1:].view(t.shape) for t in plain]
    strided = [torch.stack([t, t], dim=-1)[..., 0] for t in plain]
    transposed = [t.t().contiguous().t() for t in plain]
    for given in (odd, strided, transposed):
        assert all(torch.equal(a, b) for a, b in zip(run(*given), run(*plain), strict=True))
    ones = torch.ones((), dtype=torch.float64).expand(10, 24)
    assert_right(run(*plain[:4], ones), [*plain[:4], ones])


def test_numbers_that_are_none_go_where_they_would_in_torch() -> None:
    x, bias, first, second, grad = draw(20, 17, 33, 5, torch.float32)
    x[3, 2], grad[4, 6] = float("nan"), float("inf")
    for ours, right in zip(run(x, bias, first, second, grad), truth(x, bias, first, second, grad), strict=True):
        assert torch.equal(ours.isfinite(), right.isfinite())


def test_operators_describe_themselves_rightly() -> None:
    x, bias, first, second, grad = draw(5, 12, 20, 4, torch.float32)
    h = kernels.narrow(x, first)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.comera.narrow.default, (x, first)),
        (torch.ops.comera.wide.default, (h, second, bias)),
        (torch.ops.comera.wide.default, (h, second, None)),
        (torch.ops.comera.skinny_backward.default, (x, h, grad, first, second, True)),
        (torch.ops.comera.skinny_backward.default, (x, h, grad, None, second, False)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def merged_plan() -> LinearPlan:
    shape = choose_shape(40, 24, format="tt", rank=4)
    return next(p for p in candidates(shape, "cols", 16) if p.merged)


def used(plan: LinearPlan, *arguments: Any) -> bool:
    y = apply_operands(plan.encode(), *arguments)
    return y.grad_fn is not None and "ApplyMerged" in type(y.grad_fn).__name__


def test_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = merged_plan()
    operands = [torch.randn([plan.operand_sizes[a] for a in o.axes], requires_grad=True) for o in plan.operands]
    x, bias = torch.randn(2, 3, 24), torch.randn(40, requires_grad=True)
    assert used(plan, x, bias, *operands)
    assert not used(plan, x, bias, operands[0].detach(), operands[1])  # half of the gradients would be for nothing
    assert not used(plan, x.bfloat16(), bias.bfloat16(), *(o.bfloat16() for o in operands))
    monkeypatch.setattr(kernels, "_library", lambda dtype: None)
    assert not used(plan, x, bias, *operands)


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_same_as_the_steps_of_the_plan(needs_x: bool, with_bias: bool) -> None:
    plan = merged_plan()
    operands = [torch.randn([plan.operand_sizes[a] for a in o.axes], dtype=torch.float64) for o in plan.operands]
    drawn = [torch.randn(2, 3, 24, dtype=torch.float64), torch.randn(40, dtype=torch.float64), *operands]
    results = []
    for function in (apply_operands, ApplyOperands.apply):
        x, bias, *halves = (t.clone().requires_grad_() for t in drawn)
        x.requires_grad_(needs_x)
        y = function(plan.encode(), x, bias if with_bias else None, *halves)
        y.square().sum().backward()
        results.append([y, *(t.grad for t in (x, bias, *halves))])
    for ours, right in zip(*results, strict=True):
        assert (ours is None) == (right is None)
        if right is not None:
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_with_fewer_threads_than_asked_for() -> None:
    # OpenMP may give fewer: what the others were to do must be done all the same.
    script = "import torch; from tests import test_skinny_kernels as t; torch.set_num_threads(4); "
    script += "drawn = t.draw(100, 97, 200, 12, torch.float64); t.assert_right(t.run(*drawn), drawn)"
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_gradcheck() -> None:
    x, bias, first, second, _ = (t.requires_grad_() for t in draw(3, 5, 6, 2, torch.float64))
    torch.autograd.gradcheck(apply_merged.ApplyMerged.apply, (x, bias, first, second))


def test_functions_are_declared_with_the_types_they_have() -> None:
    # A number given where a pointer is meant would be read as an address.
    library = kernels._library(torch.float64)
    assert library is not None
    kinds = ("narrow", 3, 3), ("wide", 3, 4), ("narrow_backward", 3, 5), ("wide_backward", 3, 6), ("backward", 4, 9)
    for name, sizes, tensors in kinds:
        declared = getattr(library, name).argtypes
        assert declared == [*[ctypes.c_int64] * sizes, *[ctypes.c_void_p] * tensors, ctypes.c_int64]

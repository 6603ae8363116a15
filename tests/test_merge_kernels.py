"""Merging in C++ against torch's own operators: operands, gradients, and what runs where it cannot be built."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from comera_compile import cpp_library
from comera_compile.codegen import run_plan
from comera_compile.codegen.cpu import merge_kernels
from comera_compile.codegen.run_plan import MergeCores, merge_cores
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.tt.factorize import choose_shape
from tests.test_run_plan import SHAPES, SIDES

# Largest error relative to the largest entry.
BARS = {torch.float64: 1e-14, torch.float32: 2e-6}
RANKS = (1, 2, 5, 8, 12, 16, 30, 32)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(plan: LinearPlan, layers: int, dtype: torch.dtype) -> tuple[list[Tensor], list[float], list[Tensor]]:
    """Packed vectors, their scales, and gradients of the stacked operands."""
    packed = [torch.randn(plan.shape.numel, dtype=dtype) for _ in range(layers)]
    sizes = [[plan.operand_sizes[a] for a in o.axes] for o in plan.operands]
    return packed, [0.5 + k for k in range(layers)], [torch.randn(layers, *s, dtype=dtype) for s in sizes]


def truth(plan: LinearPlan, packed: list[Tensor], scales: list[float], grads: list[Tensor]) -> list[Tensor]:
    """Operands, then gradients of the packed vectors, in float64 and by torch's own operators."""
    leaves = [p.double().requires_grad_() for p in packed]
    operands = MergeCores.apply(plan.encode(), tuple(scales), *leaves)  # type: ignore[no-untyped-call]
    made = torch.autograd.grad(operands, leaves, [g.double() for g in grads])
    return [*(o.detach() for o in operands), torch.stack(made)]


def run(plan: LinearPlan, packed: list[Tensor], scales: list[float], grads: list[Tensor]) -> list[Tensor]:
    operands = merge_kernels.merge(packed, scales, plan.encode())
    return [*operands, merge_kernels.merge_backward(packed, grads, scales, plan.encode())]


def check(plan: LinearPlan, layers: int, dtype: torch.dtype) -> None:
    drawn = draw(plan, layers, dtype)
    for ours, right in zip(run(plan, *drawn), truth(plan, *drawn), strict=True):
        assert ours.shape == right.shape and ours.dtype == dtype
        error = (ours.double() - right).abs().max() / right.abs().max().clamp_min(1e-30)
        assert error <= BARS[dtype], f"{plan.name}: {error:.1e}"


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_plan_of_every_shape(name: str, dtype: torch.dtype) -> None:
    for side, multiple in zip(SIDES, (1, 16), strict=True):
        for plan in candidates(SHAPES[name], side, multiple):
            check(plan, 2, dtype)


@pytest.mark.parametrize("rank", RANKS)
def test_ranks_that_leave_a_rest_of_a_vector(rank: int) -> None:
    for size in (96, 100):
        for plan in candidates(choose_shape(size, 90, format="tt", rank=rank), "cols", 16):
            check(plan, 1, torch.float32)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("layers", [1, 3, 9])
def test_any_number_of_threads_gives_the_same_bits(layers: int) -> None:
    # A product of 2 ** 19 multiplications is shared by the threads; each element is one thread's sum in one order.
    shape = choose_shape(768, 768, format="tt", rank=32)
    plan = next(p for p in candidates(shape, "cols", 16) if p.merged)
    assert max(s.flops(plan.core_sizes) for s in plan.merge.steps) > 2 * (1 << 19)
    drawn, results = draw(plan, layers, torch.float32), []
    for threads in (1, 2, 3, 8, 2):
        torch.set_num_threads(threads)
        results.append(run(plan, *drawn))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_nothing_outside_of_the_results_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    # Results lie inside larger blocks with a known value around them.
    bands: list[Tensor] = []

    def banded(like: Tensor, size: object) -> Tensor:
        shape = (size,) if isinstance(size, int) else tuple(size)  # type: ignore[arg-type]
        numel = int(torch.Size(shape).numel())
        whole = torch.full((numel + 64,), 7.0, dtype=like.dtype)
        bands.append(whole)
        return whole[32 : 32 + numel].view(shape)

    for name in ("order 3, rows padded", "order 3", "ragged"):
        for plan in candidates(SHAPES[name], "cols", 16):
            drawn = draw(plan, 3, torch.float32)
            monkeypatch.setattr(merge_kernels, "new_room", banded)
            run(plan, *drawn)
            monkeypatch.undo()
    assert bands and all((w[:32] == 7).all() and (w[-32:] == 7).all() for w in bands)


def test_strided_and_expanded_inputs() -> None:
    plan = candidates(SHAPES["order 3"], "cols", 16)[0]
    packed, scales, grads = draw(plan, 2, torch.float64)
    wide = [torch.stack([p, p], dim=1)[:, 0] for p in packed]
    flat = [torch.ones((), dtype=torch.float64).expand_as(g) for g in grads]
    expected = run(plan, packed, scales, [g.contiguous() for g in flat])
    assert all(torch.equal(a, b) for a, b in zip(run(plan, wide, scales, flat), expected, strict=True))


def test_operators_describe_themselves_rightly() -> None:
    for name in ("order 3, rows padded", "order 3"):
        for plan in candidates(SHAPES[name], "cols", 16)[:3]:
            packed, scales, grads = draw(plan, 2, torch.float32)
            checks = ("test_schema", "test_faketensor")
            torch.library.opcheck(torch.ops.comera.merge.default, (packed, scales, plan.encode()), test_utils=checks)
            arguments = (packed, grads, scales, plan.encode())
            torch.library.opcheck(torch.ops.comera.merge_backward.default, arguments, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    plan = candidates(SHAPES["order 3"], "cols", 16)[0]
    packed, scales, _ = draw(plan, 2, dtype)
    assert not merge_kernels.available(packed)
    assert [o.dtype for o in merge_cores(plan.encode(), scales, *packed)] == [dtype] * len(plan.operands)


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(source: str) -> None:
        raise RuntimeError("no g++ here")

    monkeypatch.setattr(cpp_library, "_load", fail)
    cpp_library._started.clear()
    cpp_library.load_library.cache_clear()
    merge_kernels._library.cache_clear()
    plan = candidates(SHAPES["order 3"], "cols", 16)[0]
    packed, scales, _ = draw(plan, 2, torch.float64)
    try:
        with caplog.at_level(logging.WARNING, "comera_compile"):
            made = [merge_cores(plan.encode(), scales, *packed) for _ in range(2)]
        assert [r.message.count("no g++ here") for r in caplog.records] == [1]  # once
    finally:
        cpp_library.load_library.cache_clear()
        merge_kernels._library.cache_clear()
    expected = run_plan.MergeCores.apply(plan.encode(), tuple(scales), *packed)  # type: ignore[no-untyped-call]
    assert all(torch.equal(a, b) for a, b in zip(made[1], expected, strict=True))


def test_not_a_number_and_infinity_pass_through() -> None:
    plan = next(p for p in candidates(SHAPES["order 3"], "cols", 16) if p.merged)
    packed, scales, _ = draw(plan, 2, torch.float32)
    packed[0][0], packed[1][-1] = torch.nan, torch.inf
    ours = merge_kernels.merge(packed, scales, plan.encode())
    right = MergeCores.apply(plan.encode(), tuple(scales), *packed)  # type: ignore[no-untyped-call]
    for a, b in zip(ours, right, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())

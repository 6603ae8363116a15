"""One call of C++ each way for a whole linear: as its parts give it, nothing outside of the results written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comera_compile.codegen.cpu import merge_kernels, skinny_kernels
from comera_compile.codegen.cpu.linear_kernels import LinearKernel
from comera_compile.codegen.cpu.merge_program import backward_program, forward_program
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.tt.factorize import choose_shape
from tests.test_run_plan import SHAPES, SIDES

HEAD = 5  # kHead of merge.cpp


def merged(name: str, side: str) -> LinearPlan:
    return next(p for p in candidates(SHAPES[name], side, 8) if p.merged)  # type: ignore[arg-type]


Given = tuple[Tensor, Tensor | None, Tensor, Tensor]


def in_parts(plan: LinearPlan, scale: float, given: Given) -> list[Tensor]:
    """y, then the gradients of x, the bias and the packed vector, by the operators for many layers."""
    x, bias, packed, grad = given
    turn = -1 if plan.contracts == "cols" else 1
    first, second = (o[0] for o in merge_kernels.merge([packed], [scale], plan.encode())[::turn])
    h = skinny_kernels.narrow(x, first)
    y = skinny_kernels.wide(h, second, bias)
    dx, *halves, dbias = skinny_kernels.backward(x, h, grad, first, second, needs_bias=bias is not None)
    stacked = [half[None] for half in halves[::turn] if half is not None]
    dpacked = merge_kernels.merge_backward([packed], stacked, [scale], plan.encode())[0]
    return [t for t in (y, dx, dbias, dpacked) if t is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bits_as_its_parts(name: str, side: str, dtype: torch.dtype) -> None:
    plan = merged(name, side)
    kernel = LinearKernel(plan.encode(), 0.5)
    packed = torch.randn(plan.shape.numel, dtype=dtype)
    for rows, bias in ((1, None), (13, torch.randn(kernel.outputs, dtype=dtype)), (0, None)):
        x, grad = torch.randn(rows, kernel.inputs, dtype=dtype), torch.randn(rows, kernel.outputs, dtype=dtype)
        y, kept = kernel.forward(x, bias, packed)
        given = grad, x, packed, kept
        made = kernel.backward(*given, needs_x=True, needs_bias=bias is not None)
        parts = in_parts(plan, 0.5, (x, bias, packed, grad))
        for one, other in zip([y, *(m for m in made if m is not None)], parts, strict=True):
            assert torch.equal(one, other)
        alone = kernel.backward(*given, needs_x=False, needs_bias=False)
        assert alone[:2] == (None, None) and torch.equal(alone[2], parts[-1])


def test_nothing_outside_of_the_results_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    bands: list[Tensor] = []

    def banded(like: Tensor, *size: object) -> Tensor:
        shape = torch.Size(size[0] if isinstance(size[0], tuple) else size) if size else like.shape  # type: ignore[arg-type]
        whole = torch.full((shape.numel() + 64,), 7.0, dtype=like.dtype)
        bands.append(whole)
        return whole[32 : 32 + shape.numel()].view(shape)

    plan = merged("order 3, rows padded", "cols")
    kernel, packed = LinearKernel(plan.encode(), 1.0), torch.randn(plan.shape.numel)
    x, grad, bias = torch.randn(50, kernel.inputs), torch.randn(50, kernel.outputs), torch.randn(kernel.outputs)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", banded)
        patch.setattr(torch, "empty_like", banded)
        _, kept = kernel.forward(x, bias, packed)
        kernel.backward(grad, x, packed, kept, needs_x=True, needs_bias=True)
    assert len(bands) == 5 and all((w[:32] == 7).all() and (w[-32:] == 7).all() for w in bands)


def test_a_plan_that_merges_less_is_refused() -> None:
    plan = next(p for p in candidates(SHAPES["order 3"], "cols", 8) if not p.merged)
    with pytest.raises(ValueError, match="both halves"):
        LinearKernel(plan.encode(), 1.0)


def test_halves_and_cores_are_parts_of_their_own() -> None:
    # Two halves merged whole; six cores handed over as they are; all in one where the whole matrix is made.
    plans = candidates(choose_shape(96, 100, format="tt", rank=4), "cols", 8)
    counts = {plan.name: (forward_program(plan.encode()), backward_program(plan.encode())) for plan in plans}
    for name, parts in (("merge both halves", 2), ("core by core", 6), ("rebuild W", 1)):
        for program in counts[name]:
            assert program.words[0] == parts
            assert sum(program.words[HEAD + 1 : HEAD + 2 * parts : 2]) >= 6  # a core is scaled by one of them, at least

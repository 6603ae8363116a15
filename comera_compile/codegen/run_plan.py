"""Run a linear plan: an autograd.Function that merges cores and one that applies them to the rows.

Both execute the plan's own forward and backward steps. AOTAutograd traces through them, so the compiled graphs hold
nothing but the planned mm, bmm, view and permute, and each can be planned, inspected and fused by what comes after.
The merge part runs once for all layers of equal shape and plan (a leading ``l`` axis), since its products are tiny.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from comera_compile.codegen.apply_merged import ApplyMerged, has_kernels
from comera_compile.codegen.contract import contract, of_its_own, viewed
from comera_compile.codegen.cpu import merge_kernels
from comera_compile.codegen.layer_stack import join_cores, stack_packed
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.planning.program import Program
from comera_compile.planning.step import Step, Tensor

Values = dict[str, torch.Tensor]


def merge_cores(plan_text: str, scales: Sequence[float], *packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operands of one or more layers of equal plan.

    Args:
        plan_text: ``LinearPlan.encode()``.
        scales: the stored scale of each layer.
        packed: packed vector of each layer.

    Returns:
        The plan's operands, each stacked over the layers: shape ``[layers, *operand]``.
    """
    # Merging is part of what the weight is, not of what is computed with it: autocast begins where rows come in.
    with torch.autocast(packed[0].device.type, enabled=False):
        # A rebuilt W is a large product: that is what the library behind torch.mm is good at.
        own = not LinearPlan.decode(plan_text).dense and merge_kernels.available(packed)
        run = MergeByKernel if own else MergeCores
        result: tuple[torch.Tensor, ...] = run.apply(plan_text, tuple(scales), *packed)  # type: ignore[no-untyped-call]
        return result


def apply_operands(plan_text: str, x: torch.Tensor, bias: torch.Tensor | None, *operands: torch.Tensor) -> torch.Tensor:
    """``y`` of a plan for ``x`` of shape ``[..., width]`` and the operands of one layer.

    ``bias`` has the width of ``y`` or is None.
    """
    dtype = _compute_dtype(x, operands if bias is None else (*operands, bias))
    bias = None if bias is None else bias.to(dtype)
    x, operands, plan = x.to(dtype), tuple(o.to(dtype) for o in operands), LinearPlan.decode(plan_text)
    with torch.autocast(x.device.type, enabled=False):
        if has_kernels(plan, x, bias, operands):
            halves = operands[::-1] if plan.contracts == "cols" else operands
            y: torch.Tensor = ApplyMerged.apply(x, bias, *halves)  # type: ignore[no-untyped-call]
        else:
            y = ApplyOperands.apply(plan_text, x, bias, *operands)  # type: ignore[no-untyped-call]
    return y


class MergeCores(torch.autograd.Function):
    """Cores to operands, stacked over layers."""

    @staticmethod
    def forward(ctx: Any, plan_text: str, scales: tuple[float, ...], *packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Stack, scale, merge, then flatten, crop and pad whole halves into matrices."""
        plan = LinearPlan.decode(plan_text)
        program = plan.merge.with_layer_axis()
        sizes = {**plan.core_sizes, "l": len(packed)}
        stacked = stack_packed(packed, scales)
        parts = torch.split(stacked, list(plan.shape.core_sizes), dim=1)
        values = dict(zip(program.input_names, parts, strict=True))
        _run(program.steps, values, sizes)
        ctx.plan_text, ctx.scales = plan_text, scales
        ctx.save_for_backward(*(values[n] for n in program.saved(program.input_names)))
        pairs = zip(program.outputs, plan.operands, strict=True)
        return tuple(_finish(values[out.name], out, operand, plan) for out, operand in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of the packed vectors: the adjoint steps, then the inverse of the packing.

        Those of layers merged together are rows of one matrix.
        """
        plan = LinearPlan.decode(ctx.plan_text)
        program = plan.merge.with_layer_axis()
        layers = len(ctx.scales)
        values = dict(zip(program.saved(program.input_names), ctx.saved_tensors, strict=True))
        for grad, out, operand in zip(grads, program.outputs, plan.operands, strict=True):
            values[f"d{out.name}"] = _unfinish(grad, out, operand, plan)
        _run(program.backward(program.input_names), values, {**plan.core_sizes, "l": layers})
        cores = [viewed(values[f"d{n}"], [layers, plan.shape.core_sizes[k]]) for k, n in enumerate(program.input_names)]
        return None, None, *join_cores(cores, ctx.scales).unbind(0)


class MergeByKernel(torch.autograd.Function):
    """The same as :class:`MergeCores` in one operator each way. Inner results are made again, so nothing is saved."""

    @staticmethod
    def forward(ctx: Any, plan_text: str, scales: tuple[float, ...], *packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Operands, stacked over the layers."""
        ctx.plan_text, ctx.scales = plan_text, scales
        ctx.save_for_backward(*packed)
        return tuple(merge_kernels.merge(packed, scales, plan_text))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of the packed vectors: rows of one matrix."""
        made = merge_kernels.merge_backward(ctx.saved_tensors, grads, ctx.scales, ctx.plan_text)
        return None, None, *made.unbind(0)


class ApplyOperands(torch.autograd.Function):
    """Rows and operands to y."""

    @staticmethod
    def forward(
        ctx: Any, plan_text: str, x: torch.Tensor, bias: torch.Tensor | None, *operands: torch.Tensor
    ) -> torch.Tensor:
        """``x``: ``[..., width]``; returns ``[..., other width]``."""
        plan = LinearPlan.decode(plan_text)
        program = plan.apply
        rows = math.prod(x.shape[:-1])
        values = dict(zip(program.input_names, (x, *operands), strict=True))
        _run(program.steps, values, {**plan.operand_sizes, "t": rows})
        ctx.plan_text, ctx.rows, ctx.x_shape = plan_text, rows, x.shape
        needs_x, ctx.needs_bias, *needs_operands = ctx.needs_input_grad[1:]
        ctx.wanted = _wanted(program, [needs_x, *needs_operands])
        ctx.operand_shapes = [o.shape for o in operands]
        ctx.save_for_backward(*(values[n] for n in program.saved(ctx.wanted)))
        y, shape = values[program.outputs[0].name], [*x.shape[:-1], _width(plan)]
        # Added in the shape of the activation, the bias fuses with whatever follows; next to the mm it would become an
        # addmm, which first writes the broadcast bias to memory.
        return of_its_own(y, shape) if bias is None else viewed(y, shape) + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of x, bias and the operands, where wanted."""
        plan = LinearPlan.decode(ctx.plan_text)
        program = plan.apply
        values = dict(zip(program.saved(ctx.wanted), ctx.saved_tensors, strict=True))
        values[f"d{program.outputs[0].name}"] = grads[0]
        _run(program.backward(ctx.wanted), values, {**plan.operand_sizes, "t": ctx.rows})
        shapes = dict(zip(program.input_names, (ctx.x_shape, *ctx.operand_shapes), strict=True))
        dx, *rest = (viewed(values[f"d{n}"], s) if n in ctx.wanted else None for n, s in shapes.items())
        return None, dx, _column_sums(viewed(grads[0], [ctx.rows, _width(plan)])) if ctx.needs_bias else None, *rest


def _column_sums(grad: torch.Tensor) -> torch.Tensor:
    """Gradient of the bias, as a product with ones: Inductor's strided column sum takes 3-9 times as long on a CPU."""
    return torch.mm(grad.new_ones(1, grad.shape[0]), grad).reshape(-1)


def _run(steps: Sequence[Step], values: Values, sizes: dict[str, Any]) -> None:
    """Execute steps in order; every tensor of a plan is read by name, made once."""
    for step in steps:
        values[step.out.name] = contract(step, values[step.left.name], values[step.right.name], sizes)


def _width(plan: LinearPlan) -> int:
    return plan.shape.rows if plan.contracts == "cols" else plan.shape.cols


def _wanted(program: Program, needs: Sequence[bool]) -> tuple[str, ...]:
    return tuple(n for n, need in zip(program.input_names, needs, strict=True) if need)


def _finish(value: torch.Tensor, merged: Tensor, operand: Tensor, plan: LinearPlan) -> torch.Tensor:
    """A whole half as a (bond, size) matrix, or W as (rows, cols): modes flattened, cropped, bond padded with zeros."""
    if len(operand.axes) != 2 or operand.axes == merged.axes[1:]:
        return viewed(value, [value.shape[0], *(plan.core_sizes[a] for a in operand.axes)])
    flat, padding = _flat_sizes(merged, operand, plan), _padding(merged, operand, plan)
    order = _bond_first(merged)
    if order != sorted(order):
        value = value.reshape([value.shape[0], *(plan.core_sizes[a] for a in merged.axes[1:])]).permute(order)
    value = viewed(value, [value.shape[0], *flat])
    if any(padding):
        value = F.pad(value, padding)
    # A strided view wants its base in memory. Otherwise Inductor moves the copy behind the slicing into layers: as many
    # small kernels as there are layers, each with its own pass of the compiler.
    value = value.contiguous()
    return value.as_strided(value.shape, value.stride())


def _unfinish(grad: torch.Tensor, merged: Tensor, operand: Tensor, plan: LinearPlan) -> torch.Tensor:
    """Adjoint of ``_finish``."""
    if len(operand.axes) != 2 or operand.axes == merged.axes[1:]:
        return grad
    padding, order = _padding(merged, operand, plan), _bond_first(merged)
    if any(padding):
        grad = F.pad(grad, [-p for p in padding])
    if order == sorted(order):
        return grad
    grad = grad.reshape([grad.shape[0], *(plan.core_sizes[merged.axes[k]] for k in order[1:])])
    return grad.permute([order.index(k) for k in range(len(order))])


def _bond_first(merged: Tensor) -> list[int]:
    """Order of the axes of a merged half with the bond ahead of its modes; W has no bond and stays."""
    rest = [k for k, a in enumerate(merged.axes) if k and a != "r"]
    return [0, *(k for k, a in enumerate(merged.axes) if a == "r"), *rest]


def _flat_sizes(merged: Tensor, operand: Tensor, plan: LinearPlan) -> list[int]:
    """Sizes of the matrix before cropping and padding."""
    first = {"r": ("r",), "m": ("m",)}[operand.axes[0][0]]
    sizes = plan.core_sizes
    return [
        math.prod(sizes[a] for a in merged.axes[1:] if a[0] in first),
        math.prod(sizes[a] for a in merged.axes[1:] if a[0] not in first),
    ]


def _padding(merged: Tensor, operand: Tensor, plan: LinearPlan) -> list[int]:
    """Arguments of ``F.pad``, last axis first: negative where modes stand for more than the dense weight has."""
    have = _flat_sizes(merged, operand, plan)
    want = [plan.operand_sizes[a] for a in operand.axes]
    return [0, want[1] - have[1], 0, want[0] - have[0]]


def _compute_dtype(x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype `F.linear` would compute in: autocast's if it is on; otherwise all must agree, as in eager."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    wrong = [o.dtype for o in others if o.dtype != x.dtype]
    if wrong:
        raise RuntimeError(f"expected input, weight and bias to have the same dtype, got {x.dtype} and {wrong[0]}")
    return x.dtype

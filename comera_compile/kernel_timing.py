"""Time this package's own CPU operators for a calibration: a layer of 768 x 768, at a few ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from comera_compile.codegen.cpu import merge_kernels, skinny_kernels
from comera_compile.device_timing import Kernel, Run, Timed
from comera_compile.planning.kernel_times import KernelTimes
from comera_compile.planning.linear_plan import LinearPlan, candidates
from comera_compile.tt.factorize import choose_shape

_SIZE, _ROWS = 768, 384
_BONDS = (8, 16, 32, 64, 128)
_MERGED_RANKS = (8, 16, 32, 64)
# A run repeats its operator: the first call after other work waits for code and operands that a step has at hand.
_REPEATS = 4


def kernel_runs(dtype: torch.dtype) -> dict[Timed, Run]:
    """What to time: empty where the operators do not run (another dtype, no compiler)."""
    if not skinny_kernels.available(torch.empty(1, 1, dtype=dtype), 1):
        return {}
    runs: dict[Timed, Run] = {}
    for bond in reversed(_BONDS):  # the shortest last, and a call alone behind them, when nothing is cold any more
        runs[Kernel("forward", bond)] = _forward(_ROWS, _SIZE, bond, dtype)
        runs[Kernel("backward", bond)] = _backward(bond, dtype)
    runs |= {Kernel("merge", rank): _merge(rank, dtype) for rank in reversed(_MERGED_RANKS)}
    runs[Kernel("call", 0)] = _forward(1, 8, 1, dtype, half=True)
    return {kernel: partial(_repeat, run) for kernel, run in runs.items()}


def _repeat(run: Run) -> None:
    for _ in range(_REPEATS):
        run()


def kernel_times(seconds: Mapping[Kernel, float]) -> KernelTimes | None:
    """Figures from the seconds of every run, or None where there are none."""
    if not seconds:
        return None
    seconds = {kernel: each / _REPEATS for kernel, each in seconds.items()}
    call = seconds[Kernel("call", 0)]
    once = 2 * _ROWS * 2 * _SIZE  # FLOPs of both halves and a bond of one
    forward = tuple((b, _rate(once * b, seconds[Kernel("forward", b)], 2 * call)) for b in _BONDS)
    backward = tuple((b, _rate(2 * once * b, seconds[Kernel("backward", b)], call)) for b in _BONDS)
    merge = tuple((r, _rate(_merge_flops(_merged(r)), seconds[Kernel("merge", r)], 2 * call)) for r in _MERGED_RANKS)
    return KernelTimes(call, forward, backward, merge)


def _rate(flops: int, seconds: float, calls: float) -> float:
    # A disturbed machine may make the calls alone seem longer than the whole.
    return flops / max(seconds - calls, 0.1 * seconds)


def _forward(rows: int, size: int, bond: int, dtype: torch.dtype, *, half: bool = False) -> Run:
    x, first, second, bias = (torch.randn(*s, dtype=dtype) for s in ((rows, size), (bond, size), (bond, size), (size,)))
    if half:
        return partial(skinny_kernels.narrow, x, first)
    return lambda: skinny_kernels.wide(skinny_kernels.narrow(x, first), second, bias)


def _backward(bond: int, dtype: torch.dtype) -> Run:
    x, h, grad = (torch.randn(_ROWS, n, dtype=dtype) for n in (_SIZE, bond, _SIZE))
    halves = (torch.randn(bond, _SIZE, dtype=dtype) for _ in range(2))
    return partial(skinny_kernels.backward, x, h, grad, *halves, needs_bias=True)


def _merge(rank: int, dtype: torch.dtype) -> Run:
    plan = _merged(rank)
    packed, text = [torch.randn(plan.shape.numel, dtype=dtype)], plan.encode()
    grads = merge_kernels.merge(packed, [1.0], text)

    def run() -> None:
        merge_kernels.merge(packed, [1.0], text)
        merge_kernels.merge_backward(packed, grads, [1.0], text)

    return run


def _merged(rank: int) -> LinearPlan:
    shape = choose_shape(_SIZE, _SIZE, format="tt", rank=rank)
    return next(plan for plan in candidates(shape, "cols", 1) if plan.merged)


def _merge_flops(plan: LinearPlan) -> int:
    steps = plan.merge.steps + plan.merge.backward(plan.merge.input_names)
    return sum(step.flops(plan.core_sizes) for step in steps)

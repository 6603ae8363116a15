"""The time of plans on this device: forward, backward and all gradients, as a compiled graph runs them.

A plan is traced to the mm, bmm and copies that a compiled graph would hold, and these are replayed without a compiler
(``replay.py``): what is timed differs from what will run by the fusion of copies and pointwise work around it only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from comera_compile.codegen.run_plan import apply_operands, merge_cores
from comera_compile.paired_timing import Timing, measure
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.replay import replay
from comera_compile.torch_private import without_autocast
from comera_compile.tuned_plans import Layer

# The same for every plan of a layer.
_SAME = (torch.ops.comera.stack_packed.default, torch.ops.comera.join_cores.default)
_SAMPLE_SECONDS, _MOST_REPEATS, _FEWEST_ROUNDS = 3e-4, 50, 5
_DRAWN = 1 << 20


def time_plans(
    layer: Layer, rows: int, plans: Sequence[LinearPlan], *, rounds: int = 15, seconds: float = 4.0
) -> Timing:
    """Time plans of one layer at ``rows`` rows, in alternation; stacking and joining of packed cores are left out.

    Args:
        layer: what the plans compute, with how many threads, and whether with gradients.
        rows: rows of x.
        plans: what to time.
        rounds, seconds: see :func:`comera_compile.paired_timing.measure`.

    Returns:
        Seconds of each plan in every round, by its text.
    """
    with _threads(layer), torch.inference_mode(False), without_autocast(layer.device_type):
        given = _operands(layer, rows)
        runs = {plan.encode(): replay(traced(plan, *given, training=layer.training), given, _SAME) for plan in plans}
        synchronize = torch.cuda.synchronize if layer.device_type == "cuda" else _nothing
        with torch.no_grad():
            repeats = _repeats(list(runs.values()), synchronize)
            steps = {text: _step(run, repeats, synchronize) for text, run in runs.items()}
            timing = measure(steps, rounds=rounds, seconds=seconds, fewest=min(rounds, _FEWEST_ROUNDS))
    taken = {text: [s / repeats for s in each] for text, each in timing.seconds.items()}
    return Timing(taken, timing.processor / repeats)


def traced(
    plan: LinearPlan, packed: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, *, training: bool = True
) -> fx.GraphModule:
    """A plan as one graph of aten calls.

    Args:
        plan: what to run.
        packed: ``[numel]`` cores. x: ``[rows, in]``. grad: ``[rows, out]``, gradient of y.
        training: with all gradients, or the forward alone.

    Returns:
        Graph from the three to the gradients of ``packed`` and ``x``; without ``training`` to y.
    """

    def step(packed: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands = merge_cores(plan.encode(), (1.0,), packed)
        y = apply_operands(plan.encode(), x, None, *(operand.squeeze(0) for operand in operands))
        return torch.autograd.grad(y, (packed, x), grad) if training else (y,)

    with torch.set_grad_enabled(training):
        return make_fx(step)(packed.detach().requires_grad_(training), x.detach().requires_grad_(training), grad)


def _operands(layer: Layer, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cores, x and the gradient of y. A generator of their own: the training's random numbers are not touched."""
    shape = layer.shape
    taken, given = (shape.cols, shape.rows) if layer.contracts == "cols" else (shape.rows, shape.cols)
    generator = torch.Generator().manual_seed(0)
    drawn = 0.1 * torch.randn(_DRAWN, generator=generator, device="cpu", dtype=torch.float32)

    def filled(*size: int) -> torch.Tensor:
        numel = torch.Size(size).numel()
        return drawn.repeat(-(-numel // _DRAWN))[:numel].view(size).to(layer.device_type, layer.dtype)

    return filled(shape.numel), filled(rows, taken), filled(rows, given)


def _step(run: Callable[[], object], repeats: int, synchronize: Callable[[], object]) -> Callable[[], None]:
    def step() -> None:
        for _ in range(repeats):
            run()
        synchronize()

    return step


def _repeats(runs: Sequence[Callable[[], object]], synchronize: Callable[[], object]) -> int:
    """How often to run all plans in a round: the fastest is then long enough to be timed."""
    fastest = float("inf")
    for run in runs:
        for _ in range(2):  # the first may have to set something up
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            fastest = min(fastest, time.perf_counter() - start)
    return max(1, min(_MOST_REPEATS, round(_SAMPLE_SECONDS / max(fastest, 1e-9))))


@contextmanager
def _threads(layer: Layer) -> Iterator[None]:
    before = torch.get_num_threads()
    if layer.device_type != "cpu" or layer.threads == before:
        yield
        return
    torch.set_num_threads(layer.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _nothing() -> None:
    """A CPU is done when its call returns."""

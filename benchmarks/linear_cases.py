"""One linear layer: its sizes, the variants that compute it, the least work, the fixed sets of cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import tensorly_linear
from benchmarks.fixed_strategies import STRATEGIES, FixedLinear
from benchmarks.floor import FLOAT, Work, merge_flops
from benchmarks.tensorly_linear import Implementation
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.shape import TTShape

DENSE, OURS = "dense", "comera"
TENSORLY: dict[str, Implementation] = {"tltorch_factorized": "factorized", "tltorch_reconstructed": "reconstructed"}
EAGER = "_eager"  # suffix: not compiled
ROTATION = 4  # inputs that a run goes round
WEIGHT_PASSES = 3  # read in the forward and in the backward, gradient written

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A layer, the rank of its tensor train, and the rows of one step."""

    inner: int
    out: int
    rank: int
    rows: int

    @property
    def name(self) -> str:
        """Key of its figures: ``<in>x<out>_r<rank>_T<rows>``."""
        return f"{self.inner}x{self.out}_r{self.rank}_T{self.rows}"

    @cached_property
    def shape(self) -> TTShape:
        """What the backend chooses for the weight."""
        return choose_shape(self.out, self.inner, format="tt", rank=self.rank)

    def batches(self) -> list[Batch]:
        """A rotation of inputs that want gradients, ``(rows, in)``, and gradients of outputs, ``(rows, out)``."""
        generator = torch.Generator().manual_seed(0)
        xs = torch.randn(ROTATION, self.rows, self.inner, generator=generator).unbind()
        grads = torch.randn(ROTATION, self.rows, self.out, generator=generator).unbind()
        return [(x.clone().requires_grad_(), grad) for x, grad in zip(xs, grads, strict=True)]

    def work(self, variant: str) -> Work:
        """Least work of forward, backward and all gradients of the dense layer or of ours."""
        if variant == DENSE:
            flops, parameters = 6 * self.rows * self.out * self.inner, self.out * self.inner
        else:
            flops = 6 * self.rows * self.shape.bond * (self.out + self.inner) + 3 * merge_flops(self.shape)
            parameters = self.shape.numel
        activations = self.rows * (3 * self.out + 3 * self.inner)  # y written, dy read twice; x read twice, dx written
        return Work(flops, FLOAT * (activations + WEIGHT_PASSES * parameters))


DEFAULT = (
    *(Case(768, 768, rank, 512) for rank in (32, 30, 16)),
    *(Case(768, 3072, rank, 512) for rank in (32, 16)),
    Case(4096, 4096, 32, 512),
    Case(768, 768, 16, 32),
    Case(768, 3072, 32, 4096),
)
GRID_LAYERS = ((768, 768), (768, 3072), (3072, 768), (1024, 4096), (4096, 4096))
GRID_RANKS, GRID_ROWS = (8, 16, 32, 64), (32, 512, 4096)


def grid() -> Iterator[Case]:
    """Every layer, rank and number of rows that the planner is held against."""
    for (inner, out), rows, rank in itertools.product(GRID_LAYERS, GRID_ROWS, GRID_RANKS):
        yield Case(inner, out, rank, rows)


@dataclass
class LinearStep:
    """A layer, what runs for it, and the batches it goes round."""

    layer: nn.Module
    forward: Callable[[Tensor], Tensor]
    batches: Sequence[Batch]
    done: int = 0

    def __post_init__(self) -> None:
        self.learned = tuple(self.layer.parameters())  # the same objects after the weight has become a tensor train

    def gradients(self) -> None:
        """Forward and backward of the next batch; the gradients stay."""
        x, grad = self.batches[self.done % len(self.batches)]
        self.done += 1
        self.forward(x).backward(grad)

    def step(self) -> None:
        """Forward, backward to the input and every parameter, gradients dropped."""
        self.gradients()
        self.batches[(self.done - 1) % len(self.batches)][0].grad = None
        for parameter in self.learned:
            parameter.grad = None

    @property
    def parameters(self) -> int:
        """Trainable elements; of ours only after its first step."""
        return sum(parameter.numel() for parameter in self.learned)


def build(variant: str, case: Case, batches: Sequence[Batch], *, inner: str = "inductor") -> LinearStep:
    """One variant of a case; nothing is compiled before its first step.

    Args:
        variant: ``dense``, ``comera``, a fixed strategy or a peer's layer; with ``_eager`` behind it not compiled.
        case: sizes, rank and rows.
        batches: of :meth:`Case.batches`; the variants share them.
        inner: what lowers the traced graphs of all variants.

    Raises:
        peers.PeerMissingError: the variant needs a package that is not installed.
    """
    torch.manual_seed(0)
    layer = _layer(variant.removesuffix(EAGER), case)
    if variant.endswith(EAGER):
        return LinearStep(layer, layer, batches)
    if variant != OURS:
        return LinearStep(layer, torch.compile(layer, backend=inner), batches)
    # which allocator runs is said by the benchmark, for all variants alike
    options: dict[str, Any] = {"rank": case.rank, "init": "random", "min_elements": 0}
    options |= {"keep_memory": False, "inner": inner}
    return LinearStep(layer, torch.compile(layer, backend="comera", options=options), batches)


def _layer(variant: str, case: Case) -> nn.Module:
    if variant in TENSORLY:
        return tensorly_linear.make(case.shape, TENSORLY[variant])
    if variant in STRATEGIES:
        return FixedLinear(case.shape, variant, case.rows)
    return nn.Linear(case.inner, case.out, bias=False)

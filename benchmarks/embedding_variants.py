"""The variants of one training step of an embedding table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.embedding_cases import DENSE, NAIVES, OURS, SPARSE, TUNED, Table
from benchmarks.plain_tt import draw_cores
from comera_compile.tt.shape import TTShape

LEARNING_RATE = 1e-4


class NaiveTTEmbedding(nn.Module):
    """Every id gathers its slice of every core and multiplies them, duplicates or not; gradients by autograd.

    Args:
        shape: of the table.
        rows_first: keep the rows as the first axis of each core, so that a slice is one contiguous copy: the fastest
            form of this lookup. Otherwise a core is ``[left, rows, columns, right]``, as tensor-train packages have it.
    """

    def __init__(self, shape: TTShape, *, rows_first: bool) -> None:
        super().__init__()
        self.shape, self.axis = shape, 0 if rows_first else 1
        drawn = (core.transpose(0, 1) if rows_first else core for core in draw_cores(shape))
        self.cores = nn.ParameterList(nn.Parameter(core.contiguous()) for core in drawn)

    def forward(self, ids: Tensor) -> Tensor:
        """``(n,)`` int64 ids to ``(n, width)``."""
        digits = []
        for mode in reversed(self.shape.row_modes):
            digits.append(ids % mode)
            ids = ids // mode
        count, rows = ids.shape[0], torch.ones(1)
        for k, (core, digit) in enumerate(zip(self.cores, reversed(digits), strict=True)):
            slices = core.index_select(self.axis, digit).transpose(0, self.axis)
            _, left, columns, right = slices.shape
            piece = slices.reshape(count, left, columns * right)
            rows = piece if k == 0 else torch.bmm(rows, piece)
            rows = rows.reshape(count, -1, right)
        return rows.reshape(count, -1)[:, : self.shape.cols]


@dataclass
class LookupStep:
    """A table, what runs for it, its optimizer, and the batches it goes round."""

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    ids: Sequence[Tensor]
    grads: Sequence[Tensor]
    done: int = 0

    def gradients(self) -> Tensor:
        """Lookup and backward of the next batch; the gradients stay. The rows are given back."""
        rows = self.forward(self.ids[self.done % len(self.ids)])
        rows.backward(self.grads[self.done % len(self.grads)])
        self.done += 1
        return rows

    def step(self) -> None:
        """Lookup, backward, update, gradients dropped."""
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def parameters(self) -> int:
        """Trainable elements; of ours only after its first step."""
        return sum(parameter.numel() for parameter in self.module.parameters())


def build(
    variant: str, table: Table, ids: Sequence[Tensor], grads: Sequence[Tensor], *, inner: str = "inductor"
) -> LookupStep:
    """One variant; nothing is compiled before its first step.

    Args:
        variant: a key of :data:`VARIANTS`.
        table: sizes and rank.
        ids, grads: what its steps go round; the variants share them.
        inner: what lowers the traced graphs of the compiled variants.
    """
    torch.manual_seed(0)
    module, forward = VARIANTS[variant](table, inner)
    parameters = list(module.parameters())
    optimizer: torch.optim.Optimizer
    if variant == SPARSE:
        optimizer = torch.optim.SparseAdam(parameters, lr=LEARNING_RATE)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    return LookupStep(module, forward, optimizer, ids, grads)


Built = tuple[nn.Module, Callable[[Tensor], Tensor]]


def _dense(table: Table, inner: str) -> Built:
    module = nn.Embedding(table.rows, table.width)
    return module, torch.compile(module, backend=inner)


def _sparse(table: Table, inner: str) -> Built:
    module = nn.Embedding(table.rows, table.width, sparse=True)  # no compiler takes sparse gradients
    return module, module


def _ours(table: Table, inner: str) -> Built:
    module = nn.Embedding(table.rows, table.width)
    # which allocator runs is said by the benchmark, for all variants alike
    options: dict[str, Any] = {"rank": table.rank, "init": "random", "min_elements": 0}
    return module, torch.compile(module, backend="comera", options={**options, "keep_memory": False, "inner": inner})


def _eager(make: Callable[[Table], nn.Module]) -> Callable[[Table, str], Built]:
    def build_eager(table: Table, inner: str) -> Built:
        module = make(table)
        return module, module

    return build_eager


def _compiled(make: Callable[[Table], nn.Module]) -> Callable[[Table, str], Built]:
    def build_compiled(table: Table, inner: str) -> Built:
        module = make(table)
        return module, torch.compile(module, backend=inner)

    return build_compiled


def _naive(table: Table) -> nn.Module:
    return NaiveTTEmbedding(table.balanced_shape, rows_first=False)


def _tuned(table: Table) -> nn.Module:
    return NaiveTTEmbedding(table.shape, rows_first=True)


VARIANTS: dict[str, Callable[[Table, str], Built]] = {
    DENSE: _dense,
    SPARSE: _sparse,
    OURS: _ours,
    **dict(zip(NAIVES, (_eager(_naive), _compiled(_naive)), strict=True)),
    **dict(zip(TUNED, (_eager(_tuned), _compiled(_tuned)), strict=True)),
}

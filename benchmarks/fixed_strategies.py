"""The orders of contraction that one can fix beforehand, written in plain torch without the planner.

Each computes ``y = x W^T`` for a ``tt`` weight from its cores and leaves the gradients to autograd: what the planner
has to beat on every layer, rank and number of rows.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import opt_einsum
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plain_tt import draw_cores
from comera_compile.tt.shape import TTShape

Product = Callable[[Tensor, Sequence[Tensor]], Tensor]


class FixedLinear(nn.Module):
    """A linear layer without bias whose cores are contracted in one fixed order.

    Args:
        shape: a ``tt`` shape without padding.
        strategy: a key of :data:`STRATEGIES`.
        rows: rows of x; the optimal path depends on it.

    Raises:
        ValueError: the modes stand for more rows or columns than the weight has.
    """

    def __init__(self, shape: TTShape, strategy: str, rows: int) -> None:
        super().__init__()
        if shape.padded:
            raise ValueError(f"fixed strategies need modes that multiply to {shape.rows} x {shape.cols}, got {shape}")
        self.product = STRATEGIES[strategy](shape, rows)
        self.cores = draw_cores(shape)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, in_features)`` to ``(rows, out_features)``."""
        return self.product(x, list(self.cores))


def core_by_core(shape: TTShape, rows: int) -> Product:
    """Every core is applied to the activations, the last input mode first, no two cores are merged."""
    split = len(shape.row_modes)

    def product(x: Tensor, cores: Sequence[Tensor]) -> Tensor:
        for core in reversed(cores[split:]):  # (rows * modes before, mode * rank) -> (..., rank on the left)
            x = torch.mm(x.reshape(-1, core.shape[1] * core.shape[2]), core.reshape(core.shape[0], -1).t())
        for core in reversed(cores[:split]):  # (rows * modes so far, rank) -> (..., mode * rank on the left)
            x = torch.mm(x.reshape(-1, core.shape[2]), core.permute(2, 1, 0).reshape(core.shape[2], -1))
        backwards = [rows, *shape.row_modes[::-1]]
        return x.reshape(backwards).permute(0, *range(split, 0, -1)).reshape(rows, shape.rows)

    return product


def merged_halves(shape: TTShape, rows: int) -> Product:
    """The cores of each half are merged, then there are two products: CoMERA's order."""
    split = len(shape.row_modes)

    def product(x: Tensor, cores: Sequence[Tensor]) -> Tensor:
        left, right = _merge(cores[:split], cores[split:])
        return F.linear(F.linear(x, right), left)

    return product


def rebuilt(shape: TTShape, rows: int) -> Product:
    """The dense weight is rebuilt, then there is one product."""
    split = len(shape.row_modes)

    def product(x: Tensor, cores: Sequence[Tensor]) -> Tensor:
        left, right = _merge(cores[:split], cores[split:])
        return F.linear(x, torch.mm(left, right))

    return product


def optimal_path(shape: TTShape, rows: int) -> Product:
    """opt_einsum's optimal path of the forward product (fewest FLOPs), one pairwise einsum after the other."""
    steps = pairwise_steps(shape, rows)
    modes = list(shape.col_modes)

    def product(x: Tensor, cores: Sequence[Tensor]) -> Tensor:
        first, *inner, last = cores
        operands = [x.reshape([rows, *modes]), first.squeeze(0), *inner, last.squeeze(-1)]
        for positions, equation in steps:
            operands.append(torch.einsum(equation, *[operands.pop(k) for k in positions]))
        return operands[0].reshape(rows, shape.rows)

    return product


def pairwise_steps(shape: TTShape, rows: int) -> list[tuple[tuple[int, ...], str]]:
    """Positions (taken out in this order, the result goes to the end) and equation of each contraction."""
    letters = iter(string.ascii_letters)
    row = next(letters)
    modes = [next(letters) for _ in shape.modes]
    ranks = ["", *(next(letters) for _ in shape.modes[1:]), ""]
    cores = [left + mode + right for left, mode, right in zip(ranks[:-1], modes, ranks[1:], strict=True)]
    split = len(shape.row_modes)
    equation = f"{row}{''.join(modes[split:])},{','.join(cores)}->{row}{''.join(modes[:split])}"
    first, *inner, last = shape.core_shapes
    sizes = [(rows, *shape.col_modes), first[1:], *inner, last[:-1]]
    _, info = opt_einsum.contract_path(equation, *sizes, shapes=True, optimize="optimal")
    return [(tuple(step[0]), step[2]) for step in info.contraction_list]


def _merge(rows: Sequence[Tensor], cols: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``(out_features, bond)`` and ``(bond, in_features)``, from the ends of the chain inwards."""
    left = rows[0].reshape(-1, rows[0].shape[-1])
    for core in rows[1:]:
        left = torch.mm(left, core.reshape(core.shape[0], -1)).reshape(-1, core.shape[-1])
    right = cols[-1].reshape(cols[-1].shape[0], -1)
    for core in reversed(cols[:-1]):
        right = torch.mm(core.reshape(-1, core.shape[-1]), right).reshape(core.shape[0], -1)
    return left, right


STRATEGIES: dict[str, Callable[[TTShape, int], Product]] = {
    "core_by_core": core_by_core,
    "merged_halves": merged_halves,
    "rebuilt": rebuilt,
    "opt_einsum": optimal_path,
}

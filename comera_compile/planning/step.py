"""One pairwise contraction over named axes, its two adjoints, and how it becomes a single matrix product.

An axis is a short name: ``t`` rows (batch x sequence), ``l`` layers of equal shape that are contracted together, and
the modes and ranks of the cores. A step sums over every axis that both operands have and the result lacks; axes that
all three have are batch axes. This is `einsum` restricted to two operands, which is all that a compiled graph holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

Axes = tuple[str, ...]
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Tensor:
    """A named tensor of a plan and the names of its axes, most significant first."""

    name: str
    axes: Axes

    def numel(self, sizes: Sizes) -> int:
        """Number of elements under the given axis sizes."""
        return math.prod(sizes[a] for a in self.axes)

    def __str__(self) -> str:
        return f"{self.name}[{','.join(self.axes)}]"


@dataclass(frozen=True)
class MatrixForm:
    """How an operand becomes a (batch, rows, columns) matrix: axis order, and whether it is then read transposed."""

    order: Axes
    transposed: bool
    copies: bool


@dataclass(frozen=True)
class Step:
    """``out = left . right``: one pairwise contraction."""

    out: Tensor
    left: Tensor
    right: Tensor

    @cached_property
    def batch(self) -> Axes:
        """Axes that both operands and the result share."""
        return tuple(a for a in self.out.axes if a in self.left.axes and a in self.right.axes)

    @cached_property
    def summed(self) -> Axes:
        """Contracted axes, in the order of the operand that holds the rows (so that the larger one is not copied)."""
        first, second = (self.right, self.left) if "t" in self.right.axes else (self.left, self.right)
        return tuple(a for a in first.axes if a in second.axes and a not in self.out.axes)

    def free(self, operand: Tensor) -> Axes:
        """Axes of one operand that survive and that the other lacks.

        In the order of the result where the product then is the result. Otherwise the product is copied into that
        order anyway, and the operand's own order saves a copy of the operand.
        """
        left, right = self._kept(self.left), self._kept(self.right)
        if self.out.axes in (self.batch + left + right, self.batch + right + left):
            return left if operand == self.left else right
        return tuple(a for a in operand.axes if a in self.out.axes and a not in self.batch)

    def _kept(self, operand: Tensor) -> Axes:
        return tuple(a for a in self.out.axes if a in operand.axes and a not in self.batch)

    @cached_property
    def swapped(self) -> bool:
        """Whether the product is taken as right . left, because the result lists the right operand's axes first."""
        natural = self.batch + self.free(self.left) + self.free(self.right)
        mirrored = self.batch + self.free(self.right) + self.free(self.left)
        return self.out.axes != natural and self.out.axes == mirrored

    @cached_property
    def product_axes(self) -> Axes:
        """Axes of the matrix product as computed, before a final permutation to ``out.axes``."""
        first, second = (self.right, self.left) if self.swapped else (self.left, self.right)
        return self.batch + self.free(first) + self.free(second)

    def form(self, operand: Tensor, *, rows_first: bool) -> MatrixForm:
        """Matrix form of an operand: free axes as rows (``rows_first``) or contracted axes as rows."""
        free, summed = self.free(operand), self.summed
        wanted = self.batch + (free + summed if rows_first else summed + free)
        other = self.batch + (summed + free if rows_first else free + summed)
        if operand.axes == other and operand.axes != wanted:
            return MatrixForm(other, transposed=True, copies=False)
        return MatrixForm(wanted, transposed=False, copies=operand.axes != wanted)

    def adjoints(self) -> tuple[Step, Step]:
        """Steps that give the gradients of ``left`` and ``right`` from the gradient of ``out``."""
        grad = gradient(self.out)
        return Step(gradient(self.left), grad, self.right), Step(gradient(self.right), self.left, grad)

    def flops(self, sizes: Sizes) -> int:
        """Floating-point operations: two a multiply-add."""
        return 2 * math.prod(sizes[a] for a in {*self.left.axes, *self.right.axes})

    @cached_property
    def groups(self) -> tuple[Axes, Axes, Axes, Axes]:
        """Axes of the matrix product: batch, rows, columns, summed."""
        first, second = (self.right, self.left) if self.swapped else (self.left, self.right)
        return self.batch, self.free(first), self.free(second), self.summed

    @cached_property
    def copied(self) -> tuple[Tensor, ...]:
        """Tensors that have to be copied into another order before or after the product."""
        first, second = (self.right, self.left) if self.swapped else (self.left, self.right)
        forms = ((first, self.form(first, rows_first=True)), (second, self.form(second, rows_first=False)))
        before = tuple(operand for operand, form in forms if form.copies)
        return before + ((self.out,) if self.out.axes != self.product_axes else ())

    def matmul_sizes(self, sizes: Sizes) -> tuple[int, int, int, int]:
        """``(batch, m, n, k)`` of the matrix product."""
        batch, m, n, k = (math.prod(sizes[a] for a in axes) for axes in self.groups)
        return batch, m, n, k

    def copied_numel(self, sizes: Sizes) -> int:
        """Elements that have to be copied into another order before or after the product."""
        return sum(tensor.numel(sizes) for tensor in self.copied)

    def __str__(self) -> str:
        return f"{self.out} = {self.left} . {self.right}"


def gradient(tensor: Tensor) -> Tensor:
    """The tensor that holds the gradient of ``tensor``."""
    return Tensor(f"d{tensor.name}", tensor.axes)

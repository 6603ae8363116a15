"""What is to be computed for one weight, forward and backward together: a network of tensors and its outputs.

Take the loss gradient ``dy`` as one more leaf beside x and the cores, and the whole contraction is a number, <dy, y>.
Leaving out one leaf gives the gradient by it: everything but ``dy`` is y itself, everything but x is dx, everything
but a core is that core's gradient. So every output, and every intermediate of every output, is a *set of leaves*; its
axes are those that lead out of the set. Sets that occur in several outputs are the same tensor and are paid once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from comera_compile.errors import PlanningError
from comera_compile.planning.step import Axes, Tensor
from comera_compile.tt.shape import TTShape

Side = Literal["rows", "cols"]
# A set of leaves: bit k is leaf k.
Part = int


@dataclass(frozen=True)
class Problem:
    """A network of leaves and the outputs wanted of it.

    Args:
        leaves: in ring order: neighbours share an axis, and so do the last and the first. Candidates follow it.
        sizes: size of each axis as pairs, in the order that tensors list them (ranks and modes along the chain).
        late: position of the leaf that only the backward has (``dy``), or None.
        outputs: sets of leaves to be computed.
        whole: sets of leaves of which no proper part may meet anything outside (their modes are cropped together).

    Raises:
        PlanningError: an axis has two sizes, none, or a negative one.
    """

    leaves: tuple[Tensor, ...]
    sizes: tuple[tuple[str, int], ...]
    late: int | None
    outputs: tuple[Part, ...]
    whole: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        size_of: dict[str, int] = {}
        for axis, size in self.sizes:
            if size_of.setdefault(axis, size) != size:
                raise PlanningError(f"axis {axis!r} has two sizes, {size_of[axis]} and {size}: give it one")
            if size < 0:
                raise PlanningError(f"axis {axis!r} must not have a negative size, got {size}")
        for leaf in self.leaves:
            unsized = [axis for axis in leaf.axes if axis not in size_of]
            if unsized:
                known = ", ".join(size_of)
                raise PlanningError(f"axis {unsized[0]!r} of {leaf} has no size: give it one beside {known}")

    @property
    def everything(self) -> Part:
        """The set of all leaves."""
        return (1 << len(self.leaves)) - 1

    @cached_property
    def size_of(self) -> dict[str, int]:
        """Size of each axis."""
        return dict(self.sizes)

    @cached_property
    def holders(self) -> dict[str, Part]:
        """Which leaves have an axis."""
        return {a: sum(1 << k for k, leaf in enumerate(self.leaves) if a in leaf.axes) for a, _ in self.sizes}

    def in_forward(self, part: Part) -> bool:
        """Whether a set can be computed before the backward."""
        return self.late is None or not part >> self.late & 1

    def allowed(self, part: Part) -> bool:
        """Whether a set respects the halves that must stay whole."""
        for half in self.whole:
            shared, rest = part & half, self.everything & ~half
            if shared not in (0, half) and part & ~half and part & rest != rest:
                return False
        return True

    def open_axes(self, part: Part) -> Axes:
        """Axes that lead out of a set, in the order of ``sizes``."""
        return tuple(a for a, held in self.holders.items() if held & part and held & ~part)

    def numel(self, part: Part) -> int:
        """Elements of the tensor of a set."""
        return math.prod(self.size_of[a] for a in self.open_axes(part))


def linear_problem(
    shape: TTShape, contracts: Side, rows: int, *, training: bool = True, bond_multiple: int = 1
) -> Problem:
    """``y = x W^T`` (``contracts="cols"``) or ``y = x W`` (``"rows"``) with W a ``tt`` weight.

    Leaves in ring order: x, the cores from its side to the other end of the chain, dy. The bond is padded with zeros
    to a multiple of ``bond_multiple``. With ``training`` every gradient is an output.

    Raises:
        PlanningError: the number of rows is negative.
    """
    if rows < 0:
        raise PlanningError(f"rows must not be negative, got {rows}")
    left, right = core_tensors(shape)
    inner = [*left, *right] if contracts == "rows" else [*right[::-1], *left[::-1]]
    row_modes = tuple(f"m{k + 1}" for k in range(len(left)))
    col_modes = tuple(f"n{k + 1}" for k in range(len(right)))
    taken, given = (row_modes, col_modes) if contracts == "rows" else (col_modes, row_modes)
    leaves = (Tensor("x", ("t", *taken)), *inner, Tensor("dy", ("t", *given)))
    everything, last = (1 << len(leaves)) - 1, len(leaves) - 1
    outputs = tuple(everything & ~(1 << k) for k in reversed(range(len(leaves))))
    sizes = {"t": rows, **core_sizes(shape, bond_multiple)}
    return Problem(
        leaves, tuple(sizes.items()), last, outputs if training else outputs[:1], _padded_halves(shape, leaves)
    )


def _padded_halves(shape: TTShape, leaves: tuple[Tensor, ...]) -> tuple[Part, ...]:
    """Cores of a side whose modes multiply to more than its size."""
    halves = zip(core_tensors(shape), (shape.row_modes, shape.col_modes), (shape.rows, shape.cols), strict=True)
    padded = [cores for cores, modes, size in halves if math.prod(modes) != size and len(modes) > 1]
    return tuple(sum(1 << leaves.index(core) for core in cores) for cores in padded)


def core_tensors(shape: TTShape) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Row cores and column cores with their axes; ranks of size one at the ends have none."""
    rows, cols = len(shape.row_modes), len(shape.col_modes)
    p = [*(f"p{k}" for k in range(1, rows)), "r"]
    q = ["r", *(f"q{k}" for k in range(1, cols))]
    left = [Tensor(f"A{k + 1}", ((p[k - 1],) if k else ()) + (f"m{k + 1}", p[k])) for k in range(rows)]
    right = [Tensor(f"B{k + 1}", (q[k], f"n{k + 1}") + ((q[k + 1],) if k + 1 < cols else ())) for k in range(cols)]
    return tuple(left), tuple(right)


def core_sizes(shape: TTShape, bond_multiple: int = 1) -> dict[str, int]:
    """Size of each axis of the cores, along the chain; the bond with its padding."""
    sizes: dict[str, int] = {}
    for core, dims in zip([c for side in core_tensors(shape) for c in side], shape.core_shapes, strict=True):
        kept = dims if len(core.axes) == 3 else dims[1:] if core.name == "A1" else dims[:-1]
        sizes.update(zip(core.axes, kept, strict=True))
    sizes["r"] = -(-sizes["r"] // bond_multiple) * bond_multiple
    return sizes

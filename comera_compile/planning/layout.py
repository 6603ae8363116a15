"""Name and axis order of the tensor of every set of leaves, and the step that makes it from two others.

One order a set, whatever makes it, so that the price of a step does not depend on where its operands came from. The
orders are such that the usual steps are products without copies: rows first; cores along the chain; a whole row half
with its bond first, since the gradient of the bond is then the fast one of the two transposed products.
"""

from __future__ import annotations

from comera_compile.planning.problem import Part, Problem
from comera_compile.planning.step import Axes, Step, Tensor, gradient


def tensor_of(problem: Problem, part: Part) -> Tensor:
    """Name and axes of a set. The gradient of a set, which is its complement, has the same axes as the set."""
    rest = problem.everything & ~part
    if part & (part - 1) == 0:
        return problem.leaves[part.bit_length() - 1]
    if problem.late is not None and part >> problem.late & 1:
        return gradient(_plain(problem, rest))
    return _plain(problem, part)


def step_of(problem: Problem, pair: tuple[Part, Part]) -> Step:
    """The contraction of two sets."""
    left, right = pair
    return Step(tensor_of(problem, left | right), tensor_of(problem, left), tensor_of(problem, right))


def _plain(problem: Problem, part: Part) -> Tensor:
    """A set without the late leaf."""
    if part & (part - 1) == 0:
        return problem.leaves[part.bit_length() - 1]
    if problem.late is not None and part == problem.everything & ~(1 << problem.late):
        late = problem.leaves[problem.late]
        return Tensor(late.name.removeprefix("d"), late.axes)
    return Tensor(_name(problem, part), _order(problem, part))


def _name(problem: Problem, part: Part) -> str:
    """``A`` for all row cores, ``B`` for all column cores, ``h`` for x with one half, otherwise the parts joined."""
    cores = [leaf.name for k, leaf in enumerate(problem.leaves) if part >> k & 1 and k]
    every = [leaf.name for leaf in problem.leaves[1:]]
    halves = [(side, [c for c in every if c.startswith(side)]) for side in "AB"]
    text = ""
    for side, half in halves:
        ours = sorted(c for c in cores if c.startswith(side))
        text += side if ours == sorted(half) and len(half) > 1 else "".join(ours)
    if not part & 1:
        return "W" if text == "AB" and len(cores) == sum(len(half) for _, half in halves) else text
    met = problem.leaves[1].name[0]
    return "h" if sorted(cores) == sorted(dict(halves)[met]) else f"x{text}"


def _order(problem: Problem, part: Part) -> Axes:
    axes = problem.open_axes(part)
    modes = [a for a in axes if a[0] in "mn"]
    ranks = [a for a in axes if a[0] not in "mnt"]
    if "t" not in axes:
        row_cores = sum(1 << k for k, leaf in enumerate(problem.leaves) if leaf.name[0] == "A")
        return ("r", *(a for a in axes if a != "r")) if part == row_cores else axes
    rows = [a for a in modes if a[0] == "m"]
    partial = len(rows) < sum(a[0] == "m" for a in problem.size_of)
    rows = rows[::-1] if partial else rows  # a chain of products leaves them in this order
    return ("t", *rows, *(a for a in modes if a[0] == "n"), *ranks)

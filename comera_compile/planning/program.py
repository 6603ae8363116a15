"""A straight line of pairwise steps with its backward: forward steps, gradient steps, tensors saved between them.

Forward and backward are one object. Each step has two adjoint steps; the backward is those adjoints in reverse, cut
down to the inputs whose gradients are asked for, and the saved set is what these adjoints read of the forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from comera_compile.planning.step import Step, Tensor


@dataclass(frozen=True)
class Program:
    """Steps from ``inputs`` to ``outputs``. Every tensor is made once, and every intermediate is read once."""

    inputs: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Tensor, ...]

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Which tensor is made from which; edges carry the step."""
        graph = nx.DiGraph()
        graph.add_nodes_from(t.name for t in self.inputs)
        for step in self.steps:
            graph.add_edge(step.left.name, step.out.name, step=step)
            graph.add_edge(step.right.name, step.out.name, step=step)
        return graph

    def backward(self, wanted: Iterable[str]) -> tuple[Step, ...]:
        """Gradient steps, in order, for the inputs named in ``wanted``."""
        moving = {name for layer in nx.bfs_layers(self.graph, list(wanted)) for name in layer}
        steps: list[Step] = []
        for step in reversed(self.steps):
            for operand, adjoint in zip((step.left, step.right), step.adjoints(), strict=True):
                if operand.name in moving:
                    steps.append(adjoint)
        return tuple(steps)

    def saved(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """Forward tensors that the backward reads, inputs among them, in the order in which they exist."""
        made = [t.name for t in self.inputs] + [s.out.name for s in self.steps]
        read = {operand.name for s in self.backward(wanted) for operand in (s.left, s.right)}
        return tuple(name for name in made if name in read)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return tuple(t.name for t in self.inputs)

    def with_layer_axis(self) -> Program:
        """The same program over a stack of layers: a leading axis ``l`` on every tensor."""
        return Program(
            tuple(map(_stacked, self.inputs)),
            tuple(Step(_stacked(s.out), _stacked(s.left), _stacked(s.right)) for s in self.steps),
            tuple(map(_stacked, self.outputs)),
        )


def _stacked(tensor: Tensor) -> Tensor:
    return Tensor(tensor.name, ("l", *tensor.axes))

"""The packed vectors of layers that are merged together as one matrix, and the way back.

Two ops that Inductor does not look into. In generated code each layer would be a loop of its own, with its own pass of
Inductor and of the C++ compiler, for what is a copy of a few megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scaling:
    """What is multiplied on the way: columns ``starts[k]`` to ``stops[k]`` of layer ``l`` by ``factors[k][l]``."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    factors: tuple[tuple[float, ...], ...]

    @property
    def flat(self) -> tuple[list[int], list[int], list[float]]:
        """As arguments of an op, which takes no nested lists."""
        return list(self.starts), list(self.stops), [f for layers in self.factors for f in layers]


def stack_packed(packed: Sequence[torch.Tensor], scaling: Scaling) -> torch.Tensor:
    """Vectors of equal length and dtype as the rows of a new matrix ``[layers, numel]``, scaled."""
    stacked: torch.Tensor = _stack(list(packed), *scaling.flat)
    return stacked


def join_cores(cores: Sequence[torch.Tensor], scaling: Scaling) -> torch.Tensor:
    """Matrices ``[layers, size of a core]`` side by side in a new matrix ``[layers, numel]``, scaled."""
    joined: torch.Tensor = _join(list(cores), *scaling.flat)
    return joined


@torch.library.custom_op("comera::stack_packed", mutates_args=())
def _stack(
    packed: Sequence[torch.Tensor], starts: Sequence[int], stops: Sequence[int], factors: Sequence[float]
) -> torch.Tensor:
    return _scale(torch.stack(list(packed)), starts, stops, factors)


@_stack.register_fake
def _stack_fake(
    packed: Sequence[torch.Tensor], starts: Sequence[int], stops: Sequence[int], factors: Sequence[float]
) -> torch.Tensor:
    return packed[0].new_empty([len(packed), packed[0].shape[0]])


@torch.library.custom_op("comera::join_cores", mutates_args=())
def _join(
    cores: Sequence[torch.Tensor], starts: Sequence[int], stops: Sequence[int], factors: Sequence[float]
) -> torch.Tensor:
    return _scale(torch.cat(list(cores), dim=1), starts, stops, factors)


@_join.register_fake
def _join_fake(
    cores: Sequence[torch.Tensor], starts: Sequence[int], stops: Sequence[int], factors: Sequence[float]
) -> torch.Tensor:
    return cores[0].new_empty([cores[0].shape[0], sum(core.shape[1] for core in cores)])


def _scale(matrix: torch.Tensor, starts: Sequence[int], stops: Sequence[int], factors: Sequence[float]) -> torch.Tensor:
    """In place, a scalar a layer: no tensor of factors, which a GPU would wait for."""
    layers = matrix.shape[0]
    for k, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        ours = list(factors[k * layers : (k + 1) * layers])
        torch._foreach_mul_(list(matrix[:, start:stop].unbind(0)), ours)
    return matrix

"""The packed vectors of layers that are merged together as one matrix, and the way back.

Two ops that Inductor does not look into. In generated code each layer would be a loop of its own, with its own pass of
Inductor and of the C++ compiler, for what is a copy of a few megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def stack_packed(packed: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
    """Vectors of equal length and dtype, each times its scale, as the rows of a new matrix ``[layers, numel]``."""
    stacked: torch.Tensor = _stack(list(packed), list(scales))
    return stacked


def join_cores(cores: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
    """Matrices ``[layers, size of a core]`` side by side in a new ``[layers, numel]``, each row times its scale."""
    joined: torch.Tensor = _join(list(cores), list(scales))
    return joined


@torch.library.custom_op("comera::stack_packed", mutates_args=())
def _stack(packed: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
    return _scale(torch.stack(list(packed)), scales)


@_stack.register_fake
def _stack_fake(packed: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
    return packed[0].new_empty([len(packed), packed[0].shape[0]])


@torch.library.custom_op("comera::join_cores", mutates_args=())
def _join(cores: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
    return _scale(torch.cat(list(cores), dim=1), scales)


@_join.register_fake
def _join_fake(cores: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
    return cores[0].new_empty([cores[0].shape[0], sum(core.shape[1] for core in cores)])


def _scale(matrix: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """In place, a number a row: no tensor of scales, which a GPU would wait for.

    Every core gets its scale. All of it on one core of a half would save a pass over the others, but leaves the range
    of float16 for small weights, whose scales are large.
    """
    torch._foreach_mul_(list(matrix.unbind(0)), list(scales))
    return matrix

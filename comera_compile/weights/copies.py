"""Averaged copies of a model made before its weights were packed (EMA): they have to change shape with it.

An ``AveragedModel`` follows the parameters it averages. So does a frozen copy whose values are bit-equal to the trained
weight at the moment of conversion: that is what a hand-written EMA or a target network looks like before the first
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

Named = tuple[str, nn.Parameter]


def copies_of(targets: Sequence[Named], modules: Iterable[nn.Module]) -> Iterator[tuple[int, nn.Parameter]]:
    """Pairs of a target's position and a copy of it.

    Args:
        targets: dotted name and parameter of each weight about to be packed.
        modules: all live modules.
    """
    modules = list(modules)
    seen = {id(p) for _, p in targets}
    averaged = [m for m in modules if isinstance(m, AveragedModel)]
    for average in averaged:
        yield from _averages(targets, average, seen)
    by_shape: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for k, (_, p) in enumerate(targets):
        by_shape.setdefault((p.shape, p.dtype), []).append(k)
    for module in modules:
        for copy in module._parameters.values():
            if copy is None or copy.requires_grad or id(copy) in seen or copy.device.type == "meta":
                continue
            twin = _equal(copy, [k for k in by_shape.get((copy.shape, copy.dtype), ())], targets)
            if twin is not None:
                seen.add(id(copy))
                yield twin, copy


def _averages(targets: Sequence[Named], module: AveragedModel, seen: set[int]) -> Iterator[tuple[int, nn.Parameter]]:
    """Parameters of an averaged model that bear a target's name and shape."""
    inner = {n.removeprefix("_orig_mod."): p for n, p in module.module.named_parameters()}
    for k, (name, parameter) in enumerate(targets):
        copy = inner.get(name)
        if copy is not None and copy.shape == parameter.shape and id(copy) not in seen:
            seen.add(id(copy))
            yield k, copy


def _equal(copy: nn.Parameter, positions: Sequence[int], targets: Sequence[Named]) -> int | None:
    same_device = (k for k in positions if targets[k][1].device == copy.device)
    return next((k for k in same_device if torch.equal(targets[k][1], copy)), None)

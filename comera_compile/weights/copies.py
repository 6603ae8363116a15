"""Averaged copies of a model made before its weights were packed (EMA): they have to change shape with it.

An ``AveragedModel`` follows the model it averages. So does a frozen copy whose values are bit-equal to the trained
weight at the moment of conversion: that is what a hand-written EMA or a target network looks like before the first
step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from comera_compile.errors import WeightError
from comera_compile.tt.align import align
from comera_compile.tt.encode import encode
from comera_compile.tt.shape import TTShape
from comera_compile.weights.owners import is_matrix
from comera_compile.weights.tt_module import base_class

_log = logging.getLogger("comera_compile")
_COMPARED = 4  # parameters that tell whose average a model is
_SAME = 0.7  # an average is near its model; two models started apart are 1.4 times their size from each other


def copies_of(targets: Sequence[nn.Parameter], modules: Iterable[nn.Module]) -> Iterator[tuple[int, nn.Parameter]]:
    """Pairs of a target's position and a copy of it.

    Args:
        targets: weights about to be packed, still dense.
        modules: all live modules.
    """
    modules = list(modules)
    seen = {id(p) for p in targets}
    for average in [m for m in modules if isinstance(m, AveragedModel)]:
        yield from averages_of(targets, average, modules, seen)
    by_shape: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for k, p in enumerate(targets):
        by_shape.setdefault((p.shape, p.dtype, p.device), []).append(k)
    for module in modules:
        for copy in module._parameters.values():
            if copy is None or not is_matrix(copy) or copy.requires_grad or id(copy) in seen:
                continue
            same = by_shape.get((copy.shape, copy.dtype, copy.device), ())
            twin = next((k for k in same if torch.equal(targets[k], copy)), None)
            if twin is not None:
                seen.add(id(copy))
                yield twin, copy


def averages_of(
    targets: Sequence[nn.Parameter], average: AveragedModel, modules: Sequence[nn.Module], seen: set[int]
) -> Iterator[tuple[int, nn.Parameter]]:
    """Parameters of an averaged model that average one of the targets.

    An ``AveragedModel`` does not remember its model. A live module is taken for it if it has the same class and the
    same parameters, and values nearer to the average than another model's would be.
    """
    positions = {id(p): k for k, p in enumerate(targets)}
    copies = dict(average.module.named_parameters())
    for module in modules:
        if base_class(module) is not base_class(average.module) or module is average.module:
            continue
        sources = dict(module.named_parameters())
        if any(id(p) in positions for p in sources.values()) and _distance(copies, sources) < _SAME:
            for name, source in sources.items():
                if id(source) in positions and id(copies[name]) not in seen:
                    seen.add(id(copies[name]))
                    yield positions[id(source)], copies[name]


def follow(
    copy: torch.Tensor,
    leader: torch.Tensor,
    packed: torch.Tensor,
    shape: TTShape,
    *,
    drawn: bool,
    max_error: float,
    name: str,
) -> torch.Tensor:
    """Packed values of a copy: in the shape of the weight it follows, with cores that may be averaged with its cores.

    Args:
        copy: dense copy.
        leader, packed: the weight it follows, dense and as it will be.
        shape: of ``packed``.
        drawn: the leader's cores are drawn afresh: its earlier values, and with them the copy's, held nothing.
        max_error: relative error that is accepted.
        name: of the weight, for messages.

    Raises:
        WeightError: the copy does not fit the ranks.
    """
    with torch.inference_mode(False), torch.no_grad():
        if drawn or torch.equal(copy, leader):
            return packed
        encoded = encode(copy.detach(), shape, init="svd", max_error=max_error, name=name)
        if encoded.packed is None or encoded.relative_error > max_error or encoded.shape.ranks != shape.ranks:
            raise WeightError(
                f"an AveragedModel of this model holds a {name} that does not fit ranks {shape.ranks} "
                f"({encoded.reason}): make it after the first compiled call, or call comera.tensorize(model) first"
            )
        aligned = align(encoded.packed * (encoded.shape.scale / shape.scale), packed, shape)
        if aligned is None:
            _log.warning("comera: the average of %s is too far from it; it starts anew from the present weight", name)
        return packed if aligned is None else aligned


def _distance(copies: dict[str, nn.Parameter], sources: dict[str, nn.Parameter]) -> float:
    """Distance of an average from a model, over the model's size; infinite if names or shapes differ."""
    if list(copies) != list(sources) or any(copies[n].shape != p.shape for n, p in sources.items()):
        return math.inf
    matrices = [n for n, p in copies.items() if p.dim() > 1 and p.device == sources[n].device][:_COMPARED]
    with torch.no_grad():
        apart = math.hypot(*(float(torch.linalg.vector_norm(copies[n] - sources[n])) for n in matrices))
        return apart / max(math.hypot(*(float(torch.linalg.vector_norm(sources[n])) for n in matrices)), 1e-30)

"""Optimizer groups whose weight decay means the same for a tensor-train weight as for a dense one."""

from __future__ import annotations

from typing import Any

from torch import nn

from comera_compile.errors import OptionError
from comera_compile.weights import tt_module


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for any torch optimizer with decoupled decay (AdamW).

    Decay shrinks each of a weight's K cores by the factor ``1 - lr * weight_decay``, hence the matrix, their product,
    by about ``1 - K * lr * weight_decay``. So a packed weight of K cores gets ``weight_decay / K``, dense matrices
    get ``weight_decay``, vectors (biases, norms) none. The usual rule "decay what has two dimensions" would miss
    packed weights, which are one-dimensional.

    Args:
        model: a model whose weights are packed already (after ``comera.tensorize`` or the first compiled call).
        weight_decay: decay meant for dense matrices.

    Raises:
        OptionError: the decay is negative, or no weight of the model is packed yet.
    """
    if not weight_decay >= 0:
        raise OptionError(f"weight_decay must be at least 0, got {weight_decay!r}")
    cores: dict[int, int] = {}
    for module in model.modules():
        for key, shape in tt_module.shapes_of(module).items():
            cores[id(module._parameters[key])] = len(shape.core_shapes)
    if not cores:
        raise OptionError(
            "param_groups expects a model with tensor-train weights, got one without: call comera.tensorize(model) "
            "first, so that it can tell cores from biases"
        )
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        count = cores.get(id(parameter))
        decay = weight_decay / count if count else weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault(decay, []).append(parameter)
    return [{"params": params, "weight_decay": decay} for decay, params in sorted(groups.items(), reverse=True)]

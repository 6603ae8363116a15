"""Which parameters can become tensor trains, in which format, and why others stay dense.

Decided by sizes, types and uses alone, never by timing, so that every process decides alike.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from comera_compile.tt.shape import Format
from comera_compile.weights.owners import Owner
from comera_compile.weights.tt_module import base_class

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ATTENTION_KEYS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class Eligibility:
    """Format of a weight that can be converted, or the reason why it cannot; not ``final`` if that may still change."""

    format: Format | None
    reason: str = ""
    zero_row: int = -1
    final: bool = True


def examine(parameter: nn.Parameter, owners: Sequence[Owner], use: str) -> Eligibility:
    """Whether and how a parameter can be converted.

    Args:
        parameter: a dense parameter.
        owners: every module that holds it.
        use: what a traced graph does with it: ``"linear"``, ``"embedding"``, the name of another operation, or ``""``
            if there is no graph to look at.
    """
    if parameter.device.type == "meta":
        return Eligibility(None, "on the meta device", final=False)
    reason = _unsuitable(parameter)
    if reason:
        return Eligibility(None, reason)
    roles = [_role(owner, parameter, use) for owner in owners]
    refused = next((role for role in roles if role.format is None), None)
    if refused is not None:
        return refused
    # A table that is also a head stays a table: its rows have to be looked up one by one.
    tables = [role for role in roles if role.format == "ttm"]
    return (tables or roles or [Eligibility(None, "no module holds it")])[0]


def _unsuitable(parameter: nn.Parameter) -> str:
    """Reasons that lie in the tensor itself."""
    if parameter.dim() != 2:
        return f"{parameter.dim()}-dimensional"
    if not parameter.requires_grad:
        return "frozen (requires_grad is False)"
    if parameter.layout != torch.strided:
        return f"sparse ({parameter.layout})"
    if parameter.is_complex():
        return "complex"
    if parameter.dtype not in _FLOATS:
        return f"dtype {parameter.dtype}"
    return ""


def _role(owner: Owner, parameter: nn.Parameter, use: str) -> Eligibility:
    """What one owner makes of the parameter."""
    module, kind = owner.module, base_class(owner.module)
    if isinstance(module, nn.Embedding) and owner.key == "weight":
        return _table_role(module, parameter)
    if isinstance(module, nn.Linear) and owner.key == "weight":
        return Eligibility("tt")
    if isinstance(module, nn.MultiheadAttention) and owner.key in _ATTENTION_KEYS:
        return Eligibility("tt")
    if _is_conv1d(kind) and owner.key == "weight":
        return Eligibility("tt")
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.Bilinear, nn.EmbeddingBag)):
        return Eligibility(None, f"{kind.__name__} is not rewritten")
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return Eligibility(None, f"held in a {kind.__name__}")
    if use == "linear":
        return Eligibility("tt")
    if use == "embedding":
        return Eligibility("ttm")
    if not use:
        reason = f"{kind.__name__}.{owner.key}: what it is used for is only seen when compiled"
        return Eligibility(None, reason, final=False)
    return Eligibility(None, f"used by {use}, not as a linear or embedding weight")


def _table_role(module: nn.Embedding, parameter: nn.Parameter) -> Eligibility:
    if module.max_norm is not None:
        return Eligibility(None, "embedding with max_norm")
    if module.scale_grad_by_freq:
        return Eligibility(None, "embedding with scale_grad_by_freq")
    if module.sparse:
        return Eligibility(None, "embedding with sparse gradients")
    if module.padding_idx is None:
        return Eligibility("ttm")
    row = module.padding_idx % module.num_embeddings
    if bool(parameter.detach()[row].count_nonzero()):
        return Eligibility(None, f"embedding whose padding row {row} is not zero")
    return Eligibility("ttm", zero_row=row)


def _is_conv1d(kind: type) -> bool:
    """transformers' Conv1D, a linear layer with its weight stored (in, out), if transformers has been imported."""
    module = sys.modules.get("transformers.pytorch_utils")
    return module is not None and issubclass(kind, module.Conv1D)

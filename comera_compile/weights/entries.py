"""One weight's part of a state dict: the packed vector and its layout, or a dense matrix that has to be converted."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch

from comera_compile.errors import ShapeError
from comera_compile.tt.encode import encode
from comera_compile.tt.shape import TTShape

LAYOUT_SUFFIX = "_tt"
_log = logging.getLogger("comera_compile")


@dataclass(frozen=True)
class LoadPolicy:
    """How a dense matrix from a checkpoint is put into cores: as ``init`` and ``max_error`` of ``comera.tensorize``."""

    init: Literal["auto", "svd"] = "auto"
    max_error: float = 1e-2


@dataclass(frozen=True)
class Entry:
    """What to load: the value and its shape, or None when it is to be kept dense."""

    value: torch.Tensor
    shape: TTShape | None


def take_entry(
    state: MutableMapping[str, torch.Tensor], name: str, shape: TTShape, parameter: torch.Tensor, policy: LoadPolicy
) -> Entry | None:
    """Read (and, for the layout, remove) the entry of one packed parameter.

    Args:
        state: state dict being loaded.
        name: full name of the parameter in it.
        shape: present shape of the parameter.
        parameter: the packed parameter, for dtype and device.
        policy: what to do with a dense matrix.

    Returns:
        None when the state dict has no such weight.

    Raises:
        ShapeError: the entry is neither this weight's dense matrix nor a packed vector whose layout is known.
    """
    layout = state.pop(name + LAYOUT_SUFFIX, None)
    value = state.get(name)
    if value is None:
        return None
    if layout is not None:
        stored = TTShape.from_tensor(layout)
        if (stored.rows, stored.cols) == (shape.rows, shape.cols) and value.shape == (stored.numel,):
            return Entry(value, stored)
    elif value.shape == (shape.numel,):
        return Entry(value, shape)
    elif value.shape == (shape.rows, shape.cols):
        return _from_dense(value, name, shape, parameter, policy)
    expected = f"a dense {shape.rows}x{shape.cols} matrix or a packed vector with its layout '{name}{LAYOUT_SUFFIX}'"
    raise ShapeError(f"{name}: expected {expected}, got {tuple(value.shape)}; load a checkpoint of the same model")


def _from_dense(
    value: torch.Tensor, name: str, shape: TTShape, parameter: torch.Tensor, policy: LoadPolicy
) -> Entry:
    dense = value.detach().to(parameter)
    encoded = encode(dense, shape, init=policy.init, max_error=policy.max_error, name=name)
    if encoded.packed is None:
        _log.warning("comera: %s was loaded dense and stays dense: %s", name, encoded.reason)
        return Entry(dense, None)
    return Entry(encoded.packed, encoded.shape)

"""One weight's part of a state dict: the packed vector and its layout, or a dense matrix that has to be converted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

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
    """What to load: the value, its shape (None: a dense matrix that is kept dense) and how it came about."""

    value: torch.Tensor
    shape: TTShape | None
    reason: str = "loaded from a checkpoint"


def find_entry(
    state: Mapping[str, Any], name: str, shape: TTShape | None, parameter: torch.Tensor, policy: LoadPolicy
) -> Entry | None:
    """The entry of one parameter, in the form in which the model is to have it.

    Args:
        state: state dict being loaded.
        name: full name of the parameter in it.
        shape: present shape of the parameter, None if it is dense.
        parameter: the parameter, for dense size, dtype and device.
        policy: what to do with a dense matrix for a packed parameter.

    Returns:
        None when there is nothing to convert: the state dict has no such weight, or has it dense and so has the model,
        or has a vector of the model's length without a layout, which a strict load reports as missing.

    Raises:
        ShapeError: the entry is neither this weight's dense matrix nor a packed vector whose layout is known.
    """
    value, layout = state.get(name), state.get(name + LAYOUT_SUFFIX)
    stored = TTShape.from_tensor(layout) if isinstance(value, torch.Tensor) and is_layout(layout) else None
    if value is None or (stored is None and shape is None):
        return None
    dense_size = tuple(parameter.shape) if shape is None else (shape.rows, shape.cols)
    if stored is not None:
        if (stored.rows, stored.cols) == dense_size and value.shape == (stored.numel,):
            return Entry(value, stored)
    elif shape is not None and value.shape == (shape.numel,):
        return None
    elif shape is not None and value.shape == dense_size:
        return _from_dense(value, name, shape, parameter, policy)
    raise ShapeError(_misfit(name, value, stored, dense_size))


def _misfit(name: str, value: torch.Tensor, stored: TTShape | None, dense_size: tuple[int, ...]) -> str:
    """What of an entry does not fit: the weight, or the two halves of the entry each other."""
    layout = f"{name}{LAYOUT_SUFFIX}"
    if stored is not None and value.shape != (stored.numel,):
        if tuple(value.shape) == dense_size:
            what = f"a dense matrix of {_times(value.shape)}"
            remedy = f"drop '{layout}' from the state dict to load the matrix, or put the packed vector in its place"
        else:
            what, remedy = f"a tensor of shape {tuple(value.shape)}", "take both entries from one checkpoint"
        return (
            f"{name}: the state dict holds {what}, but beside it '{layout}' describes a packed vector of "
            f"{stored.numel:,} elements (a tensor train of {stored.rows}x{stored.cols}): {remedy}"
        )
    got = "a tensor train of " + (f"{stored.rows}x{stored.cols}" if stored else "an unknown layout")
    return (
        f"{name}: expected a matrix of {_times(dense_size)}, dense or packed with its layout '{layout}', "
        f"got {got if value.dim() == 1 else f'{tuple(value.shape)}'}: load a checkpoint of the same model"
    )


def _times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def is_layout(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a state dict's value can be a layout: a user's own entry may end in the same suffix."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 1


def _from_dense(value: torch.Tensor, name: str, shape: TTShape, parameter: torch.Tensor, policy: LoadPolicy) -> Entry:
    dense = value.detach().to(parameter)
    encoded = encode(dense, shape, init=policy.init, max_error=policy.max_error, name=name, trained="loaded")
    if encoded.packed is None:
        _log.warning("comera: %s was loaded dense and stays dense: %s", name, encoded.reason)
        return Entry(dense, None, _loaded(encoded.reason))
    return Entry(encoded.packed, encoded.shape, _loaded(encoded.reason))


def _loaded(reason: str) -> str:
    return f"loaded dense: {reason.removeprefix('loaded: ')}"

"""Checkpoints across forms: packed ones into models that are still dense, dense ones out of packed models.

A model that was compiled but not yet called is still dense, so loading a packed checkpoint must convert it first.
Nothing but ``load_state_dict`` itself sees that moment, hence it is wrapped: state dicts without a packed layout pass
straight through.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from comera_compile.tt.packing import to_dense
from comera_compile.tt.shape import TTShape
from comera_compile.weights.entries import LAYOUT_SUFFIX, LoadPolicy
from comera_compile.weights.owners import live_modules, owners_of
from comera_compile.weights.placement import check_movable, place_packed
from comera_compile.weights.tt_module import shapes_of

_WRAPPER_PREFIX = "_orig_mod."
State = Mapping[str, torch.Tensor]


def layouts_in(state_dict: State) -> dict[str, TTShape]:
    """Shape of every packed weight in a state dict, by the weight's own name."""
    names = [k.removesuffix(LAYOUT_SUFFIX) for k in state_dict if k.endswith(LAYOUT_SUFFIX)]
    packed = [n for n in names if n in state_dict and state_dict[n].dim() == 1]
    return {n: TTShape.from_tensor(state_dict[n + LAYOUT_SUFFIX]) for n in packed}


def dense_state_dict(source: nn.Module | State) -> dict[str, torch.Tensor]:
    """A state dict in which every packed weight is its dense matrix and no layout is left, for plain PyTorch.

    Args:
        source: a model, or a state dict saved from one.
    """
    state = source.state_dict() if isinstance(source, nn.Module) else source
    layouts = layouts_in(state)
    skipped = {name + LAYOUT_SUFFIX for name in layouts}
    return {
        name: to_dense(value.detach(), layouts[name]) if name in layouts else value
        for name, value in state.items()
        if name not in skipped
    }


def adopt_layouts(model: nn.Module, state_dict: State) -> list[str]:
    """Give dense weights of ``model`` the packed form that ``state_dict`` has for them, values included.

    Returns:
        Names of the converted weights. Entries that do not fit the model are left for ``load_state_dict`` to report.

    Raises:
        PlacementError: a weight must not change shape now.
    """
    targets = {name: (p, shape) for name, shape in layouts_in(state_dict).items() if (p := _dense(model, name, shape))}
    if not targets:
        return []
    modules = live_modules()
    check_movable([(name, p) for name, (p, _) in targets.items()], modules)
    owners = owners_of([p for p, _ in targets.values()], modules)
    for name, (parameter, shape) in targets.items():
        if parameter.dim() == 2:  # tied weights are listed once an owner
            value = state_dict[name].detach().to(parameter)
            place_packed(parameter, owners[id(parameter)], value, shape, LoadPolicy())
    return list(targets)


def accept_packed_checkpoints() -> None:
    """Wrap ``nn.Module.load_state_dict`` once, so that packed checkpoints also load into models not yet packed."""
    original = nn.Module.load_state_dict
    if hasattr(original, "_comera_wrapped"):
        return

    @functools.wraps(original)
    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if layouts_in(state_dict):
            state_dict = _with_prefix_of(self, state_dict)
            adopt_layouts(self, state_dict)
        return original(self, state_dict, *args, **kwargs)

    load_state_dict._comera_wrapped = original  # type: ignore[attr-defined]
    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _dense(model: nn.Module, name: str, shape: TTShape) -> nn.Parameter | None:
    """The parameter of that name if it is still the dense matrix of ``shape``."""
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    parameter = module._parameters.get(key)
    if parameter is None or key in shapes_of(module) or parameter.shape != (shape.rows, shape.cols):
        return None
    return parameter


def _with_prefix_of(model: nn.Module, state_dict: State) -> dict[str, torch.Tensor]:
    """Keys with or without the prefix that torch.compile's wrapper adds, whichever this model has."""
    prefix = _WRAPPER_PREFIX if "_orig_mod" in model._modules else ""
    return {prefix + name.removeprefix(_WRAPPER_PREFIX): value for name, value in state_dict.items()}

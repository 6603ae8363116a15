"""A module whose parameter is a packed tensor-train weight: same Parameter object, swapped class, dense meaning kept.

``install`` swaps the module's class for a subclass in which the parameter's name is a property. Reading
``module.weight`` gives the dense matrix (in a compiled graph the marker op, which the passes replace), while
``module._parameters`` holds the packed vector, which is what optimizers and ``state_dict`` see. The subclass is
cached, so equal modules share a type and Dynamo's type guards hold; the layout is per instance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from comera_compile.tt.marker import decode, tt_weight
from comera_compile.tt.shape import TTShape
from comera_compile.weights.dense_view import DenseView, dense_view
from comera_compile.weights.entries import LAYOUT_SUFFIX, LoadPolicy

_LAYOUTS = "_comera_layouts"
_POLICIES = "_comera_policies"
_classes: dict[tuple[type, tuple[str, ...]], type] = {}


def install(module: nn.Module, key: str, shape: TTShape, policy: LoadPolicy | None = None) -> None:
    """Make ``module.<key>`` mean the dense matrix of its packed parameter. Idempotent; replaces an earlier layout."""
    layouts = module.__dict__.get(_LAYOUTS, {}) | {key: shape.encode()}
    module.__dict__[_LAYOUTS] = layouts
    if policy is not None:
        module.__dict__[_POLICIES] = module.__dict__.get(_POLICIES, {}) | {key: policy}
    _swap_class(module, tuple(sorted(layouts)))


def remove(module: nn.Module, key: str) -> None:
    """Undo ``install`` for one parameter; the caller has made the parameter dense again."""
    layouts = {k: v for k, v in module.__dict__.get(_LAYOUTS, {}).items() if k != key}
    if layouts:
        module.__dict__[_LAYOUTS] = layouts
    else:
        module.__dict__.pop(_LAYOUTS, None)
        module.__dict__.pop(_POLICIES, None)
    _swap_class(module, tuple(sorted(layouts)))


def shapes_of(module: nn.Module) -> dict[str, TTShape]:
    """Shape of every packed parameter that this module itself holds."""
    layouts: Mapping[str, str] = module.__dict__.get(_LAYOUTS, {})
    shapes = {key: decode(text) for key, text in layouts.items()}
    return {key: shape for key, shape in shapes.items() if _is_packed(module._parameters.get(key), shape)}


def policy_of(module: nn.Module, key: str) -> LoadPolicy:
    """How a dense matrix that is loaded into this packed parameter is put into cores."""
    policy: LoadPolicy = module.__dict__.get(_POLICIES, {}).get(key, LoadPolicy())
    return policy


def base_class(module: nn.Module) -> type:
    """The class the module had before any parameter of it was packed."""
    base: type = getattr(type(module), "_comera_base", type(module))
    return base


def _is_packed(parameter: torch.Tensor | None, shape: TTShape) -> bool:
    return parameter is not None and parameter.dim() == 1 and parameter.shape[0] == shape.numel


def _swap_class(module: nn.Module, keys: tuple[str, ...]) -> None:
    base = base_class(module)
    if not keys:
        module.__class__ = base
        return
    if (base, keys) not in _classes:
        _classes[base, keys] = _make_class(base, keys)
    module.__class__ = _classes[base, keys]


def _make_class(base: type, keys: tuple[str, ...]) -> type:
    members: dict[str, Any] = {key: _weight_property(key) for key in keys}
    members |= {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "_comera_base": base,
        "_comera_keys": keys,
        "__reduce_ex__": _reduce,
        "register_parameter": _register_parameter,
        "_save_to_state_dict": _save_to_state_dict,
        "_load_from_state_dict": _load_from_state_dict,
    }
    return type(f"TT{base.__name__}", (base,), members)


def _weight_property(key: str) -> property:
    def dense_weight(self: nn.Module) -> torch.Tensor | None:
        if key not in self._parameters:  # deleted, perhaps to put a computed tensor in its place (weight_norm)
            if key not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {key!r}")
            replaced: torch.Tensor = self.__dict__[key]
            return replaced
        packed = self._parameters[key]
        # Somebody registered another parameter under this name, or FSDP asks for its shard.
        if packed is None or packed.dim() != 1 or isinstance(packed, DTensor):
            return packed
        layouts: Any = self._comera_layouts
        if torch.compiler.is_compiling():
            traced: torch.Tensor = tt_weight(packed, layouts[key])
            return traced
        return dense_view(packed, layouts[key])

    def keep_replaced(self: nn.Module, value: torch.Tensor) -> None:
        self.__dict__[key] = value  # nn.Module has dealt with parameters, buffers and modules before it comes here

    return property(dense_weight, keep_replaced, doc="The dense matrix of the packed parameter of this name.")


def _register_parameter(self: nn.Module, name: str, param: torch.Tensor | None) -> None:
    """Tying anew, ``head.weight = embed.weight``, gives both the packed parameter that the dense matrix stands for."""
    link = param._link if isinstance(param, DenseView) and name in type(self)._comera_keys else None  # type: ignore[attr-defined]
    base_class(self).register_parameter(self, name, param if link is None else link.packed)  # type: ignore[attr-defined]
    if link is not None:
        install(self, name, decode(link.layout))


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle and deepcopy by the original class, which can be imported; the swap is redone on loading."""
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return rebuild_module, (base_class(self), self._comera_keys), state


def rebuild_module(base: type, keys: tuple[str, ...]) -> nn.Module:
    """An empty module of the swapped class: what pickle calls before it restores the state."""
    module: nn.Module = object.__new__(base)
    object.__setattr__(module, "__class__", _classes.setdefault((base, keys), _make_class(base, keys)))
    return module


def _save_to_state_dict(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    base_class(self)._save_to_state_dict(self, destination, prefix, keep_vars)  # type: ignore[attr-defined]
    for key, shape in shapes_of(self).items():
        destination[prefix + key + LAYOUT_SUFFIX] = shape.to_tensor()


def _load_from_state_dict(
    self: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """``load_state_dict`` has brought model and state dict into one form (see ``checkpoint``); others may not have."""
    for key, shape in shapes_of(self).items():
        name = prefix + key
        layout, value = state_dict.pop(name + LAYOUT_SUFFIX, None), state_dict.get(name)
        if value is None:
            continue
        if layout is None and strict:
            missing.append(name + LAYOUT_SUFFIX)
        if value.shape != (shape.numel,) or (layout is not None and TTShape.from_tensor(layout) != shape):
            errors.append(f"{name}: not in the form '{shape.encode()}' of the model: call model.load_state_dict")
            state_dict[name] = self._parameters[key]
    load = base_class(self)._load_from_state_dict  # type: ignore[attr-defined]
    load(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

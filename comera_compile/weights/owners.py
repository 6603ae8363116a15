"""Who holds a Parameter: every live module with it among its own parameters, wherever it is.

A weight may be tied to a module outside the compiled one. All of them must learn that it is packed now, so they are
looked up among all live objects rather than under the compiled root.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

# What torch.compile's wrapper puts into the names of everything below it.
_WRAPPER = "_orig_mod"


@dataclass(frozen=True)
class Owner:
    """A module and the name under which it holds the parameter."""

    module: nn.Module
    key: str


def live_modules() -> list[nn.Module]:
    """Every nn.Module alive in this process."""
    # type() instead of isinstance(): some objects answer __class__ with arbitrary code.
    return [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and "_parameters" in o.__dict__]


def owners_of(parameters: Iterable[torch.Tensor], modules: Iterable[nn.Module]) -> dict[int, list[Owner]]:
    """Owners of each parameter by ``id(parameter)``, in the order of ``modules``."""
    wanted = {id(p) for p in parameters}
    found: dict[int, list[Owner]] = {key: [] for key in wanted}
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in wanted:
                found[id(parameter)].append(Owner(module, key))
    return found


def is_matrix(parameter: torch.Tensor | None) -> bool:
    """Whether a parameter has two dimensions or more; those of lazy modules do not say before their first forward."""
    return parameter is not None and not isinstance(parameter, UninitializedParameter) and parameter.dim() > 1


def plain_name(name: str) -> str:
    """A dotted name without the parts that torch.compile's wrapper adds, at the top or around a submodule."""
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


def qualified_names(roots: Iterable[nn.Module]) -> dict[int, str]:
    """Dotted name of each module below the roots by ``id(module)``, in their order; a root's own name is empty."""
    names: dict[int, str] = {}
    for root in roots:
        for name, module in root.named_modules():
            names.setdefault(id(module), plain_name(name))
    return names


def outer_modules(modules: Iterable[nn.Module], roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Live modules outside the roots, those with most parts first: for names of owners that lie outside."""
    inside = {id(m) for root in roots for m in root.modules()}
    outside = [m for m in modules if id(m) not in inside and m._modules]
    return sorted(outside, key=lambda m: -len(list(m.modules())))


def in_named_order(modules: Sequence[nn.Module], names: dict[int, str]) -> list[nn.Module]:
    """Modules in the order of ``names``, then the others: a tied weight bears its first name, whoever was made when."""
    position = {key: k for k, key in enumerate(names)}
    return sorted(modules, key=lambda m: position.get(id(m), len(position)))


def owner_name(owner: Owner, names: dict[int, str]) -> str:
    """Dotted name of a parameter, or its class name where the module lies outside the roots."""
    prefix = names.get(id(owner.module), type(owner.module).__name__)
    return f"{prefix}.{owner.key}" if prefix else owner.key

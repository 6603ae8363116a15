"""Put packed data into a Parameter and back, in place: the object stays the same, its owners learn what it means."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from comera_compile import torch_private
from comera_compile.errors import PlacementError
from comera_compile.tt.shape import TTShape
from comera_compile.weights import tt_module
from comera_compile.weights.entries import LoadPolicy
from comera_compile.weights.owners import Owner
from comera_compile.weights.replace_data import replace_data

_WRAPPERS = ("DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel")


def check_movable(named: Iterable[tuple[str, torch.Tensor]], modules: Iterable[nn.Module]) -> None:
    """Refuse to convert parameters that something else already relies on in their dense form.

    Args:
        named: parameters about to change shape, with their names.
        modules: modules that may wrap them (all live ones).

    Raises:
        PlacementError: a live autograd graph uses one, or DDP or FSDP has wrapped the model.
    """
    named = list(named)
    identities = {id(p): name for name, p in named}
    for module in modules:
        wrapper = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None)
        held = wrapper and next((identities[id(p)] for p in module.parameters() if id(p) in identities), None)
        if held:
            raise PlacementError(
                f"{held} is already wrapped by {wrapper}, which has recorded its dense shape: call "
                "comera.tensorize(model) before wrapping the model, then compile"
            )
    for name, parameter in named:
        check_whole(name, parameter)
        if _held(parameter):
            raise PlacementError(
                f"{name} is part of an autograd graph that is still alive (a loss or output of an earlier step that is "
                "still referenced, or a wrapper such as DDP): expected none while the weight changes shape. Delete "
                "that loss or output (del loss, output; a backward alone does not free them) and call again, or "
                "convert the model before its first forward (comera.tensorize)"
            )


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 manages parameters of the module or of a part of it."""
    return any(c.__name__ == "FSDPModule" for part in module.modules() for c in type(part).__mro__)


def check_whole(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter of which this process holds a shard only.

    Raises:
        PlacementError: FSDP2 or tensor parallelism has sharded it.
    """
    if isinstance(parameter, DTensor):
        raise PlacementError(f"{name} is already sharded (DTensor): call comera.tensorize(model) before sharding")


def _held(parameter: torch.Tensor) -> bool:
    """Whether a graph uses it: one that nobody can reach any more, in a cycle of references, does not count."""
    if not torch_private.has_live_graph(parameter):
        return False
    gc.collect()
    return torch_private.has_live_graph(parameter)


def place_packed(
    parameter: nn.Parameter, owners: Sequence[Owner], packed: torch.Tensor, shape: TTShape, policy: LoadPolicy
) -> None:
    """Make a parameter a packed one in place and tell every owner. Frees the storage it had, if the size differs."""
    if parameter.shape == packed.shape:  # another layout of equal length: whoever holds on to the storage may do so
        with torch.no_grad():
            parameter.copy_(packed)
    else:
        replace_data(parameter, packed)
    for owner in owners:
        tt_module.install(owner.module, owner.key, shape, policy)


def place_dense(parameter: nn.Parameter, owners: Sequence[Owner], dense: torch.Tensor) -> None:
    """Inverse of ``place_packed``."""
    replace_data(parameter, dense)
    for owner in owners:
        tt_module.remove(owner.module, owner.key)

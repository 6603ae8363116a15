"""Put packed data into a Parameter and back, in place: the object stays the same, its owners learn what it means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from comera_compile import torch_private
from comera_compile.errors import PlacementError
from comera_compile.tt.shape import TTShape
from comera_compile.weights import optimizer_state, tt_module
from comera_compile.weights.entries import LoadPolicy
from comera_compile.weights.owners import Owner

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
        if isinstance(parameter, DTensor):
            raise PlacementError(f"{name} is already sharded (DTensor): call comera.tensorize(model) before sharding")
        if torch_private.has_live_graph(parameter):
            raise PlacementError(
                f"{name} is part of an autograd graph that is still alive (an eager loss or output computed before the "
                "first compiled call, or a wrapper such as DDP): expected none while the weight changes shape. "
                "Delete that loss or run its backward first, or call comera.tensorize(model) before the first forward"
            )


def place_packed(
    parameter: nn.Parameter, owners: Sequence[Owner], packed: torch.Tensor, shape: TTShape, policy: LoadPolicy
) -> None:
    """Make a parameter a packed one in place and tell every owner. Frees the storage it had."""
    _replace_data(parameter, packed)
    for owner in owners:
        tt_module.install(owner.module, owner.key, shape, policy)


def place_dense(parameter: nn.Parameter, owners: Sequence[Owner], dense: torch.Tensor) -> None:
    """Inverse of ``place_packed``."""
    _replace_data(parameter, dense)
    for owner in owners:
        tt_module.remove(owner.module, owner.key)


def _replace_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    optimizer_state.watch(parameter, parameter.shape)
    # The first call may run under inference_mode; its tensors could never be trained.
    with torch.inference_mode(False), torch.no_grad():
        parameter.grad = None
        parameter.data = data.detach().clone(memory_format=torch.contiguous_format)

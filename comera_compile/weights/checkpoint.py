"""Checkpoints across forms: packed ones into models that are still dense, dense ones out of packed models.

A model that was compiled but not yet called is still dense, so loading a packed checkpoint must convert it first.
Nothing but ``load_state_dict`` itself sees that moment, hence it is wrapped: state dicts without a packed layout pass
straight through, unless the model has packed weights itself.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from comera_compile import ledger
from comera_compile.errors import OptionError, ShapeError
from comera_compile.ledger import Decision
from comera_compile.memory_policy import return_freed_memory
from comera_compile.tt.packing import to_dense
from comera_compile.tt.shape import TTShape
from comera_compile.weights import tt_module
from comera_compile.weights.copies import averages_of
from comera_compile.weights.entries import LAYOUT_SUFFIX, Entry, LoadPolicy, find_entry, is_layout
from comera_compile.weights.owners import is_matrix, live_modules, owners_of, plain_name
from comera_compile.weights.placement import check_movable, place_dense, place_packed

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Move:
    """A weight that a state dict has in another form than the model."""

    name: str
    parameter: nn.Parameter
    entry: Entry
    policy: LoadPolicy


def layouts_in(state_dict: Mapping[str, Any]) -> dict[str, TTShape]:
    """Shape of every packed weight in a state dict, by the weight's own name."""
    names = [k.removesuffix(LAYOUT_SUFFIX) for k, v in state_dict.items() if k.endswith(LAYOUT_SUFFIX) and is_layout(v)]
    packed = [n for n in names if isinstance(state_dict.get(n), torch.Tensor) and state_dict[n].dim() == 1]
    return {n: TTShape.from_tensor(state_dict[n + LAYOUT_SUFFIX]) for n in packed}


def dense_state_dict(source: nn.Module | State) -> dict[str, torch.Tensor]:
    """A state dict in which every packed weight is its dense matrix and no layout is left, for plain PyTorch.

    Names are those of the model without torch.compile's wrapper. Tied weights share one tensor, as in the model.

    Args:
        source: a model, or a state dict saved from one.
    """
    state = source.state_dict() if isinstance(source, nn.Module) else source
    layouts = layouts_in(state)
    made: dict[tuple[int, TTShape], torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name in layouts:
            same = value.data_ptr(), layouts[name]
            if same not in made:
                made[same] = to_dense(value.detach(), layouts[name])
            dense[plain_name(name)] = made[same]
        elif name.removesuffix(LAYOUT_SUFFIX) not in layouts:
            dense[plain_name(name)] = value
    return dense


def adopt_layouts(model: nn.Module, state_dict: State, *, complete: bool = False) -> dict[str, torch.Tensor]:
    """Bring weights of ``model`` into the form that ``state_dict`` has for them, and what is dense in it into theirs.

    Args:
        model: packed or not.
        state_dict: packed or not, with or without the prefix of torch.compile's wrapper.
        complete: refuse a state dict without packed weights, or with one that the model does not have.

    Returns:
        The state dict for ``load_state_dict``: names and forms of the model. Weights whose form changed hold their
        value already.

    Raises:
        ShapeError: a weight of the state dict has another size than the model's.
        PlacementError: a weight must not change its form now.
    """
    state = _with_names_of(model, state_dict)
    if complete:
        _check_complete(model, state)
    moves: dict[int, _Move] = {}
    for name, module, key in _named_weights(model):
        shape, parameter, policy = tt_module.shapes_of(module).get(key), module._parameters[key], LoadPolicy()
        assert parameter is not None
        if shape is not None:
            policy = tt_module.policy_of(module, key)
        entry = find_entry(state, name, shape, parameter, policy)
        if entry is None:
            continue
        _put(state, name, entry)
        if entry.shape != shape:
            moves.setdefault(id(parameter), _Move(name, parameter, entry, policy))
    _move(list(moves.values()))
    return state


def accept_packed_checkpoints() -> None:
    """Wrap ``nn.Module.load_state_dict`` once, so that checkpoints load whatever form they and the model have."""
    original = nn.Module.load_state_dict
    if hasattr(original, "_comera_wrapped"):
        return

    @functools.wraps(original)
    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state_dict, Mapping):  # anything else is for torch to refuse
            if layouts_in(state_dict) or any(tt_module.shapes_of(m) for m in self.modules()):
                state_dict = adopt_layouts(self, state_dict)
        return original(self, state_dict, *args, **kwargs)

    load_state_dict._comera_wrapped = original  # type: ignore[attr-defined]
    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and key of every matrix or packed weight; shared modules and tied weights under each name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        packed = tt_module.shapes_of(module)
        for key, parameter in module._parameters.items():
            if key in packed or is_matrix(parameter):
                yield f"{prefix}.{key}" if prefix else key, module, key


def _put(state: dict[str, torch.Tensor], name: str, entry: Entry) -> None:
    state[name] = entry.value
    state.pop(name + LAYOUT_SUFFIX, None)
    if entry.shape is not None:
        state[name + LAYOUT_SUFFIX] = entry.shape.to_tensor()


def _move(moves: Sequence[_Move]) -> None:
    """Change the form of weights, and of averages of them that have not averaged anything yet."""
    if not moves:
        return
    modules = live_modules()
    fresh = [m for m in modules if isinstance(m, AveragedModel) and not int(m.n_averaged)]
    targets, seen = [move.parameter for move in moves], {id(move.parameter) for move in moves}
    copies = [(k, copy) for average in fresh for k, copy in averages_of(targets, average, modules, seen)]
    moving = [*moves, *(replace(moves[k], parameter=copy) for k, copy in copies)]
    reshaped = [move for move in moving if move.entry.value.shape != move.parameter.shape]
    check_movable([(move.name, move.parameter) for move in reshaped], modules)
    owners = owners_of([move.parameter for move in moving], modules)
    for move in moving:
        value, shape = move.entry.value.detach().to(move.parameter), move.entry.shape
        numel = value.numel() if shape is None else shape.dense_numel
        if shape is None:
            place_dense(move.parameter, owners[id(move.parameter)], value)
        else:
            place_packed(move.parameter, owners[id(move.parameter)], value, shape, move.policy)
        ledger.record(move.parameter, Decision(plain_name(move.name), shape, move.entry.reason, numel))
    return_freed_memory()


def _check_complete(model: nn.Module, state: State) -> None:
    layouts = layouts_in(state)
    if not layouts:
        raise OptionError("state_dict holds no packed weight: expected one saved from a tensorized model")
    known = {name for name, _, _ in _named_weights(model)}
    unknown = [name for name in layouts if name not in known]
    if unknown:
        raise ShapeError(
            f"state_dict holds packed weights that the model does not have: {', '.join(unknown[:3])}; "
            f"the model has {', '.join(sorted(known)[:3])}: load a checkpoint of the same model"
        )


def _with_names_of(model: nn.Module, state_dict: State) -> dict[str, torch.Tensor]:
    """The entries under the model's names: with torch.compile's prefix where the model has it, without elsewhere."""
    # Below a wrapper the same plain name stands for the wrapper and for what it wraps; the latter comes later.
    own: dict[str, str] = {plain_name(prefix): prefix for prefix, _ in model.named_modules(remove_duplicate=False)}

    def renamed(path: str) -> str:
        return own.get(plain_name(path), path)

    state: dict[str, Any] = OrderedDict()
    for name, value in state_dict.items():
        path, _, leaf = name.rpartition(".")
        state[f"{renamed(path)}.{leaf}" if renamed(path) else leaf] = value
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        state._metadata = OrderedDict((renamed(path), about) for path, about in metadata.items())  # type: ignore[attr-defined]
    return state

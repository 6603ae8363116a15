"""Convert a model's weights to tensor trains in place, and back: the one call behind the backend's first forward."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from comera_compile import ledger, torch_private
from comera_compile.decide import Choice, Found, decide
from comera_compile.errors import OptionError
from comera_compile.ledger import Decision
from comera_compile.memory_policy import return_freed_memory
from comera_compile.options import Options
from comera_compile.tt.packing import to_dense
from comera_compile.tt.shape import TTShape
from comera_compile.weights import tt_module
from comera_compile.weights.checkpoint import adopt_layouts
from comera_compile.weights.copies import copies_of, follow
from comera_compile.weights.optimizer_state import steps_taken
from comera_compile.weights.owners import (
    Owner,
    in_named_order,
    is_matrix,
    live_modules,
    outer_modules,
    owner_name,
    owners_of,
    qualified_names,
)
from comera_compile.weights.placement import check_movable, place_dense, place_packed

_log = logging.getLogger("comera_compile")


def tensorize(model: nn.Module, *, state_dict: Mapping[str, torch.Tensor] | None = None, **options: Any) -> nn.Module:
    """Convert the model's eligible weights to tensor trains, in place, in the same Parameter objects.

    Args:
        model: any module; it is changed and returned.
        state_dict: take which weights to convert, their modes, ranks and values from this checkpoint.
        options: as for the backend (``comera_compile.options.Options``).

    Raises:
        OptionError: unknown option, impossible value, or a pattern that matches no weight.
        ShapeError: modes, order or rank do not fit a weight they were given for.
        WeightError: a weight holds NaN or inf.
        PlacementError: the model is wrapped already, or an eager autograd graph of it is alive.

    A refused call leaves the model as it was.
    """
    torch_private.check_version()
    settings = Options.parse(options)
    if not isinstance(model, nn.Module):
        raise OptionError(f"tensorize expects an nn.Module, got {type(model).__name__}")
    if state_dict is not None:
        if options:
            raise OptionError(
                f"state_dict decides modes, ranks and values; got {', '.join(options)} as well: leave it out"
            )
        adopt_layouts(model, state_dict, complete=True)
        return model
    convert([Found(p) for p in model.parameters()], settings, [model], reconsider=True)
    return model


def densify(model: nn.Module) -> nn.Module:
    """Turn every tensor-train weight below ``model`` back into its dense matrix, in place. Optimizer state is dropped.

    Nothing is remembered about the weights: the next call of a model compiled with this backend converts them again.
    To go on dense, call the module itself, or compile it with another backend.

    Raises:
        PlacementError: an eager autograd graph of a weight is alive.
    """
    held = [Owner(m, key) for m in model.modules() for key in tt_module.shapes_of(m)]
    parameters: dict[int, nn.Parameter] = {}
    shapes: dict[int, TTShape] = {}
    for owner in held:
        parameter = owner.module._parameters[owner.key]
        assert parameter is not None
        parameters[id(parameter)] = parameter
        shapes[id(parameter)] = tt_module.shapes_of(owner.module)[owner.key]
    modules = live_modules()
    names = qualified_names([model])
    owners = owners_of(parameters.values(), modules)
    check_movable([(owner_name(owners[k][0], names), p) for k, p in parameters.items()], modules)
    for key, parameter in parameters.items():
        place_dense(parameter, owners[key], to_dense(parameter.detach(), shapes[key]))
        ledger.forget(parameter)
    return model


def convert(
    found: Sequence[Found],
    options: Options,
    roots: Sequence[nn.Module],
    *,
    reconsider: bool = False,
    with_copies: bool = True,
) -> list[Decision]:
    """Decide on every found parameter, then convert those that were chosen: all of them or, on an error, none.

    Args:
        found: dense parameters; those decided on earlier are passed over.
        options: settings.
        roots: modules whose dotted names are used.
        reconsider: decide anew on weights that an earlier decision left dense.
        with_copies: convert averaged and frozen equal copies of the weights along with them.

    Returns:
        The new decisions.
    """
    names = qualified_names(roots)
    options.check_patterns(_weight_names(roots, names))
    # A packed parameter has one dimension; so do biases and norms, which are never converted.
    fresh = [f for f in found if is_matrix(f.parameter) and (reconsider or not ledger.is_settled(f.parameter))]
    if not fresh:
        return []
    modules = in_named_order(live_modules(), names)
    owners = owners_of([f.parameter for f in fresh], modules)
    outer = qualified_names([*roots, *outer_modules(modules, roots)])
    steps = steps_taken([f.parameter for f in fresh])
    known = [(f, owners[id(f.parameter)], steps.get(id(f.parameter), 0)) for f in fresh]
    chosen = [decide(f, held, _names_of(held, names, outer), options, count) for f, held, count in known]
    moving = [c for c in chosen if c.packed is not None]
    copies = copies_of([c.parameter for c in moving], modules) if with_copies else ()
    followers = [_follow(moving[k], copy, modules) for k, copy in copies]
    check_movable([(c.decision.name, c.parameter) for c in (*moving, *followers)], modules)
    for choice in (*moving, *followers):
        assert choice.packed is not None and choice.decision.shape is not None
        place_packed(choice.parameter, choice.owners, choice.packed, choice.decision.shape, choice.policy)
    for choice in (*chosen, *followers):
        ledger.record(choice.parameter, choice.decision)
    if moving:
        return_freed_memory()
    if followers:
        _log.info("comera: %d averaged or frozen equal copies were converted with them", len(followers))
    return [c.decision for c in chosen]


def summary(decisions: Sequence[Decision]) -> str:
    """One line: how many weights were converted, parameters before and after."""
    converted = [d for d in decisions if d.shape is not None]
    before, after = sum(d.dense_numel for d in decisions), sum(d.numel for d in decisions)
    ratio = f" ({before / after:.1f}x fewer)" if after and converted else ""
    return (
        f"comera: {len(converted)} of {len(decisions)} matrices became tensor trains: "
        f"{before:,} parameters before, {after:,} after{ratio}"
    )


def _follow(choice: Choice, copy: nn.Parameter, modules: Sequence[nn.Module]) -> Choice:
    """The choice for a copy of a chosen weight."""
    shape, error = choice.decision.shape, choice.decision.error
    assert shape is not None and choice.packed is not None
    packed = follow(
        copy,
        choice.parameter,
        choice.packed,
        shape,
        drawn=error is None,
        max_error=max(choice.policy.max_error, 2 * (error or 0.0)),
        name=choice.decision.name,
    )
    return Choice(copy, owners_of([copy], modules)[id(copy)], choice.decision, packed, choice.policy)


def _names_of(owners: Sequence[Owner], names: dict[int, str], outer: dict[int, str]) -> list[str]:
    """Every name that a weight has below the roots, else one from outside."""
    inside = [owner_name(owner, names) for owner in owners if id(owner.module) in names]
    return inside or [owner_name(owner, outer) for owner in owners[:1]] or ["(no module)"]


def _weight_names(roots: Sequence[nn.Module], names: dict[int, str]) -> list[str]:
    """Dotted names of every matrix below the roots."""
    return [
        owner_name(Owner(module, key), names)
        for root in roots
        for module in root.modules()
        for key, parameter in module._parameters.items()
        if is_matrix(parameter) or key in tt_module.shapes_of(module)
    ]

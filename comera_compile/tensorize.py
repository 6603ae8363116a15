"""Convert a model's weights to tensor trains in place, and back: the one call behind the backend's first forward."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from comera_compile import ledger, torch_private
from comera_compile.eligibility import Eligibility, examine
from comera_compile.errors import OptionError, ShapeError, WeightError
from comera_compile.ledger import Decision
from comera_compile.options import Options
from comera_compile.tt.encode import Encoded, encode
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.packing import to_dense
from comera_compile.tt.shape import TTShape
from comera_compile.weights import tt_module
from comera_compile.weights.checkpoint import adopt_layouts
from comera_compile.weights.copies import copies_of
from comera_compile.weights.entries import LoadPolicy
from comera_compile.weights.owners import Owner, live_modules, owner_name, owners_of, qualified_names
from comera_compile.weights.placement import check_movable, place_dense, place_packed

_log = logging.getLogger("comera_compile")


@dataclass(frozen=True)
class Found:
    """A dense parameter to look at: what a traced graph uses it for, or ``""`` without a graph."""

    parameter: nn.Parameter
    use: str = ""


@dataclass(frozen=True)
class _Chosen:
    """A decided weight, ready to be put in place."""

    parameter: nn.Parameter
    owners: Sequence[Owner]
    decision: Decision
    packed: torch.Tensor | None
    policy: LoadPolicy


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
        names = adopt_layouts(model, state_dict)
        if not names:
            raise OptionError("state_dict holds no packed weight of this model; save one from a tensorized model")
        return model
    convert([Found(p) for p in model.parameters()], settings, [model])
    return model


def densify(model: nn.Module) -> nn.Module:
    """Turn every tensor-train weight below ``model`` back into its dense matrix, in place. Optimizer state is dropped.

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


def convert(found: Sequence[Found], options: Options, roots: Sequence[nn.Module]) -> list[Decision]:
    """Decide on every found parameter, then convert those that were chosen: all of them or, on an error, none.

    Args:
        found: dense parameters; those decided on earlier are passed over.
        options: settings.
        roots: modules whose dotted names are used.

    Returns:
        The new decisions.
    """
    modules = live_modules()
    names = qualified_names([*roots, *_outer(modules, roots)])
    options.check_patterns(_weight_names(roots, names))
    # A packed parameter has one dimension; so do biases and norms, which are never converted.
    fresh = [f for f in found if f.parameter.dim() > 1 and ledger.recall(f.parameter) is None]
    owners = owners_of([f.parameter for f in fresh], modules)
    chosen = [_decide(f, owners[id(f.parameter)], options, names) for f in fresh]
    moving = [c for c in chosen if c.packed is not None]
    copies = list(copies_of([(c.decision.name, c.parameter) for c in moving], modules))
    followers = [_follow(moving[k], copy, modules) for k, copy in copies]
    check_movable([(c.decision.name, c.parameter) for c in (*moving, *followers)], modules)
    for choice in (*moving, *followers):
        assert choice.packed is not None and choice.decision.shape is not None
        place_packed(choice.parameter, choice.owners, choice.packed, choice.decision.shape, choice.policy)
    for choice in (*chosen, *followers):
        ledger.record(choice.parameter, choice.decision)
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


def _decide(found: Found, owners: Sequence[Owner], options: Options, names: dict[int, str]) -> _Chosen:
    parameter = found.parameter
    name = owner_name(owners[0], names) if owners else "(no module)"
    settings = options.for_weight(name)
    policy = LoadPolicy("svd" if settings.init == "svd" else "auto", settings.max_error)

    def dense(reason: str, kept: float | None = None) -> _Chosen:
        decision = Decision(name, None, reason, parameter.numel(), kept)
        return _Chosen(parameter, owners, decision, None, policy)

    skipped = options.selects(name)
    if skipped:
        return dense(skipped)
    eligible = examine(parameter, owners, found.use)
    if eligible.format is None:
        return dense(eligible.reason)
    if parameter.numel() < settings.min_elements:
        return dense(f"{parameter.numel():,} elements are fewer than min_elements={settings.min_elements:,}")
    shape = _shape(parameter, eligible, settings, name)
    if isinstance(shape, str):
        return dense(shape)
    encoded = _encode(parameter, shape, settings, name)
    if encoded.packed is None:
        return dense(encoded.reason, encoded.kept)
    if 2 * encoded.shape.numel > parameter.numel():
        return dense(_no_gain(encoded.shape, parameter))
    error = None if encoded.method == "drawn" else encoded.relative_error
    decision = Decision(name, encoded.shape, encoded.reason, parameter.numel(), encoded.kept, error)
    return _Chosen(parameter, owners, decision, encoded.packed, policy)


def _shape(parameter: nn.Parameter, eligible: Eligibility, settings: Options, name: str) -> TTShape | str:
    """The shape to try, or the reason why there is no useful one. Modes and ranks the user gave must fit."""
    assert eligible.format is not None
    rows, cols = parameter.shape
    try:
        shape = choose_shape(
            rows, cols, format=eligible.format, rank=settings.rank, modes=settings.modes, order=settings.order,
            zero_row=eligible.zero_row,
        )
    except ShapeError as error:
        if settings.modes is not None or not isinstance(settings.rank, (int, float)):
            raise ShapeError(f"{name}: {error}") from None
        return f"no useful modes: {error}"
    # With a tolerance the ranks found may be far smaller than the cap.
    return _no_gain(shape, parameter) if settings.tolerance is None and 2 * shape.numel > parameter.numel() else shape


def _no_gain(shape: TTShape, parameter: torch.Tensor) -> str:
    return f"too little to gain: ranks {shape.ranks} need {shape.numel:,} of {parameter.numel():,} elements"


def _encode(parameter: nn.Parameter, shape: TTShape, settings: Options, name: str) -> Encoded:
    # The first call may run under inference_mode; its tensors could never be trained.
    with torch.inference_mode(False), torch.no_grad():
        return encode(
            parameter.detach(), shape, init=settings.init, max_error=settings.max_error,
            tolerance=settings.tolerance, name=name,
        )


def _follow(choice: _Chosen, copy: nn.Parameter, modules: Sequence[nn.Module]) -> _Chosen:
    """An averaged copy in the same shape as the weight it follows."""
    shape, name = choice.decision.shape, choice.decision.name
    assert shape is not None and choice.packed is not None
    owners = owners_of([copy], modules)[id(copy)]
    packed = choice.packed
    with torch.inference_mode(False), torch.no_grad():
        if not torch.equal(copy, choice.parameter):
            encoded = encode(copy.detach(), shape, init="auto", max_error=choice.policy.max_error, name=name)
            if encoded.packed is None or encoded.shape.ranks != shape.ranks:
                raise WeightError(
                    f"an AveragedModel of this model holds a {name} that does not fit ranks {shape.ranks} "
                    f"({encoded.reason}): make it after the first compiled call, or call comera.tensorize(model) first"
                )
            packed = encoded.packed * (encoded.shape.scale / shape.scale)
    return _Chosen(copy, owners, choice.decision, packed, choice.policy)


def _outer(modules: Sequence[nn.Module], roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Other live modules, those with most parts first: for names of owners that lie outside the roots."""
    inside = {id(m) for root in roots for m in root.modules()}
    outside = [m for m in modules if id(m) not in inside and m._modules]
    return sorted(outside, key=lambda m: -len(list(m.modules())))


def _weight_names(roots: Sequence[nn.Module], names: dict[int, str]) -> list[str]:
    """Dotted names of every matrix below the roots."""
    return [
        owner_name(Owner(module, key), names)
        for root in roots
        for module in root.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and (parameter.dim() > 1 or key in tt_module.shapes_of(module))
    ]

"""What becomes of one dense parameter: its tensor-train shape and packed values, or the reason why it stays dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from comera_compile.eligibility import Eligibility, examine
from comera_compile.errors import CompileError, ShapeError
from comera_compile.ledger import Decision
from comera_compile.options import Options
from comera_compile.tt.encode import Encoded, encode
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.shape import TTShape
from comera_compile.weights.entries import LoadPolicy
from comera_compile.weights.owners import Owner
from comera_compile.weights.placement import check_whole

# Without a graph ("") the use is not known yet; the compiled call will see it.
_PLANNED_USES = ("", "linear", "embedding")
# A step or two to try a loop out teach nothing that a conversion could lose.
_TRIAL_STEPS = 3


@dataclass(frozen=True)
class Found:
    """A dense parameter to look at: what a traced graph uses it for, or ``""`` without a graph."""

    parameter: nn.Parameter
    use: str = ""


@dataclass(frozen=True)
class Choice:
    """A decided weight; with ``packed`` values it is ready to be put in place."""

    parameter: nn.Parameter
    owners: Sequence[Owner]
    decision: Decision
    packed: torch.Tensor | None
    policy: LoadPolicy


def decide(found: Found, owners: Sequence[Owner], names: Sequence[str], options: Options, steps: int = 0) -> Choice:
    """Look at a parameter and choose; nothing is changed.

    Args:
        found: a dense parameter with at least two dimensions.
        owners: every live module that holds it.
        names: its dotted names, one an owner below the roots; the first one is used in reports.
        options: settings of the whole call.
        steps: steps that optimizers have taken with the parameter.

    Raises:
        PlacementError: the parameter is sharded.
        ShapeError: modes, order or ranks that the user gave do not fit.
        WeightError: the weight holds NaN or infinity.
        CompileError: ``strict``, and the graph uses the weight in a way that has no plan.
    """
    parameter, name = found.parameter, names[0]
    settings = options.for_weight(names)
    policy = LoadPolicy("svd" if settings.init == "svd" else "auto", settings.max_error)

    def dense(reason: str, kept: float | None = None, final: bool = True) -> Choice:
        decision = Decision(name, None, reason, parameter.numel(), kept, final=final)
        return Choice(parameter, owners, decision, None, policy)

    skipped = options.selects(names)
    if skipped:
        return dense(skipped)
    eligible = examine(parameter, owners, found.use)
    if eligible.format is None:
        return dense(eligible.reason, final=eligible.final)
    if parameter.numel() < settings.min_elements:
        return dense(f"{parameter.numel():,} elements are fewer than min_elements={settings.min_elements:,}")
    check_whole(name, parameter)
    shape = _shape(parameter, eligible, settings, name)
    if isinstance(shape, str):
        return dense(shape)
    if settings.strict and found.use not in _PLANNED_USES:
        raise CompileError(
            f"strict: {name} is used by {found.use}, which has no planned contraction, so its dense matrix would "
            "be rebuilt in every call: keep it dense with the option exclude, or compile without strict"
        )
    encoded = _encode(parameter, shape, settings, name, steps)
    if encoded.packed is None:
        return dense(encoded.reason, encoded.kept)
    if 2 * encoded.shape.numel > parameter.numel():
        return dense(_no_gain(encoded.shape, parameter))
    error = None if encoded.method == "drawn" else encoded.relative_error
    decision = Decision(name, encoded.shape, encoded.reason, parameter.numel(), encoded.kept, error)
    return Choice(parameter, owners, decision, encoded.packed, policy)


def _shape(parameter: nn.Parameter, eligible: Eligibility, settings: Options, name: str) -> TTShape | str:
    """The shape to try, or the reason why there is no useful one. Modes and ranks the user gave must fit."""
    assert eligible.format is not None
    rows, cols = parameter.shape
    try:
        shape = choose_shape(
            rows,
            cols,
            format=eligible.format,
            rank=settings.rank,
            modes=settings.modes,
            order=settings.order,
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


def _encode(parameter: nn.Parameter, shape: TTShape, settings: Options, name: str, steps: int) -> Encoded:
    # What a few steps change may not show in the spectrum, but it is what was learned.
    trained = f"trained ({steps} optimizer steps)" if steps > _TRIAL_STEPS else ""
    # The first call may run under inference_mode; its tensors could never be trained.
    with torch.inference_mode(False), torch.no_grad():
        return encode(
            parameter.detach(),
            shape,
            init=settings.init,
            max_error=settings.max_error,
            tolerance=settings.tolerance,
            name=name,
            trained=trained,
        )

"""The errors a user can meet. Every message says what was expected, what was got, and what to do."""

from __future__ import annotations


class ComeraError(Exception):
    """Base of every error this package raises on purpose."""


class OptionError(ComeraError, ValueError):
    """An option has an unknown name or an impossible value."""


class ShapeError(ComeraError, ValueError):
    """A weight has no tensor-train shape under the given modes, order and ranks."""


class WeightError(ComeraError, ValueError):
    """A weight's values cannot be put into, or written through to, tensor-train form."""


class PlacementError(ComeraError, RuntimeError):
    """The model is in a state in which its weights must not be converted now."""


class CompileError(ComeraError, RuntimeError):
    """The graph could not be rewritten or lowered, and ``strict`` forbids falling back."""


class VersionError(ComeraError, RuntimeError):
    """The installed torch lacks an interface this package needs."""


class PlanningError(ComeraError, ValueError):
    """Contractions were asked for that cannot be planned: sizes that contradict each other, a limit too small."""


class CalibrationError(ComeraError, RuntimeError):
    """The device could not be measured well enough to plan by it."""

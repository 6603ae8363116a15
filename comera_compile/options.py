"""The options of the ``comera`` backend, ``comera.Backend`` and ``comera.tensorize``: names, defaults, checks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from comera_compile import torch_private
from comera_compile.errors import OptionError

Init = Literal["auto", "svd", "random"]
INITS: tuple[Init, ...] = ("auto", "svd", "random")
Saved = Literal["auto", "all", "min"]
Objective = Literal["time", "flops", "bytes"]
OBJECTIVES: tuple[Objective, ...] = ("time", "flops", "bytes")
SAVED: tuple[Saved, ...] = ("auto", "all", "min")
# Inner compilers that leave the cut between forward and backward to this package.
CUTTING = ("inductor", "aot_eager")
_PARTITIONER = "custom_partitioner_fn"
Modes = tuple[tuple[int, ...], tuple[int, ...]]
_LAYER_OPTIONS = ("rank", "modes", "order", "init", "max_error", "tolerance", "min_elements")


@dataclass(frozen=True, kw_only=True)
class Options:
    """All settings, checked when made.

    Args:
        rank: an int, a fraction of the largest rank at each bond, or a list of all inner ranks.
        modes: ``((row modes), (column modes))`` of every converted weight; mostly given per layer.
        order: number of modes a side, 1 to 6.
        layers: name pattern to overriding settings of matching weights (later patterns win).
        init: ``"auto"`` draws untrained weights, decomposes what fits ``max_error``, leaves the rest dense; ``"svd"``
            always decomposes; ``"random"`` always draws.
        max_error: relative Frobenius error that ``"auto"`` accepts.
        tolerance: where set, decompose to the smallest ranks within this relative error, at most ``rank``.
        include: only weights whose name matches one of these patterns.
        exclude: no weights whose name matches one of these.
        min_elements: smaller weights stay dense.
        inner: what lowers the rewritten graph: ``"inductor"``, ``"aot_eager"`` or another Dynamo backend.
        inner_options: config patches for Inductor.
        cudagraphs: let Inductor use CUDA Graphs.
        strict: raise where the package would fall back.
        keep_memory: let the C library keep freed memory between steps (glibc on CPU); see ``memory_policy``.
        saved: what is kept between forward and backward. ``"auto"`` makes again in the backward what takes no longer
            than saving it; ``"min"`` also what takes little time: wide tensors behind a tensor-train layer, from its
            bond, through bias, activation, norm, residual sum and the inputs of attention; ``"all"`` leaves it to the
            inner compiler. ``"min"`` needs inner ``"inductor"`` or ``"aot_eager"``; with
            others ``"auto"`` is ``"all"``.
        saved_bytes: the bytes that each compiled graph may save at most, an int: storages that are neither inputs nor
            parameters, at the batch it is compiled for. What takes the least time a byte is made again first. Needs an
            inner compiler as ``"min"`` does. CompileError where it cannot be met.
        objective: what contractions are chosen by: predicted ``"time"`` (from this device's calibration where there
            is one), ``"flops"``, or ``"bytes"`` moved.
        tune: measure the best few plans of each layer while compiling, where no measurement is stored for it (seconds a
            layer, once), and store the winners. Stored winners are used without it too. Needs objective ``"time"``.

    Raises:
        OptionError: a value is impossible.
    """

    rank: int | float | Sequence[int] = 32
    modes: Modes | None = None
    order: int = 3
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    init: Init = "auto"
    max_error: float = 0.01
    tolerance: float | None = None
    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    min_elements: int = 100_000
    inner: str = "inductor"
    inner_options: Mapping[str, Any] = field(default_factory=dict)
    cudagraphs: bool = False
    strict: bool = False
    keep_memory: bool = True
    saved: Saved = "auto"
    saved_bytes: int | None = None
    objective: Objective = "time"
    tune: bool = False

    def __post_init__(self) -> None:
        _check_rank(self.rank)
        _check_modes(self.modes)
        _check_int("order", self.order, 1, 6)
        _check_int("min_elements", self.min_elements, 0, None)
        _check_choice("init", self.init, INITS)
        _check_fraction("max_error", self.max_error)
        if self.tolerance is not None:
            _check_fraction("tolerance", self.tolerance)
        for name in ("cudagraphs", "strict", "keep_memory", "tune"):
            _check_type(name, getattr(self, name), bool, "True or False")
        for name in ("layers", "inner_options"):
            _check_type(name, getattr(self, name), Mapping, "a dict")
        for name in ("include", "exclude"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        _check_choice("inner", self.inner, torch_private.inner_backend_names())
        _check_choice("objective", self.objective, OBJECTIVES)
        if self.tune and self.objective != "time":
            raise OptionError(f"tune=True measures time, so objective must be 'time' with it, got {self.objective!r}")
        self._check_saved()
        for pattern, settings in self.layers.items():
            self._check_layer(pattern, settings)

    @property
    def cuts(self) -> bool:
        """Whether this package says what is saved, and not the inner compiler or a partitioner of the user's."""
        return self.saved != "all" and self.inner in CUTTING and _PARTITIONER not in self.inner_options

    @property
    def may_run_alone(self) -> bool:
        """Whether nothing was asked for that only the inner compiler does."""
        asked = self.saved == "min" or self.saved_bytes is not None or self.cudagraphs or self.inner_options
        return self.inner == "inductor" and not asked

    def _check_saved(self) -> None:
        _check_choice("saved", self.saved, SAVED)
        if self.saved_bytes is not None:
            _check_bytes("saved_bytes", self.saved_bytes)
            if self.saved == "all":
                raise OptionError("saved='all' and saved_bytes exclude each other: leave out one of them")
        asked = "saved='min'" if self.saved == "min" else "saved_bytes"
        if (self.saved == "min" or self.saved_bytes is not None) and not self.cuts:
            if self.inner not in CUTTING:
                raise OptionError(f"{asked} needs inner {' or '.join(map(repr, CUTTING))}, got {self.inner!r}")
            raise OptionError(f"{asked} and inner_options[{_PARTITIONER!r}] exclude each other: leave out one of them")

    def _check_layer(self, pattern: str, settings: Mapping[str, Any]) -> None:
        _check_type("a key of layers", pattern, str, "a name pattern such as 'blocks.*.fc1'")
        _check_type(f"layers[{pattern!r}]", settings, Mapping, f"a dict of {', '.join(_LAYER_OPTIONS)}")
        unknown = [name for name in settings if name not in _LAYER_OPTIONS]
        if unknown:
            raise OptionError(f"layers[{pattern!r}]: unknown option {unknown[0]!r}; known: {', '.join(_LAYER_OPTIONS)}")
        try:
            replace(self, layers={}, **settings)
        except OptionError as error:
            raise OptionError(f"layers[{pattern!r}]: {error}") from None

    @staticmethod
    def parse(values: Mapping[str, Any] | None) -> Options:
        """Options from a dict of user values.

        Raises:
            OptionError: unknown name (the known ones are listed) or impossible value.
        """
        known = [f.name for f in fields(Options)]
        for name in values or {}:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, 1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise OptionError(f"unknown option {name!r}{hint}; known: {', '.join(known)}")
        return Options(**(values or {}))

    def for_weight(self, names: Sequence[str]) -> Options:
        """The settings that hold for one weight, by its dotted names (a tied weight has several)."""
        merged: dict[str, Any] = {}
        for pattern, settings in self.layers.items():
            if any(matches(name, pattern) for name in names):
                merged |= settings
        return replace(self, layers={}, **merged)

    def selects(self, names: Sequence[str]) -> str:
        """Empty if ``include`` and ``exclude`` let the weight of these names through, otherwise the reason why not."""
        if self.include and not any(matches(name, p) for p in self.include for name in names):
            return "not in include"
        excluded = next((p for p in self.exclude if any(matches(name, p) for name in names)), None)
        return f"excluded by {excluded!r}" if excluded else ""

    def check_patterns(self, names: Sequence[str]) -> None:
        """Refuse patterns that match none of the model's weights: mostly a typing error.

        Raises:
            OptionError: names the option, the pattern and some of the weights there are.
        """
        given = [("layers", p) for p in self.layers]
        given += [(option, p) for option in ("include", "exclude") for p in getattr(self, option)]
        for option, pattern in given:
            if not any(matches(name, pattern) for name in names):
                close = difflib.get_close_matches(pattern, names, 3, 0.3) or list(names[:3])
                known = ", ".join(close)
                raise OptionError(f"{option}: pattern {pattern!r} matches no weight; there are, e.g., {known}")


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a weight (``blocks.0.fc1.weight``) or the module that holds it (``blocks.0.fc1``)."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def _check_rank(rank: object) -> None:
    allowed = "a positive int, a fraction between 0 and 1, or a list of positive ints"
    if isinstance(rank, (list, tuple)):
        good = bool(rank) and all(isinstance(r, int) and not isinstance(r, bool) and r > 0 for r in rank)
    elif isinstance(rank, float):
        good = 0.0 < rank < 1.0
    else:
        good = isinstance(rank, int) and not isinstance(rank, bool) and rank > 0
    if not good:
        raise OptionError(f"rank must be {allowed}, got {rank!r}")


def _check_modes(modes: object) -> None:
    if modes is None:
        return
    good = isinstance(modes, (list, tuple)) and len(modes) == 2
    good = good and all(isinstance(side, (list, tuple)) and side for side in modes)  # type: ignore[attr-defined]
    if not good or not all(type(m) is int and m > 0 for side in modes for m in side):  # type: ignore[attr-defined]
        raise OptionError(f"modes must be a pair of lists of positive ints, (row modes, column modes), got {modes!r}")


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    allowed = f"an int of at least {low}" if high is None else f"an int from {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise OptionError(f"{name} must be {allowed}, got {value!r}")


def _check_bytes(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        example = "such as 500 * 2**20 for 500 MiB"
        raise OptionError(f"{name} must be a number of bytes, an int of at least 0, {example}; got {value!r}")


def _check_fraction(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise OptionError(f"{name} must be a number from 0 to 1, got {value!r}")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _check_type(name: str, value: object, kind: Any, allowed: str) -> None:
    if not isinstance(value, kind):
        raise OptionError(f"{name} must be {allowed}, got {value!r}")


def _patterns(name: str, value: object) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) for p in patterns):
        raise OptionError(f"{name} must be a name pattern or a list of them, got {value!r}")
    return tuple(patterns)

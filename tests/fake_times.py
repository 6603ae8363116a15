"""Tuning without a clock: made-up times of plans, a cache of its own, and a record of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from comera_compile import tune, tuned_plans, user_cache
from comera_compile.paired_timing import Timing
from comera_compile.planning.linear_plan import LinearPlan
from comera_compile.tuned_plans import Layer

# Seconds of a plan at so many rows.
Law = Callable[[LinearPlan, int], float]


class Clock:
    """Stands for ``time_plans``: three rounds whose quartiles lie ``noise`` apart over their median."""

    def __init__(self) -> None:
        self.law: Law = lambda plan, rows: 1e-3
        self.noise = 0.0
        self.processor = 0.0
        self.asked: list[tuple[Layer, int, list[LinearPlan]]] = []

    def __call__(
        self, layer: Layer, rows: int, plans: Sequence[LinearPlan], *, rounds: int = 15, seconds: float = 4.0
    ) -> Timing:
        self.asked.append((layer, rows, list(plans)))
        factors = (1 - self.noise, 1.0, 1 + self.noise)
        return Timing({p.encode(): [f * self.law(p, rows) for f in factors] for p in plans}, self.processor)

    def prefer(self, *names: str) -> None:
        """Plans of these names take 1 ms, all others 2 ms."""
        self.law = lambda plan, rows: 1e-3 if plan.name in names else 2e-3


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where entries go; nothing is remembered in the process, as if it had just begun."""
    monkeypatch.setenv("COMERA_CACHE_DIR", str(tmp_path / "cache"))
    for module, names in ((user_cache, ["_said"]), (tuned_plans, ["_said"]), (tune, ["_refused"])):
        for name in names:
            monkeypatch.setattr(module, name, set())
    monkeypatch.setattr(tuned_plans, "_unsaved", {})
    yield tmp_path / "cache"


@pytest.fixture
def clock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In the place of real timing."""
    made = Clock()
    monkeypatch.setattr(tune, "time_plans", made)
    return made

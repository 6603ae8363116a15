"""A calibration that takes a second: few sizes, a cache of its own, and no refusal on a busy test machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from comera_compile import calibrate, user_cache

SIZES = (1, 16, 64)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the entries go."""
    monkeypatch.setenv("COMERA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "_said", set())
    for name, value in {"SIZES": SIZES, "BATCHED_SIZES": SIZES, "COPIES": (1024, 8192), "_CAPACITY": 1 << 20}.items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(calibrate, "LARGEST_SPREAD", math.inf)
    monkeypatch.setattr(calibrate, "SMALLEST_SHARE", 0.0)
    calibrate.calibrated_model.cache_clear()
    yield tmp_path / "cache"
    calibrate.calibrated_model.cache_clear()

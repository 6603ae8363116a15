"""What all tests share: threads, seeds, a fresh compiler for each test, tolerances per dtype."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

# Largest norm of the error over the norm of the right answer. A tensor-train product is a chain of up to eight
# roundings and sums over up to some thousand terms, so each is about 100 times the dtype's unit roundoff.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# Keeps keep_memory from changing this process: memory kept after one test would count in the next one's peak.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")

Near = Callable[..., None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu skip, with the reason, on a machine without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    """Two threads, so that sums are split the same way on every machine."""
    torch.set_num_threads(2)


@pytest.fixture(scope="session", autouse=True)
def no_calibration(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An empty cache: what this machine's user calibrated or tuned would change plans that tests state."""
    os.environ["COMERA_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Seeds before each test; afterwards forgets what was compiled, so that no test meets another's recompile limit."""
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def assert_near() -> Near:
    """``assert_near(actual, expected, factor=1)``: equal shapes and an error within the dtype's tolerance."""

    def check(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
        assert actual.shape == expected.shape
        right = expected.double()
        error = (actual.double() - right).norm() / right.norm().clamp_min(1e-30)
        bar = factor * TOLERANCE[actual.dtype]
        assert error <= bar, f"relative error {error:.2e} above {bar:.2e}"

    return check

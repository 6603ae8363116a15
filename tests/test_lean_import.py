"""Importing the package is quick, loads nothing that is not needed, and changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# torch and Dynamo come first: their cost, modules and side effects (Dynamo sets an environment variable) are not this
# package's, and who calls torch.compile loads both anyway.
PROBE = """
import os, random, sys, time
import torch, torch._dynamo

def state():
    return [torch.get_num_threads(), torch.get_default_dtype().__str__(), dict(os.environ),
            torch.random.get_rng_state().sum().item(), hash(random.getstate()), torch.is_grad_enabled()]

torch.manual_seed(0)
before, modules, start = state(), set(sys.modules), time.perf_counter()
import comera_compile
seconds = time.perf_counter() - start
import json
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - modules), "unchanged": before == state(),
                  "cuda": torch.cuda.is_initialized()}))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    """What one import did; the quicker of two, since the first may have to write bytecode."""
    runs = [
        subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120) for _ in range(2)
    ]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    found: list[dict[str, Any]] = [json.loads(run.stdout) for run in runs]
    return min(found, key=lambda result: float(result["seconds"]))


@pytest.mark.parametrize("package", ["transformers", "matplotlib", "scipy", "pytest", "comera_compile.codegen.triton"])
def test_import_leaves_out(probe: dict[str, Any], package: str) -> None:
    # Each of these is optional or costs seconds; who only trains on a CPU never needs it.
    assert not [name for name in probe["new"] if name == package or name.startswith(f"{package}.")]


def test_import_does_not_initialise_cuda(probe: dict[str, Any]) -> None:
    # A process that has initialised CUDA can no longer fork data loader workers safely.
    assert probe["cuda"] is False


def test_import_changes_no_global_state(probe: dict[str, Any]) -> None:
    # Threads, default dtype, environment and random states belong to the program that imports.
    assert probe["unchanged"] is True


def test_import_is_quick(probe: dict[str, Any]) -> None:
    # Its own modules, opt_einsum and networkx: about 0.3 s on two busy cores.
    assert probe["seconds"] < 1.5

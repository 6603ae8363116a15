"""A second process takes compiled graphs from torch's disk cache, unless this package's code has changed since."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# One graph with every function that a rewritten graph can call: merge and apply (linear), lookup, attention, and the
# dense rebuild of a use without a plan.
TRAIN = """
import json, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
import comera_compile as comera
from comera_compile import backend

if sys.argv[1:]:
    backend.code_fingerprint = lambda: sys.argv[1]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(60, 32), nn.Linear(32, 48)

    def forward(self, ids):
        x = self.embed(ids).unflatten(-1, (4, 8)).transpose(1, 2)
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)
        return self.fc(x) * self.fc.weight.square().mean()

torch.manual_seed(0)
torch.set_num_threads(2)
model, ids = Model(), torch.randint(0, 60, (2, 7))
options = {"rank": 4, "order": 2, "min_elements": 500}
loss = torch.compile(model, backend="comera", options=options)(ids).square().mean()
loss.backward()
called = [line.uses for line in comera.report(model).lines]
gradients = [float(p.grad.double().norm()) for p in model.parameters()]
print(json.dumps({"counters": counters["aot_autograd"], "loss": float(loss.detach()), "gradients": gradients,
                  "plans": sum(map(len, called))}))
"""


def train(cache: Path, *fingerprint: str) -> dict[str, Any]:
    """What a fresh process with this cache directory reports."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    environment |= {"TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", TRAIN, *fingerprint],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_graphs_are_found_again_unless_the_code_has_changed(tmp_path: Path) -> None:
    first, second = train(tmp_path), train(tmp_path)
    changed = train(tmp_path, "0.1.0+another")
    # Nothing in our graphs makes torch go past its cache.
    assert first["plans"] == 3 and not any(run["counters"].get("autograd_cache_bypass") for run in (first, second))
    assert first["counters"].get("autograd_cache_miss") == 1 and not first["counters"].get("autograd_cache_hit")
    assert second["counters"].get("autograd_cache_hit") == 1 and not second["counters"].get("autograd_cache_miss")
    # A graph that an earlier state of the package compiled may call functions that mean something else now.
    assert changed["counters"].get("autograd_cache_miss") == 1 and not changed["counters"].get("autograd_cache_hit")
    # What comes out of the cache computes the same, gradients included.
    for run in (second, changed):
        assert run["loss"] == pytest.approx(first["loss"], rel=1e-6)
        assert run["gradients"] == pytest.approx(first["gradients"], rel=1e-5)

"""Training that goes on in a fresh process, with model and optimizer loaded before the first call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


# Both processes run the same code: build, compile, maybe load, train, print the losses' bits.
RESUME = """
import sys, json, torch, comera_compile
from tests import tiny_models as tiny
torch.manual_seed(int(sys.argv[1])); torch.set_num_threads(2)
model, steps, folder = tiny.Tied(), int(sys.argv[2]), sys.argv[3]
call = torch.compile(model, backend="comera", options=tiny.OPTIONS | {"inner": sys.argv[5]})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if sys.argv[4] == "resume":
    state = torch.load(f"{folder}/checkpoint.pt", weights_only=True)
    call.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"])
losses = []
begin = 3 if sys.argv[4] == "resume" else 0
for step in range(begin, begin + steps):
    ids = torch.randint(0, 60, (3, 8), generator=torch.Generator().manual_seed(step))
    loss = torch.nn.functional.cross_entropy(call(ids).flatten(0, 1), ids.flatten())
    optimizer.zero_grad(); loss.backward(); optimizer.step(); losses.append(loss.item().hex())
    if step == 2 and sys.argv[4] == "save":
        torch.save({"model": call.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/checkpoint.pt")
bits = [p.detach().view(torch.int32).sum().item() for p in model.parameters()]
from torch._dynamo.utils import counters
print(json.dumps({"losses": losses, "bits": bits, "counters": {k: dict(v) for k, v in counters.items()}}))
"""


def run(folder: Path, seed: int, steps: int, what: str, inner: str, cache: Path) -> dict[str, Any]:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RESUME, str(seed), str(steps), str(folder), what, inner]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_resume_in_a_fresh_process(tmp_path: Path) -> None:
    # Model and optimizer are loaded before the first call, the fresh model has other random weights: the run goes on
    # bit for bit, losses and weights.
    whole = run(tmp_path, 1, 6, "save", "aot_eager", tmp_path)
    resumed = run(tmp_path, 2, 3, "resume", "aot_eager", tmp_path)
    assert resumed["losses"] == whole["losses"][3:]
    assert resumed["bits"] == whole["bits"]


@pytest.mark.slow
def test_resume_with_inductor_is_bit_equal_and_starts_warm(tmp_path: Path) -> None:
    # The same with generated code; the second process finds every graph in the disk caches.
    whole = run(tmp_path, 1, 6, "save", "inductor", tmp_path / "cache")
    resumed = run(tmp_path, 1, 3, "resume", "inductor", tmp_path / "cache")
    assert resumed["losses"] == whole["losses"][3:]
    assert resumed["bits"] == whole["bits"]
    cold, warm = (r["counters"]["aot_autograd"] for r in (whole, resumed))
    assert cold["autograd_cache_miss"] >= 1 and not cold.get("autograd_cache_bypass")
    assert (
        warm["autograd_cache_hit"] >= 1
        and not warm.get("autograd_cache_miss")
        and not warm.get("autograd_cache_bypass")
    )

"""Where the dense bytes go, what is kept of a weight's values, and what stays as it was: dtype, device, object."""

from __future__ import annotations

import copy
import gc
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import comera_compile as comera
from comera_compile.ledger import Decision
from tests import tiny_models as tiny

Near = Callable[..., None]
EAGER: dict[str, Any] = {"inner": "aot_eager"}


def storages(model: nn.Module) -> list[StorageWeakRef]:
    """Weak references to the storage of every matrix."""
    return [StorageWeakRef(p.untyped_storage()) for p in model.parameters() if p.dim() > 1]


def decision(model: nn.Module, name: str = "weight") -> Decision:
    return comera.report(model)[name].decision


def relative(actual: Tensor, right: Tensor) -> float:
    return float((actual.detach().double() - right.double()).norm() / right.detach().double().norm())


def as_tensor_train(layer: nn.Linear, **options: Any) -> nn.Linear:
    """Values that a tensor train of these options holds exactly, in an ordinary dense layer."""
    comera.densify(comera.tensorize(layer, init="random", **options))
    return layer


def trained_like(layer: nn.Linear, power: float = 0.5) -> nn.Linear:
    """Singular values falling like ``k ** -power`` in random directions, as those of trained weights do."""
    rows, cols = layer.weight.shape
    u, v = (torch.linalg.qr(torch.randn(n, min(rows, cols), dtype=torch.float64)).Q for n in (rows, cols))
    values = torch.arange(1, min(rows, cols) + 1, dtype=torch.float64) ** -power
    layer.weight.data.copy_(u * values @ v.T)
    return layer


def test_the_first_call_frees_the_dense_storage() -> None:
    # An optimizer made before the first call holds the Parameter; its dense storage must die all the same.
    model = tiny.Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dense = storages(model)
    torch.compile(model, backend="comera", options=tiny.OPTIONS)(tiny.rows(4, dtype=torch.float32))
    assert len(dense) == 2 and all(reference.expired() for reference in dense)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))


def test_gradients_and_moments_are_freed_too() -> None:
    # A model trained densely for a step: its gradients die with the conversion, its moments with the next step.
    model, x = tiny.Mlp(), tiny.rows(4, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(x).pow(2).mean().backward()
    optimizer.step()
    weights = [model.fc1.weight, model.fc2.weight]
    gradients = [StorageWeakRef(w.grad.untyped_storage()) for w in weights if w.grad is not None]
    moments = [
        StorageWeakRef(optimizer.state[w][k].untyped_storage()) for w in weights for k in ("exp_avg", "exp_avg_sq")
    ]
    comera.tensorize(model, **tiny.TENSORIZE)
    assert len(gradients) == 2 and all(reference.expired() for reference in gradients)
    model(x).pow(2).mean().backward()
    optimizer.step()
    gc.collect()
    assert len(moments) == 4 and all(reference.expired() for reference in moments)


RESIDENT = """
import gc, torch
from torch import nn
import comera_compile as comera

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

torch.set_num_threads(2)
comera.tensorize(nn.Linear(512, 512))  # whatever is loaded and cached at the first use
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(2048, 1024, bias=False) for _ in range(12)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
dense = sum(p.numel() * p.element_size() for p in model.parameters())
before = resident()
comera.tensorize(model)
packed = sum(p.numel() * p.element_size() for p in model.parameters())
print(dense, packed, before - resident())
"""


# Blocks that the C library maps singly go back to the system when they are freed; others lie in its heap.
SINGLY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how memory is returned is known for glibc only")
@pytest.mark.parametrize("policy", [SINGLY, {}], ids=["singly", "default"])
def test_resident_memory_falls_by_the_dense_bytes(policy: dict[str, str]) -> None:
    # 100 MB of weights, with an optimizer that has not stepped yet.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | policy
    run = subprocess.run(
        [sys.executable, "-c", RESIDENT], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    dense, packed, freed = map(int, run.stdout.split())
    assert dense == 12 * 2048 * 1024 * 4 and packed < dense / 20
    assert 0.9 * (dense - packed) < freed < 1.1 * dense


def test_an_untrained_layer_is_drawn_afresh() -> None:
    # New values of the same size; nothing was approximated, so there is no error to report.
    layer = nn.Linear(384, 320)
    before = layer.weight.detach().clone()
    comera.tensorize(layer)
    found = decision(layer)
    assert found.shape is not None and found.error is None and found.reason.startswith("untrained: rank 32 keeps")
    assert relative(layer.weight.std(), before.std()) < 0.1
    assert relative(layer.weight, before) > 1


def test_a_tensor_train_is_recovered() -> None:
    # Trained earlier in this form and saved densely: its values come back, whatever order and ranks it had.
    layer = as_tensor_train(nn.Linear(384, 320), rank=8)
    before = layer.weight.detach().clone()
    comera.tensorize(layer, rank=8)
    assert decision(layer).reason.startswith("decomposed with error")
    assert relative(layer.weight, before) < 1e-5


def test_a_trained_layer_stays_dense() -> None:
    # Rank 32 would lose most of it: it is left alone, bit for bit, and the reason says how much would be kept.
    layer = trained_like(nn.Linear(384, 320))
    before, parameter = layer.weight.detach().clone(), layer.weight
    values = torch.linalg.svdvals(before.double()).square()
    comera.tensorize(layer)
    found = decision(layer)
    assert found.shape is None and layer.weight is parameter and torch.equal(parameter, before)
    assert found.kept is not None and abs(found.kept - values[:32].sum() / values.sum()) < 0.02
    assert found.reason.startswith(f"structured: rank 32 keeps {found.kept:.0%}".replace("%", " % of its energy"))
    assert found.reason.endswith("> max_error 0.01")


def test_a_trained_model_keeps_its_outputs() -> None:
    # Without options: one layer fits the default ranks up to noise and is converted, the other does not and stays.
    fits = as_tensor_train(nn.Linear(384, 320))
    with torch.no_grad():
        fits.weight += 1e-3 * fits.weight.norm() * nn.functional.normalize(torch.randn(320 * 384), dim=0).view(320, 384)
    model = nn.Sequential(fits, trained_like(nn.Linear(320, 384)))
    x = torch.randn(64, 384)
    first, second = model[0](x).detach(), model(x).detach()
    output = torch.compile(model, backend="comera", options=EAGER)(x)  # the inner compiler has no say in what is stored
    assert [line.decision.shape is None for line in comera.report(model).lines] == [False, True]
    assert 1e-5 < relative(model[0](x), first) < 0.01
    assert relative(output, second) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("init", ["svd", "random"])
def test_dtype_device_and_object_are_kept(dtype: torch.dtype, init: str, assert_near: Near) -> None:
    # There is no SVD in half precision: it is done in another dtype, and the cores come back in the weight's own.
    wide = nn.Linear(96, 80, dtype=torch.float64)
    layer = as_tensor_train(wide, rank=4, order=2, min_elements=0).to(dtype)
    parameter, before = layer.weight, layer.weight.detach().clone()
    comera.tensorize(layer, rank=4, order=2, min_elements=0, init=init)
    packed = layer._parameters["weight"]
    assert packed is parameter and packed.dim() == 1 and packed.is_leaf and packed.requires_grad
    assert packed.dtype == dtype and packed.device == before.device and packed.is_contiguous()
    assert layer.weight.dtype == dtype and not packed.is_inference()
    if init == "svd":
        assert_near(layer.weight.detach(), before)


def test_a_loose_tolerance_finds_smaller_ranks_in_half_precision() -> None:
    # Rank adaptation on conversion decomposes, too.
    layer = as_tensor_train(nn.Linear(96, 80), rank=4, order=2, min_elements=0).to(torch.bfloat16)
    before = layer.weight.detach().clone()
    comera.tensorize(layer, rank=16, order=2, min_elements=0, init="svd", tolerance=0.02)
    found = decision(layer)
    assert found.shape is not None and found.shape.bond == 4
    assert layer._parameters["weight"].dtype == torch.bfloat16
    assert relative(layer.weight, before) < 0.05


def test_frozen_weights_stay_frozen_and_dense() -> None:
    # requires_grad is the user's; LoRA-like set-ups rely on it.
    model = tiny.Mlp()
    model.fc1.weight.requires_grad_(False)
    comera.tensorize(model, **tiny.TENSORIZE)
    frozen, trained = (layer._parameters["weight"] for layer in (model.fc1, model.fc2))
    assert not frozen.requires_grad and frozen.dim() == 2
    assert trained.requires_grad and trained.dim() == 1


@pytest.mark.parametrize("init", ["auto", "svd"])
def test_a_large_layer_converts_within_seconds(init: str) -> None:
    # A full SVD of every unfolding would take minutes. Processor time: the machine may be busy with other things.
    layer = nn.Linear(2048, 2048, bias=False)
    start = time.process_time()
    comera.tensorize(layer, init=init)
    assert time.process_time() - start < 20
    assert decision(layer).shape is not None


def test_equal_models_get_equal_cores() -> None:
    # What is stored depends on the weight alone, not on random states: every process of a job converts alike.
    first = tiny.Mlp()
    second = copy.deepcopy(first)
    comera.tensorize(first, **tiny.TENSORIZE)
    state = torch.get_rng_state()
    torch.manual_seed(123)
    comera.tensorize(second, **tiny.TENSORIZE)
    torch.set_rng_state(state)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)

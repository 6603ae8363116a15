"""Autocast, half precision and mixed dtypes in compiled code, against the same model in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests import tiny_models as tiny

Near = Callable[..., None]


def compiled(model: nn.Module, **settings: object) -> Callable[..., Tensor]:
    """The one-line call; ``settings`` go to ``torch.compile``."""
    call: Callable[..., Tensor] = torch.compile(model, backend="comera", options=tiny.OPTIONS, **settings)
    return call


def test_autocast_bfloat16(assert_near: Near) -> None:
    # Weights stay float32 and get float32 gradients; products run in bfloat16 as eager's do.
    model = tiny.Mlp()
    call, x = compiled(model), tiny.rows(6, dtype=torch.float32)

    def cast(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return f(x)

        return run

    cast(call)(x)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    twin = copy.deepcopy(model)
    ours, theirs = tiny.outcome(cast(call), model, x), tiny.outcome(cast(twin), twin, x)
    exact = tiny.outcome(twin, twin, x)
    for name in exact.keys() - {"loss"}:  # a mean of both signs, whose relative error says nothing
        assert ours[name].dtype == theirs[name].dtype, name
        # Both round to bfloat16 at other places; ours must not be further from the exact result than eager's.
        bar = 3 * (theirs[name] - exact[name]).norm() + 0.01 * exact[name].norm()
        assert (ours[name] - exact[name]).norm() <= bar, name


def test_autocast_inside_the_compiled_code() -> None:
    # The graph then holds enter and exit nodes; the shared merge of the cores runs before the first of them.
    model = tiny.Mlp()

    @torch.compile(backend="comera", options=tiny.OPTIONS)
    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    x = tiny.rows(6, dtype=torch.float32)
    output = call(x)
    assert output.dtype == torch.bfloat16
    output.float().pow(2).mean().backward()
    exact = copy.deepcopy(model)
    expected = exact(x)
    expected.pow(2).mean().backward()
    for ours, theirs in [
        (output, expected),
        *((p.grad, q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True)),
    ]:
        assert (ours.float() - theirs).norm().item() <= 0.05 * theirs.norm().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype: torch.dtype, assert_near: Near) -> None:
    # SVD and the merge exist for float32 only; the cores must come back in the weight's dtype.
    model = tiny.Mlp().to(dtype)
    call, x = compiled(model), tiny.rows(6, dtype=dtype)
    call(x)
    assert all(p.dtype == dtype for p in model.parameters())
    tiny.assert_as_eager(call, model, [x], assert_near)


def test_mixed_dtypes_fail_as_in_eager() -> None:
    # bfloat16 weights and float32 input: eager says so too; nothing is cast behind the user's back.
    model = tiny.Mlp().to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        model(tiny.rows(2, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="dtype"):
        compiled(model)(tiny.rows(2, dtype=torch.float32))

"""From bond to bond through a pointwise function in C++: values, gradients, threads, what is written, what is none."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comera_compile.codegen.cpu import bridge_kernels as kernels
from comera_compile.codegen.cpu import skinny_kernels

# Largest error relative to the largest entry.
BARS = {torch.float64: 1e-12, torch.float32: 2e-6}
ROOT = Path(__file__).resolve().parents[1]
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.clone,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
# rows, width, bond, bond of the gate, bond of the result
SIZES = (
    (0, 97, 8, 3, 32),
    (1, 1, 1, 1, 1),
    (5, 0, 3, 8, 4),  # a width of nothing: sums of nothing
    (1, 97, 32, 8, 3),
    (7, 7, 3, 40, 8),
    (100, 97, 8, 30, 40),
    (128, 200, 40, 32, 30),
    (1023, 97, 30, 1, 32),
)
Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(
    sizes: tuple[int, ...], dtype: torch.dtype, *, gate: bool = True, bias: bool = True
) -> tuple[Operands, Tensor]:
    """Operands with u of about 1, and a gradient of the result."""
    rows, width, bond, bond_gate, bond_out = sizes
    h, second = torch.randn(rows, bond, dtype=dtype), torch.randn(bond, width, dtype=dtype) / bond**0.5
    h_gate, second_gate = torch.randn(rows, bond_gate, dtype=dtype), torch.randn(bond_gate, width, dtype=dtype)
    biases = [torch.randn(width, dtype=dtype) if wanted else None for wanted in (bias, bias and gate)]
    gates = (h_gate, second_gate / bond_gate**0.5) if gate else (None, None)
    first, grad = torch.randn(bond_out, width, dtype=dtype), torch.randn(rows, bond_out, dtype=dtype)
    return (h, second, biases[0], *gates, biases[1], first), grad


def run(operands: Operands, grad: Tensor, activation: str) -> list[Tensor]:
    """The result, then a gradient for each operand that is there."""
    made = kernels.bridge(*operands, activation), *kernels.backward(grad, *operands, activation)
    return [t for t in made if t is not None]


def truth(operands: Operands, grad: Tensor, activation: str) -> list[Tensor]:
    """The same by torch's autograd in float64."""
    leaves = [None if t is None else t.double().requires_grad_() for t in operands]
    h, second, bias, h_gate, second_gate, bias_gate, first = leaves
    assert h is not None and second is not None and first is not None
    wide = h @ second if bias is None else h @ second + bias
    if h_gate is not None and second_gate is not None:
        gate = h_gate @ second_gate if bias_gate is None else h_gate @ second_gate + bias_gate
        wide = TORCH[activation](gate) * wide
    else:
        wide = TORCH[activation](wide)
    result = wide @ first.t()
    return [result, *torch.autograd.grad(result, [t for t in leaves if t is not None], grad.double())]


def assert_right(operands: Operands, grad: Tensor, activation: str) -> None:
    ours = run(operands, grad, activation)
    for made, right in zip(ours, truth(operands, grad, activation), strict=True):
        assert made.shape == right.shape and made.dtype == grad.dtype
        if right.numel():
            assert (made.double() - right).abs().max() <= BARS[grad.dtype] * right.abs().max(), made.shape


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("activation", TORCH)
def test_values_and_gradients(activation: str, dtype: torch.dtype) -> None:
    for sizes, gate, bias in itertools.product(SIZES, (False, True), (False, True)):
        assert_right(*draw(sizes, dtype, gate=gate, bias=bias), activation)


def test_a_wide_block() -> None:
    for gate, dtype in itertools.product((False, True), BARS):
        assert_right(*draw((200, 3072, 32, 32, 16), dtype, gate=gate), "gelu")


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_any_number_of_threads(count: int) -> None:
    torch.set_num_threads(count)
    for sizes, gate in itertools.product((*SIZES, (50, 700, 8, 3, 12)), (False, True)):
        operands, grad = draw(sizes, torch.float32, gate=gate)
        assert_right(operands, grad, "silu")
        # sums are put together in one order, whichever thread comes first
        assert all(torch.equal(a, b) for a, b in zip(*(run(operands, grad, "silu") for _ in range(2)), strict=True))


def test_with_fewer_threads_than_asked_for() -> None:
    # OpenMP may give fewer: what the others were to do must be done all the same.
    script = "import torch; from tests import test_bridge_kernels as t; torch.set_num_threads(4); "
    script += "t.assert_right(*t.draw((100, 200, 8, 3, 12), torch.float64), 'gelu'); "
    script += "t.test_halves_of_the_backward(torch.float64)"
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("activation", TORCH)
def test_activations_and_their_derivatives(activation: str, dtype: torch.dtype) -> None:
    # With bonds and a width of 1 and halves of 1 the result is the activation of h, the gradient of h its derivative.
    near, far = torch.linspace(-14, 14, 200_001, dtype=dtype), torch.logspace(1, 4, 1000, dtype=dtype)
    u, one = torch.cat([near, far, -far]), torch.ones(1, 1, dtype=dtype)
    operands: Operands = u[:, None], one, None, None, None, None, one
    ours = [made.flatten() for made in run(operands, torch.ones_like(operands[0]), activation)[:2]]
    right = [made.flatten() for made in truth(operands, torch.ones_like(operands[0]), activation)[:2]]
    bar = 5e-7 if dtype == torch.float32 else 1e-13
    for made, exact in zip(ours, right, strict=True):
        assert ((made.double() - exact).abs() <= bar * exact.abs().clamp(min=1)).all()


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("activation", TORCH)
def test_numbers_that_are_none_and_large_ones(activation: str, dtype: torch.dtype) -> None:
    large = [0.0, 60.0, 100.0, 1000.0, 1e10, 1e18, float("inf")]
    u = torch.tensor([*large, *(-value for value in large), float("nan")], dtype=dtype)[:, None]
    # float64: with AVX-512, torch's GELU of an infinite float32 is NaN
    u64 = u.double().requires_grad_()
    y64 = TORCH[activation](u64)
    right, slope = y64.detach().to(dtype), torch.autograd.grad(y64.sum(), u64)[0].to(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    h, gate = u, torch.ones_like(u)
    for operands in ((h, one, None, None, None, None, one), (gate, one, None, h, one, None, one)):
        made = run(operands, gate, activation)
        torch.testing.assert_close(made[0], right, rtol=1e-6, atol=1e-6, equal_nan=True)
        at = 1 if operands[3] is None else 3
        torch.testing.assert_close(made[at], slope, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("activation", TORCH)
def test_numbers_that_are_none_stay_in_their_rows(activation: str) -> None:
    # 7 columns are no whole panel: what is computed beside them must not be seen
    for gate in (False, True):
        operands, grad = draw((60, 7, 5, 3, 6), torch.float32, gate=gate)
        operands[0][3, 2], operands[0][50, 0], grad[4, 1] = float("nan"), float("-inf"), float("inf")
        for ours, right in zip(run(operands, grad, activation), truth(operands, grad, activation), strict=True):
            assert torch.equal(ours.isfinite(), right.isfinite())


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_outside_of_the_results_is_written(count: int) -> None:
    library = kernels._library(torch.float32)
    assert library is not None
    for rows, width, gate in itertools.product((1, 50, 100), (1, 17, 97, 200), (False, True)):
        operands, grad = draw((rows, width, 3, 8, 5), torch.float32, gate=gate)
        read = [None if t is None else t.data_ptr() for t in operands]
        sizes = (ctypes.c_int64 * 7)(rows, width, 3, 8 if gate else 0, 5, 2, 1)
        bands = [None if t is None else torch.full((t.numel() + 64,), 7.0) for t in (grad, *operands)]
        result, *written = [None if b is None else b[32:].data_ptr() for b in bands]
        library.bridge(sizes, 0.3, *read, result, count)
        library.bridge_backward(sizes, 0.3, *read, grad.data_ptr(), *written, count)
        assert all((b[:32] == 7).all() and (b[-32:] == 7).all() for b in bands if b is not None)
        assert all((b[32:-32] != 7).all() for b in bands if b is not None)


def test_strided_expanded_and_misaligned_inputs() -> None:
    operands, grad = draw((10, 40, 8, 3, 5), torch.float64)
    plain: list[Any] = [grad, *operands]
    odd = [torch.cat([torch.zeros(1, dtype=torch.float64), t.flatten()])[1:].view(t.shape) for t in plain]
    strided = [torch.stack([t, t], dim=-1)[..., 0] for t in plain]
    transposed = [t.t().contiguous().t() if t.dim() == 2 else t for t in plain]
    right = run(operands, grad, "gelu")
    for given in (odd, strided, transposed):
        again = run((*given[1:],), given[0], "gelu")
        assert all(torch.equal(a, b) for a, b in zip(again, right, strict=True))
    assert_right(operands, torch.ones((), dtype=torch.float64).expand(10, 5), "gelu")


def test_operators_describe_themselves_rightly() -> None:
    halves = torch.randn(5, 12), torch.randn(5, 4), torch.randn(4, 12)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.comera.narrow_backward.default, halves),
        (torch.ops.comera.narrow_backward.default, (*halves[:2], None)),
        (torch.ops.comera.wide_backward.default, (halves[1], halves[0], halves[2], True)),
        (torch.ops.comera.wide_backward.default, (halves[1], halves[0], halves[2], False)),
    ]
    for gate, bias in itertools.product((False, True), repeat=2):
        operands, grad = draw((5, 20, 4, 3, 6), torch.float32, gate=gate, bias=bias)
        calls.append((torch.ops.comera.bridge.default, (*operands, "silu")))
        calls.append((torch.ops.comera.bridge_backward.default, (grad, *operands, "silu")))
        seeded = *operands, "silu", 0.3, torch.tensor([5])
        calls.append((torch.ops.comera.bridge.default, seeded))
        calls.append((torch.ops.comera.bridge_backward.default, (grad, *seeded)))
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_is_refused() -> None:
    (h, second, bias, h_gate, second_gate, _, first), _ = draw((5, 20, 4, 3, 6), torch.float32)
    with pytest.raises(ValueError, match="activation must be one of none, relu, gelu"):
        kernels.bridge(h, second, bias, None, None, None, first, "mish")
    with pytest.raises(ValueError, match="come together"):
        kernels.bridge(h, second, bias, h_gate, None, None, first, "gelu")
    with pytest.raises(ValueError, match="come together"):
        kernels.bridge(h, second, bias, None, second_gate, None, first, "gelu")


@pytest.mark.parametrize("dtype", BARS)
def test_halves_of_the_backward(dtype: torch.dtype) -> None:
    # The one operator for both halves and the two after each other give the same gradients.
    for rows, bond in itertools.product((0, 1, 100), (1, 3, 8, 12, 32)):
        x, grad = torch.randn(rows, 97, dtype=dtype), torch.randn(rows, 40, dtype=dtype)
        first, second = torch.randn(bond, 97, dtype=dtype), torch.randn(bond, 40, dtype=dtype)
        h = skinny_kernels.narrow(x, first)
        for needs_bias, half in itertools.product((False, True), (None, first)):
            dx, d_first, *rest = skinny_kernels.backward(x, h, grad, half, second, needs_bias=needs_bias)
            dh, *outer = skinny_kernels.wide_backward(h, grad, second, needs_bias=needs_bias)
            made = *skinny_kernels.narrow_backward(x, dh, half), *outer
            for ours, right in zip(made, (dx, d_first, *rest), strict=True):
                assert (ours is None) == (right is None)
                if ours is not None and right is not None and right.numel():
                    assert (ours - right).abs().max() <= BARS[dtype] * right.abs().max()

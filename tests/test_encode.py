"""The policy: what is drawn, what is decomposed, what stays dense, and that it depends on the weight alone."""

from __future__ import annotations

import subprocess
import sys
import zlib
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from comera_compile.errors import WeightError
from comera_compile.tt.encode import Encoded, Init, encode
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.packing import to_dense

LINEAR = choose_shape(384, 256, format="tt", rank=16)
TABLE = choose_shape(1000, 64, format="ttm", rank=16, zero_row=2)


def structured(rows: int = 384, cols: int = 256) -> Tensor:
    return torch.randn(rows, cols) * torch.arange(1, cols + 1) ** -0.4


def dense(found: Encoded) -> Tensor:
    assert found.packed is not None
    return to_dense(found.packed, found.shape)


def auto(weight: Tensor, shape: Any = LINEAR, **options: Any) -> Encoded:
    return encode(weight, shape, init="auto", **{"max_error": 0.01, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_untrained_weight_is_drawn_with_its_own_deviation(dtype: torch.dtype) -> None:
    weight = nn.Linear(256, 384).weight.detach().to(dtype)
    found = auto(weight)
    assert found.method == "drawn" and "untrained" in found.reason
    assert found.packed is not None and found.packed.dtype == dtype
    assert found.packed.shape == (LINEAR.numel,)
    # One draw of a rank-16 train has a root mean square within 30 % of the wanted one.
    ratio = float(dense(found).double().square().mean().sqrt() / weight.double().square().mean().sqrt())
    assert 0.7 <= ratio <= 1.3


def test_structured_weight_stays_dense_with_the_reason() -> None:
    found = auto(structured())
    assert found.packed is None
    assert found.kept > 1.3 * found.kept_if_random and found.relative_error > 0.5
    expected = f"structured: rank 16 keeps {found.kept * 100:.0f} % of its energy"
    assert found.reason.startswith(expected) and "> max_error 0.01" in found.reason


def test_weight_of_the_asked_ranks_is_decomposed() -> None:
    weight = dense(encode(torch.randn(384, 256), LINEAR, init="random", max_error=0.01))
    found = auto(weight)
    assert found.method == "svd" and found.packed is not None
    assert found.relative_error <= 1e-6
    assert float((dense(found) - weight).norm() / weight.norm()) <= 1e-5


@pytest.mark.parametrize("format", ["tt", "ttm"])
def test_max_error_decides(format: Any) -> None:
    shape = choose_shape(384, 256, format=format, rank=64)
    weight = structured()
    error = encode(weight, shape, init="svd", max_error=0.01).relative_error
    assert auto(weight, shape, max_error=error * 1.01).packed is not None
    refused = auto(weight, shape, max_error=error * 0.99)
    assert refused.packed is None and f"{error:.2g}" in refused.reason


def test_svd_cuts_as_asked() -> None:
    weight = structured()
    found = encode(weight, LINEAR, init="svd", max_error=0.01)
    assert found.method == "svd" and found.packed is not None
    measured = float((dense(found) - weight).norm() / weight.norm())
    assert measured == pytest.approx(found.relative_error, abs=1e-4) and measured > 0.5


def test_svd_decomposes_an_untrained_weight_too() -> None:
    weight = torch.randn(64, 64)
    full = choose_shape(64, 64, format="tt", rank=10**6)
    assert float((dense(encode(weight, full, init="svd", max_error=0.01)) - weight).norm() / weight.norm()) <= 1e-5


def test_random_redraws_a_structured_weight() -> None:
    found = encode(structured(), LINEAR, init="random", max_error=0.01)
    assert found.method == "drawn" and "redrawn" in found.reason and found.packed is not None


@pytest.mark.parametrize("init", get_args(Init))
def test_zero_weight_stays_zero_and_can_learn(init: Init) -> None:
    found = encode(torch.zeros(384, 256), LINEAR, init=init, max_error=0.01)
    assert found.method == "drawn" and dense(found).abs().max() == 0
    assert found.packed is not None and found.packed.abs().max() > 0


def test_tolerance_gives_the_smallest_ranks() -> None:
    small = choose_shape(384, 256, format="tt", rank=5)
    weight = dense(encode(torch.randn(384, 256), small, init="random", max_error=0.01))
    found = auto(weight, tolerance=1e-4)
    assert found.shape.ranks == small.ranks and found.relative_error <= 1e-4
    assert found.packed is not None and found.packed.numel() == small.numel


@pytest.mark.parametrize("init", get_args(Init))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(init: Init, bad: float) -> None:
    weight = torch.randn(384, 256)
    weight[100, 3] = bad
    with pytest.raises(WeightError, match=r"encoder\.3\.weight"):
        encode(weight, LINEAR, init=init, max_error=0.01, name="encoder.3.weight")


def test_wrong_sizes_and_dtypes_are_named() -> None:
    with pytest.raises(WeightError, match=r"w: 384 x 256 expected, got \(256, 384\)"):
        auto(torch.randn(256, 384), name="w")
    with pytest.raises(WeightError, match=r"torch\.int8"):
        auto(torch.zeros(384, 256, dtype=torch.int8))


def test_zero_row_is_left_out_of_the_statistics() -> None:
    # One row of four is zero: counting it would make the deviation 13 % smaller.
    shape = choose_shape(4, 4096, format="tt", rank=4, order=2, zero_row=1)
    weight = torch.randn(4, 4096)
    weight[1] = 0
    found = encode(weight, shape, init="random", max_error=0.01)
    assert "standard deviation 1" in found.reason or "standard deviation 0.99" in found.reason
    assert dense(found)[1].abs().max() == 0 and found.shape.zero_row == 1


def test_zero_row_that_holds_values_is_an_ordinary_row() -> None:
    table = nn.Embedding(1000, 64, padding_idx=2).weight.detach()
    assert auto(table, TABLE).shape.zero_row == 2
    table[2] = 1.0
    assert auto(table, TABLE).shape.zero_row == -1


def test_scale_is_that_of_the_statistics() -> None:
    # Two untrained layers of one kind share the constant, whether drawn or decomposed later.
    first, second = (auto(nn.Linear(256, 384).weight.detach()).shape.scale for _ in range(2))
    assert first == second and first != 1.0


def test_result_depends_on_weight_and_options_only() -> None:
    weight = torch.randn(384, 256)
    first = auto(weight)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = auto(weight.clone())
    assert torch.equal(torch.get_rng_state(), state)
    assert first.packed is not None and again.packed is not None
    assert torch.equal(first.packed, again.packed) and first.reason == again.reason
    other = auto(weight + 1e-3 * torch.randn(384, 256))
    assert other.packed is not None and not torch.equal(first.packed, other.packed)
    elsewhere = auto(weight, choose_shape(384, 256, format="tt", rank=8)).packed
    assert elsewhere is not None and not torch.equal(elsewhere[:64], first.packed[:64])


def test_autocast_and_strides_do_not_change_the_result() -> None:
    weight = dense(encode(torch.randn(384, 256), LINEAR, init="random", max_error=0.01))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = auto(weight)
        untrained = torch.randn(384, 256)
        in_half = auto(untrained)
    # In bfloat16 the error would be 1e-3 and more, and the energy off by about as much.
    assert found.packed is not None and found.relative_error <= 1e-6
    assert in_half.kept == auto(untrained).kept
    # A transposed view, as tied or Conv1D weights are.
    strided = auto(weight.T.contiguous().T)
    assert strided.packed is not None and float((dense(strided) - weight).norm() / weight.norm()) <= 1e-5
    packed = auto(untrained).packed
    assert packed is not None and torch.equal(packed, auto(untrained.T.contiguous().T).packed)  # type: ignore[arg-type]


def test_parameters_give_plain_tensors() -> None:
    found = auto(nn.Linear(256, 384).weight)
    assert found.packed is not None and not found.packed.requires_grad and type(found.packed) is Tensor


def test_equal_in_another_process() -> None:
    code = (
        "import torch, zlib; from comera_compile.tt.encode import encode; from comera_compile.tt.factorize import "
        "choose_shape; torch.set_num_threads(1); shape = choose_shape(384, 256, format='tt', rank=16); "
        "weight = torch.randn(384, 256, generator=torch.Generator().manual_seed(1)).double(); "
        "found = encode(weight, shape, init='auto', max_error=0.01); "
        "print(found.method, zlib.crc32(bytes(found.packed.view(torch.uint8).tolist())))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    weight = torch.randn(384, 256, generator=torch.Generator().manual_seed(1)).double()
    found = auto(weight)
    assert found.packed is not None
    # To the bit, although this process has two threads and the other one.
    expected = f"drawn {zlib.crc32(bytes(found.packed.view(torch.uint8).tolist()))}"
    assert child.stdout.strip() == expected, child.stderr


def test_a_weight_said_to_be_trained_is_never_drawn() -> None:
    # The spectrum of the first steps is that of noise; what they learned would be lost.
    noise = torch.randn(384, 256)
    assert encode(noise, LINEAR, init="auto", max_error=0.01).method == "drawn"
    found = encode(noise, LINEAR, init="auto", max_error=0.01, trained="trained (9 optimizer steps)")
    assert found.packed is None and found.reason.startswith("trained (9 optimizer steps): ")
    assert encode(noise, LINEAR, init="random", max_error=0.01, trained="trained").method == "drawn"  # as asked
    held = dense(encode(noise, LINEAR, init="random", max_error=0.01))
    assert encode(held, LINEAR, init="auto", max_error=0.01, trained="trained").method == "svd"

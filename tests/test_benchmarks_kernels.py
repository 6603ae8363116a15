"""The benchmark of the kernels: shares of a peak that is one, by operations that are those of the products."""

from __future__ import annotations

import pytest

from benchmarks import kernels


def test_shares_are_of_the_peak() -> None:
    figures = kernels.measure((8, 12, 16), rounds=3, seconds=2.0)
    names = {f"{kernel}_r{rank}" for kernel in ("narrow", "wide", "outer") for rank in (8, 12, 16)}
    assert set(figures["share_of_peak"]) == names
    # Nothing multiplies and adds faster than the loop that does only that; the noise of a few rounds apart.
    assert 0 < figures["min_share_of_peak"] <= max(figures["share_of_peak"].values()) < 1.5
    assert set(figures["over_next_vector"]) == {"narrow_r12", "wide_r12", "outer_r12"}


def test_a_run_does_what_is_counted() -> None:
    # The rate is operations over time: both must be of the same calls.
    runs = kernels.products(8)
    once = 2 * 96 * 768 * 8
    assert [flops // kernels.REPEATS for _, flops in runs.values()] == [once, once, 2 * once]
    for run, _ in runs.values():
        run()
    h, half, bias, y = runs["wide_r8"][0].tensors  # type: ignore[attr-defined]
    assert bias is None and (y - h @ half).abs().max() < 1e-4


def test_a_wrong_number_of_rounds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.parse(["--rounds", "0"])
    assert "at least 1" in capsys.readouterr().err

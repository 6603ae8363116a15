"""The benchmark of blocks from bond to bond: what it measures is what it says."""

from __future__ import annotations

import pytest

from benchmarks import region_cases, region_step
from benchmarks.region_cases import REGIONS, Region, build


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"WIDTH": 48, "HIDDEN": 96, "HEADS": 2, "SEQUENCE": 8}.items():
        monkeypatch.setattr(region_cases, name, size)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("region", [REGIONS[0], REGIONS[-2], REGIONS[-1]], ids=lambda r: r.name)
def test_blocks_run_from_bond_to_bond(region: Region) -> None:
    small = Region(region.name, region.make, 8, (4,) if len(region.lead) == 1 else (2, 8))
    figures = region_step.measure(small, rounds=2, seconds=1.0, inner="aot_eager")
    through = [plan for plan in figures["plans"].values() if "from bond to bond" in plan]
    assert len(through) == (2 if region.name.startswith("gpt") else 1)
    assert figures["speedup"] > 0 and set(figures["milliseconds"]) == {"dense", "comera"}


@pytest.mark.usefixtures("narrow")
def test_a_step_takes_every_gradient_and_drops_it() -> None:
    region = Region("ffn", region_cases.FeedForward, 8, (4,))
    batches = region.batches()
    for variant in ("dense", "comera"):
        step = build(variant, region, batches, inner="aot_eager")
        step.step()
        step.gradients()
        assert batches[1][0].grad is not None and all(p.grad is not None for p in step.learned)
        batches[1][0].grad = None


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        region_step.parse(["--cases", "conv*"])
    assert "ffn_r32_T128" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'sparse'"):
        build("sparse", REGIONS[0], [], inner="aot_eager")

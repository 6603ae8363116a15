"""Times of the standard linear cases, each layer with all its ranks beside the dense one in one session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from benchmarks import paired, peers
from benchmarks.linear_cases import DENSE, EAGER, OURS, TENSORLY, Case, LinearStep, build
from benchmarks.tensorly_linear import nearest_ranks

RANK_PAIR = (30, 32)  # a rank that is no multiple of 16 must not cost more than the next one that is
PEER_CASE = Case(768, 768, 32, 512)


def measure(cases: Sequence[Case], *, rounds: int, seconds: float) -> dict[str, Any]:
    """Paired times of every case against the dense layer.

    Args:
        cases: what to measure; those of one layer and number of rows run in one session.
        rounds: to keep of each session, if the time suffices.
        seconds: after which no further round of a session is begun.

    Returns:
        By case name ``speedup``, ``speedup_range``, ``rounds``, ``processor_share``, and of ``dense`` and ``comera``
        ``milliseconds``, ``parameters`` and ``raw_seconds``; ``time_ratio_r30_over_r32`` where both were asked for.
    """
    result: dict[str, Any] = {key: {} for key in ("speedup", "speedup_range", "rounds", "milliseconds", "parameters")}
    result |= {"processor_share": {}, "raw_seconds": {}}
    for _, group in groupby(cases, key=lambda c: (c.inner, c.out, c.rows)):
        session = list(group)
        steps = session_steps(session)
        timings = paired.compare({name: s.step for name, s in steps.items()}, DENSE, rounds=rounds, seconds=seconds)
        for case in session:
            _add(result, case, timings[case.name], steps)
        result.update(_rank_ratio(session, timings[DENSE]))
    return result


def session_steps(session: Iterable[Case]) -> dict[str, LinearStep]:
    """The dense layer and ours at every rank, over the same batches."""
    torch._dynamo.reset()  # what other cases compiled is not looked through at each call
    cases = list(session)
    batches = cases[0].batches()
    return {DENSE: build(DENSE, cases[0], batches), **{case.name: build(OURS, case, batches) for case in cases}}


def _add(result: dict[str, Any], case: Case, timing: paired.Timing, steps: Mapping[str, LinearStep]) -> None:
    spread = timing.speedup(case.name, DENSE)
    own = {DENSE: DENSE, OURS: case.name}
    result["speedup"][case.name] = spread.median
    result["speedup_range"][case.name] = [spread.low, spread.high]
    result["rounds"][case.name] = timing.rounds
    result["milliseconds"][case.name] = {name: 1e3 * timing.median(key) for name, key in own.items()}
    result["parameters"][case.name] = {name: steps[key].parameters for name, key in own.items()}
    result["processor_share"][case.name] = timing.share(torch.get_num_threads())
    result["raw_seconds"][case.name] = {name: timing.seconds[key] for name, key in own.items()}


def _rank_ratio(session: Sequence[Case], timing: paired.Timing) -> dict[str, Any]:
    """Time at rank 30 over time at rank 32, ratio taken inside each round; at most 1 is right."""
    names = {case.rank: case.name for case in session}
    if not set(RANK_PAIR) <= names.keys():
        return {}
    low, high = (names[rank] for rank in RANK_PAIR)
    ratio = timing.speedup(high, low)
    return {"time_ratio_r30_over_r32": ratio.median, "time_ratio_r30_over_r32_range": [ratio.low, ratio.high]}


def against_tensorly(cases: Sequence[Case], *, rounds: int, seconds: float) -> dict[str, Any]:
    """Ours against the faster of tensorly-torch's two ways at nearly equal parameters, in eager mode and compiled.

    Returns:
        ``speedup_over`` and ``tltorch`` with what stands behind it; ``not_measured`` with the reason where it is not
        installed; nothing where the case was not asked for.
    """
    if PEER_CASE not in cases:
        return {}
    torch._dynamo.reset()
    batches = PEER_CASE.batches()
    modes = {"eager": [name + EAGER for name in TENSORLY], "compiled": list(TENSORLY)}
    try:
        steps = {name: build(name, PEER_CASE, batches) for name in (OURS, *modes["eager"], *modes["compiled"])}
    except peers.PeerMissingError as reason:
        return {"not_measured": {"tltorch": str(reason)}}
    timing = paired.measure({name: s.step for name, s in steps.items()}, rounds=rounds, seconds=seconds)
    fastest = {mode: min(names, key=timing.median) for mode, names in modes.items()}
    spreads = {mode: timing.speedup(OURS, name) for mode, name in fastest.items()}
    facts = {
        "fastest": fastest,
        "range": {mode: [spread.low, spread.high] for mode, spread in spreads.items()},
        "rounds": timing.rounds,
        "ranks": list(nearest_ranks(PEER_CASE.shape)),
        "parameters": {name: s.parameters for name, s in steps.items()},
        "milliseconds": {name: 1e3 * timing.median(name) for name in steps},
    }
    over = {f"tltorch_{mode}": {"768x768_T512": spread.median} for mode, spread in spreads.items()}
    return {"speedup_over": over, "tltorch": facts}

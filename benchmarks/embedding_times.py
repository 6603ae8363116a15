"""Times of the embedding tables: ours beside the usual way of training each table, then beside the naive lookups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import paired
from benchmarks.embedding_cases import DENSE, NAIVES, OURS, SPARSE, TABLES, TUNED, sharing
from benchmarks.embedding_variants import build

WITH_NAIVE = ("lm", "table")
NAIVE_ROUNDS, NAIVE_SECONDS = 20, 10.0


def rival(name: str) -> str:
    """What a table is held against: AdamW over all rows of a language model's table, SparseAdam for a recommender's."""
    return DENSE if name.startswith("lm") else SPARSE


def measure(names: Sequence[str], *, rounds: int, seconds: float, naive: bool) -> dict[str, Any]:
    """Paired times of every table.

    Args:
        names: keys of :data:`TABLES`.
        rounds, seconds: limits of each session.
        naive: also the lookups without our kernels, eager and compiled, in sessions of their own: they are slow and
            leave the caches full of slices. Naive ones have cores and modes as tensor-train packages do, tuned ones our
            modes and cores that have their rows first.

    Returns:
        ``speedup`` and ``speedup_range`` by ``<table>_vs_<variant>`` (``naive_tt`` and ``tuned_tt``: the faster of each
        two); by table ``milliseconds``, ``rounds`` and ``parameters`` of each variant, ``ids``, ``processor_share`` and
        ``raw_seconds``.
    """
    by_table = ("milliseconds", "rounds", "parameters", "ids", "processor_share", "raw_seconds")
    result: dict[str, Any] = {key: {} for key in ("speedup", "speedup_range", *by_table)}
    for name in names:
        _session(result, name, [rival(name)], rounds=rounds, seconds=seconds)
        if naive and name in WITH_NAIVE:
            for pair in (NAIVES, TUNED):
                _session(result, name, pair, rounds=min(rounds, NAIVE_ROUNDS), seconds=min(seconds, NAIVE_SECONDS))
    return result


def _session(result: dict[str, Any], name: str, others: Sequence[str], *, rounds: int, seconds: float) -> None:
    """Time ours beside some others and merge the figures into ``result``; ours keeps those of its first session."""
    torch._dynamo.reset()
    table = TABLES[name]
    ids, grads = table.ids(), table.gradients()
    built = {variant: build(variant, table, ids, grads) for variant in (OURS, *others)}
    timing = paired.measure({v: b.step for v, b in built.items()}, rounds=rounds, seconds=seconds)
    figures: dict[str, dict[str, Any]] = {
        "milliseconds": {v: 1e3 * timing.median(v) for v in built},
        "rounds": dict.fromkeys(built, timing.rounds),
        "parameters": {v: b.parameters for v, b in built.items()},
    }
    for key, values in figures.items():
        result[key][name] = {**values, **result[key].get(name, {})}
    result["ids"][name] = {"distribution": table.distribution, **sharing(table, ids)}
    result["processor_share"].setdefault(name, timing.share(torch.get_num_threads()))
    result["raw_seconds"].setdefault(name, []).append(dict(timing.seconds))
    speeds = {variant: timing.speedup(OURS, variant) for variant in others}
    if others in (NAIVES, TUNED):
        speeds["naive_tt" if others == NAIVES else "tuned_tt"] = speeds[min(others, key=timing.median)]
    for variant, spread in speeds.items():
        result["speedup"][f"{name}_vs_{variant}"] = spread.median
        result["speedup_range"][f"{name}_vs_{variant}"] = [spread.low, spread.high]

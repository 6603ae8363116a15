"""Train a byte-level GPT on Python's own standard library twice, dense and with comera, and compare.

    python examples/train_code_lm.py              # about five minutes on two cores
    python examples/train_code_lm.py --short      # does it work here? about a minute
    python examples/train_code_lm.py --lr-sweep   # which learning rate suits which side?

Both sides have the same model, first weights, data, batches, optimizer and schedule. The only difference is one line:

    torch.compile(model)                                              # dense
    torch.compile(model, backend="comera", options={"rank": 32})      # comera

Each side runs in a process of its own, one after the other, so that neither disturbs the other's times.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from code_lm.comparing import compare, compare_rates, rate_table, table
from code_lm.data import load_corpus
from code_lm.settings import SIDES, Settings, Task, parse
from code_lm.training import Run, Trainer


def run_side(task: Task, side: str) -> None:
    """Train one side at one rate, or at each rate of a sweep; the runs go to a file."""
    trainer = Trainer(side, task.settings, load_corpus())
    runs = [trainer.train(lr, measure_memory=not task.sweep) for lr in task.sweep or (task.settings.lr,)]
    (task.out / f"{side}.json").write_text(json.dumps([run.to_json() for run in runs]))


def run_both(task: Task) -> dict[str, list[Run]]:
    """Each side in its own process, with the same arguments as this one and an empty compiler cache of its own.

    With a shared cache the second side, or the second call, would seem to compile faster than it does.
    """
    runs = {}
    for side in SIDES:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            done = subprocess.run(command, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache})
        if done.returncode:
            sys.exit(f"the {side} side failed, see above")
        runs[side] = [Run.from_json(run) for run in json.loads((task.out / f"{side}.json").read_text())]
    return runs


def report_curves(runs: dict[str, list[Run]], settings: Settings, out: Path) -> dict[str, Any]:
    """Table and picture of the two runs."""
    from code_lm.plotting import plot

    (dense,), (comera,) = runs["dense"], runs["comera"]
    result = compare(dense, comera, settings)
    text = table(dense, comera, result)
    print(text)
    (out / "table.txt").write_text(text + "\n")
    title = f"Byte-level GPT, {settings.blocks} blocks of width {settings.width}, trained on Python's standard library"
    plot([dense, comera], title, out / "curves.png")
    print(f"\ncurves: {out / 'curves.png'}")
    return result


def report_rates(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Table of held-out bits per byte for each rate."""
    result = compare_rates(runs)
    print(rate_table(result))
    return result


def main() -> None:
    """The whole comparison, or with the inner option ``--side`` one half of it."""
    task = parse()
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("matplotlib is needed for the picture: pip install 'comera-compile[examples]'")
    if task.settings.threads:
        torch.set_num_threads(task.settings.threads)
    task.out.mkdir(parents=True, exist_ok=True)
    if task.side:
        return run_side(task, task.side)
    runs = run_both(task)
    result = report_rates(runs) if task.sweep else report_curves(runs, task.settings, task.out)
    (task.out / "result.json").write_text(json.dumps(result, indent=1))
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main()

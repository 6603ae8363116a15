"""Both curves as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from code_lm.training import Run

COLOURS = {"dense": "#5b6570", "comera": "#d1495b"}


def plot(runs: list[Run], title: str, file: Path) -> None:
    """Held-out bits per byte over steps (left) and over time (right)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for run in runs:
        bits = [point.bits for point in run.points]
        style = {"color": COLOURS[run.side], "marker": "o", "markersize": 4}
        left.plot([point.step for point in run.points], bits, label=run.side, **style)
        seconds = [point.seconds for point in run.points]
        right.plot(seconds, bits, label=f"{run.side}, steps only", **style)
        late = [run.compile_seconds + second for second in seconds]
        right.plot(late, bits, label=f"{run.side}, with compilation", color=COLOURS[run.side], linestyle=":")
    finish(left, "steps")
    finish(right, "seconds")
    left.set_ylabel("held-out bits per byte")
    figure.suptitle(title)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def finish(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)

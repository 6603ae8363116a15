"""What every benchmark prints: its conditions, a readable table, and one ``RESULT {json}`` line at the end."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULT = "RESULT "


def conditions(**specific: Any) -> dict[str, Any]:
    """What a figure depends on: threads, versions, processor and commit, then whatever the benchmark adds."""
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "commit": commit(),
        **specific,
    }


def processor() -> str:
    """Model name of the first processor, or the machine type where the system does not say."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """Short commit of the checkout this file lies in, ``+`` appended when files differ from it; None outside git."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns under a head, the first left-aligned, the others right-aligned; None is shown as ``-``."""
    text = [list(head), *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[k]) for row in text) for k in range(len(head))]
    lines = [_line(row, widths) for row in text]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join([first.strip().ljust(widths[0]), *others])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"


def rounded(value: Any) -> Any:
    """The same nested object with floats cut to four significant digits, as a reader can use them."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def emit(result: Mapping[str, Any], *, raw: Mapping[str, Any], json_file: Path | None) -> None:
    """Print the ``RESULT`` line, which nothing may follow, and write the same with all raw rounds to a file.

    Args:
        result: JSON-able; must hold ``name`` and ``conditions``.
        raw: what only the file holds, under ``raw``.
        json_file: where to, or None.
    """
    if json_file is not None:
        json_file.write_text(json.dumps({**result, "raw": raw}, indent=1) + "\n")
    print(RESULT + json.dumps(rounded(result)), flush=True)

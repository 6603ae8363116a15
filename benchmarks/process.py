"""Fresh processes under a stated allocator: every figure says which one it was taken under."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.output import RESULT

ALLOCATORS: Mapping[str, Mapping[str, str]] = {
    # glibc keeps freed blocks: page faults stay out of the comparison of times
    "keep": {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"},
    # glibc returns freed blocks at once: the resident size follows the live bytes
    "return": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    "default": {},
}


class ChildError(RuntimeError):
    """A child process ended without a result."""


def environment(allocator: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of this process with the allocator's settings in the place of any others."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    return {**kept, **ALLOCATORS[allocator], **(extra or {})}


def malloc_settings() -> dict[str, str]:
    """Allocator settings under which this process runs; empty for glibc's defaults."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("MALLOC_")}


def require_allocator(allocator: str) -> None:
    """Execute this process anew, same arguments, unless it already runs under the allocator: glibc reads it once."""
    if malloc_settings() == dict(sorted(ALLOCATORS[allocator].items())):
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment(allocator))


def run_child(
    module: str, arguments: Sequence[str], *, allocator: str, extra: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run ``python -m module arguments`` and give back the object of its last ``RESULT`` line.

    Raises:
        ChildError: it failed or printed no result; the message holds the end of what it printed.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment(allocator, extra), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode != 0 or not lines:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise ChildError(f"{' '.join(command[1:])} ended with {done.returncode} and no result:\n{tail}")
    result: dict[str, Any] = json.loads(lines[-1][len(RESULT) :])
    return result

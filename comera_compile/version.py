"""The version of this package, and a fingerprint of its code for the disk cache of compiled graphs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

VERSION = "0.1.0"


@cache
def code_fingerprint() -> str:
    """Version and a digest of every source file.

    A cached graph is keyed by the names of the functions it calls, not by what they do; a changed package must not get
    graphs that an earlier state of it compiled.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return f"{VERSION}+{digest.hexdigest()[:16]}"

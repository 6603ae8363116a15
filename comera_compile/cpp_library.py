"""C++ of this package, compiled when it is first called with the toolchain that Inductor uses, and kept in its cache.

The cache is torch's, under ``TORCHINDUCTOR_CACHE_DIR``: keyed by the text and the command line, and safe with
several processes. Nothing depends on it: where there is no compiler, or it fails, callers go on with torch's own
operators and one warning says so.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

_log = logging.getLogger("comera_compile")

# Inductor forbids the compiler to contract a * b + c, so that results do not depend on it. These kernels are written
# for fused multiply-adds, which round once less.
_FLAGS = ("-ffp-contract=fast",)


@cache
def load_library(*sources: str) -> ctypes.CDLL | None:
    """The library made of the given source texts, one after the other; None where it cannot be built.

    Functions are declared ``extern "C"``, so that ctypes finds them.
    """
    try:
        return _load("\n".join(sources))
    except Exception as error:  # whatever a toolchain can do wrong: not found, not installed in full, killed
        reason = " ".join(str(error).split())
        _log.warning(
            "comera: the C++ kernels could not be built, torch's own operators run instead (slower). Install a working "
            "C++ compiler with OpenMP (Debian, Ubuntu: g++) or set CXX to one. The reason: %s",
            reason[:500],
        )
        return None


def _load(source: str) -> ctypes.CDLL:
    from torch._inductor.codecache import CppCodeCache  # heavy; only when a kernel is called

    load: Callable[..., Any] = CppCodeCache.load
    library = load(source, "cpu", extra_flags=_FLAGS)
    if not isinstance(library, ctypes.CDLL):
        raise TypeError(f"expected a library of torch's C++ cache, got {type(library).__name__}")
    return library

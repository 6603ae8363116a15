"""C++ of this package, compiled when it is first called with the toolchain that Inductor uses, and kept in its cache.

The cache is torch's, under ``TORCHINDUCTOR_CACHE_DIR``: keyed by the text and the command line, and safe with
several processes. Nothing depends on it: where there is no compiler, or it fails, callers go on with torch's own
operators and one warning says so.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from threading import Thread
from typing import Any

_log = logging.getLogger("comera_compile")

# Inductor forbids the compiler to contract a * b + c, so that results do not depend on it. These kernels are written
# for fused multiply-adds, which round once less.
_FLAGS = ("-ffp-contract=fast",)

# What is being built in the background, by process: a fork has the futures, but not the threads that fulfil them.
_started: dict[tuple[int, str], Future[ctypes.CDLL]] = {}


def start_building(*sources: str) -> None:
    """Begin in the background with what :func:`load_library` will be asked for: compilers take seconds.

    Calls for the same sources after the first do nothing.
    """
    key = os.getpid(), "\n".join(sources)
    if key not in _started:
        _started[key] = Future()
        Thread(target=_fulfil, args=(_started[key], key[1]), name="comera-build", daemon=True).start()


def _fulfil(promise: Future[ctypes.CDLL], source: str) -> None:
    try:
        promise.set_result(_load(source))
    except BaseException as error:  # belongs to whoever waits for the library
        promise.set_exception(error)


@cache
def load_library(*sources: str) -> ctypes.CDLL | None:
    """The library made of the given source texts, one after the other; None where it cannot be built.

    Functions are declared ``extern "C"``, so that ctypes finds them.
    """
    source = "\n".join(sources)
    started = _started.get((os.getpid(), source))
    try:
        return _load(source) if started is None else started.result()
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

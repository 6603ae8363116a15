"""Let the C library keep the memory that every step frees and takes again, and give back what is freed for good.

With many rows a step allocates and frees dozens of 10-50 MB tensors. glibc maps and unmaps each (2.7x on a single TT
linear of 4096 rows), which costs TT models most, since they have little arithmetic to hide it behind. PyTorch's CPU
allocator has no cache of its own.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform

_log = logging.getLogger("comera_compile")
# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1
_ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES", "LD_PRELOAD")
_done: list[bool] = []


def keep_freed_memory() -> bool:
    """Tell glibc once to keep freed memory for this process.

    Does nothing without glibc, or where the environment already sets an allocation policy.

    Returns:
        Whether the policy is in force through this call or an earlier one.
    """
    if _done:
        return _done[0]
    _done.append(_apply())
    return _done[0]


def return_freed_memory() -> bool:
    """Give pages that are free now back to the kernel: the dense weights, once they have been replaced.

    glibc maps only its first large blocks; later ones lie in the heap, whose holes it keeps.

    Returns:
        Whether it gave any back (never without glibc).
    """
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL("libc.so.6").malloc_trim(0))


def _apply() -> bool:
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _ENVIRONMENT):
        return False
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    accepted = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
    _log.debug("comera: glibc keeps freed memory: %s", accepted)
    return accepted

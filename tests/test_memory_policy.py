"""The C library's allocation policy: set once where nobody else has set one, and nowhere else.

Each case is a process of its own, since the policy holds for the rest of a process.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from comera_compile import memory_policy

POLICIES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES", "LD_PRELOAD")
GLIBC = platform.libc_ver()[0] == "glibc"
needs_glibc = pytest.mark.skipif(not GLIBC, reason="the C library is not glibc")

# The module by itself: a process without torch starts in no time. ``mapped`` is how many mappings of its own one fresh
# block of 64 MB gets: glibc maps large blocks singly unless it was told not to.
ALONE = f"""
import ctypes, runpy
policy = runpy.run_path({memory_policy.__file__!r})

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keep")]

libc = ctypes.CDLL("libc.so.6")
libc.mallinfo.restype, libc.malloc.restype, libc.free.argtypes = Info, ctypes.c_void_p, [ctypes.c_void_p]

def allocate(size):
    block = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(ctypes.c_void_p(block), 1, size)
    return block

def mapped():
    before = libc.mallinfo().hblks
    block = allocate(64 << 20)
    after = libc.mallinfo().hblks
    libc.free(block)
    return after - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
"""
KEEP = """
first = mapped()
print(policy["keep_freed_memory"](), policy["keep_freed_memory"](), first, mapped())
"""
# 40 MB in small blocks, which lie in the heap; one more above them, so that its end cannot simply be cut off.
RETURN = """
blocks = [allocate(100_000) for _ in range(400)]
last, full = allocate(100_000), resident()
for block in blocks:
    libc.free(block)
held = resident()
print(policy["return_freed_memory"](), full - held, full - resident())
"""

BACKEND = """
import torch
from torch import nn
from comera_compile import memory_policy

calls = []
memory_policy._apply = lambda: bool(calls.append(1)) or True
options = {"inner": "eager", "min_elements": 500, "rank": 2, "order": 2}
for keep in (False, True, True):
    torch._dynamo.reset()
    torch.compile(nn.Linear(32, 48), backend="comera", options=options | {"keep_memory": keep})(torch.ones(2, 32))
    print(len(calls))
"""


def run(code: str, **variables: str) -> list[str]:
    """What a fresh process prints; ``variables`` are all that its environment says about allocation."""
    environment = {name: value for name, value in os.environ.items() if name not in POLICIES} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@needs_glibc
def test_freed_memory_is_kept() -> None:
    # It says so, the second call too; large blocks come from the heap afterwards instead of a mapping of their own.
    assert run(ALONE + KEEP) == ["True", "True", "1", "0"]


@needs_glibc
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "65536"),
        ("MALLOC_TRIM_THRESHOLD_", "65536"),
        ("MALLOC_MMAP_MAX_", "100"),
        ("GLIBC_TUNABLES", "glibc.malloc.check=0"),
        ("LD_PRELOAD", ""),
    ],
)
def test_a_policy_of_the_environment_is_respected(name: str, value: str) -> None:
    # Whoever set one has measured, or runs another allocator: nothing changes, and the answer says so.
    assert run(ALONE + KEEP, **{name: value}) == ["False", "False", "1", "1"]


@needs_glibc
def test_freed_memory_is_returned() -> None:
    # What the dense weights took lies in holes of the heap, which glibc keeps until it is told.
    returned, at_once, after = run(ALONE + RETURN)
    assert returned == "True" and int(at_once) < 4e6 and int(after) > 36e6


def test_compiling_applies_it_once() -> None:
    # Neither the import nor a model with the option off; the first graph with it on does, further ones do not.
    assert run(BACKEND) == ["0", "1", "1"]

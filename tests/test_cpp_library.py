"""C++ built in the background, before it is asked for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import comera_compile as comera
from comera_compile import cpp_library
from comera_compile.cpp_library import load_library, start_building

LIBRARY = ctypes.CDLL(None)  # this process itself: what a library is does not matter here


@pytest.fixture(autouse=True)
def _nothing_built() -> Iterator[None]:
    def forget() -> None:
        cpp_library._started.clear()
        load_library.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was built, and by which thread."""
    done: list[tuple[str, str]] = []

    def load(source: str) -> ctypes.CDLL:
        done.append((source, threading.current_thread().name))
        return LIBRARY

    monkeypatch.setattr(cpp_library, "_load", load)
    return done


def test_what_was_begun_is_not_built_again(loads: list[tuple[str, str]]) -> None:
    start_building("one", "two")
    start_building("one", "two")
    assert load_library("one", "two") is LIBRARY
    assert loads == [("one\ntwo", "comera-build")]


def test_what_was_not_begun_is_built_when_it_is_asked_for(loads: list[tuple[str, str]]) -> None:
    start_building("one")
    assert load_library("two") is LIBRARY
    assert ("two", threading.current_thread().name) in loads


def test_waits_for_a_build_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def load(source: str) -> ctypes.CDLL:
        assert go_on.wait(30)
        return LIBRARY

    monkeypatch.setattr(cpp_library, "_load", load)
    start_building("slow")
    threading.Timer(0.05, go_on.set).start()
    assert load_library("slow") is LIBRARY


def test_an_error_in_the_background_is_told_when_the_library_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(source: str) -> ctypes.CDLL:
        raise OSError("no compiler here")

    monkeypatch.setattr(cpp_library, "_load", load)
    start_building("broken")
    assert load_library("broken") is None
    assert "no compiler here" in caplog.text and "torch's own operators" in caplog.text


def test_a_fork_does_not_wait_for_threads_it_does_not_have(
    loads: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = threading.Event()
    build: Callable[[str], ctypes.CDLL] = cpp_library._load
    monkeypatch.setattr(cpp_library, "_load", lambda source: hold.wait(30) and LIBRARY)
    start_building("shared")
    monkeypatch.setattr(cpp_library, "_load", build)
    monkeypatch.setattr(cpp_library.os, "getpid", lambda: -1)
    assert load_library("shared") is LIBRARY and loads == [("shared", threading.current_thread().name)]
    hold.set()


def test_a_first_call_begins_with_what_its_weights_want(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr("comera_compile.codegen.cpu.build_ahead.start_building", lambda *s: begun.append("".join(s)))

    class Both(nn.Module):
        def __init__(self, attends: bool) -> None:
            super().__init__()
            self.attends = attends
            self.table, self.linear, self.small = nn.Embedding(512, 64), nn.Linear(64, 64), nn.Linear(64, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.linear(self.table(ids))
            return self.small(F.scaled_dot_product_attention(x, x, x) if self.attends else x)

    options = {"rank": 4, "init": "random", "min_elements": 1000, "inner": "aot_eager"}
    for attends in (False, True):
        begun.clear()
        torch.compile(Both(attends), backend=comera.Backend(**options))(torch.zeros(4, dtype=torch.long))
        entries = ("ttm_lookup(", "void merge(", "void narrow(")
        assert all(any(entry in text for text in begun) for entry in entries), [text[:60] for text in begun]
        assert any("void attend(" in text for text in begun) == attends
    begun.clear()
    torch.compile(nn.Linear(8, 8), backend=comera.Backend(**options))(torch.zeros(4, 8))
    assert begun == []  # nothing is a tensor train

"""The cache on disk: entries survive other writers, killed writers and garbage, and are never needed."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import comera_compile as comera
from comera_compile import user_cache
from comera_compile.calibrate import calibrated_model
from tests import tiny_models as tiny

# Stores entries until it is killed, then more: every one is large, so that a reader would catch it half written.
WRITER = """
import sys
from comera_compile import user_cache
name, count = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
for k in range(count):
    user_cache.store("plans", "shared", {"writer": name, "fill": [name] * 20000})
    user_cache.store("plans", f"{name} {k}", {"writer": name})
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    monkeypatch.setenv("COMERA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "_said", set())
    return tmp_path / "cache"


def start(name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, name, str(count)], stdout=subprocess.PIPE, text=True)


def ready(*writers: subprocess.Popen[str]) -> None:
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"


def test_what_is_stored_is_loaded(cache: Path) -> None:
    value = {"plan": "tt cols 3 3 16", "seconds": 1.5e-3, "ranges": [[32, "é"], [None, "b"]]}
    path = user_cache.store("plans", "a layer | torch 2", value)
    assert path is not None and cache in path.parents
    assert user_cache.load("plans", "a layer | torch 2") == value
    assert user_cache.load("plans", "another") is None
    assert user_cache.load("calibration", "a layer | torch 2") is None  # namespaces are apart
    user_cache.store("plans", "a layer | torch 2", {"new": 1})
    assert user_cache.load("plans", "a layer | torch 2") == {"new": 1}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"COMERA_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"COMERA_CACHE_DIR": "~/mine", "HOME": "/h"}, "/h/mine"),
        ({"COMERA_CACHE_DIR": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/comera_compile"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/comera_compile"),  # invalid by the specification
        ({"HOME": "/h"}, "/h/.cache/comera_compile"),
    ],
)
def test_directory(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("COMERA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert user_cache.directory() == Path(expected)


def test_two_writers_at_once_lose_nothing() -> None:
    writers = [start("first", 40), start("second", 40)]
    ready(*writers)
    seen = set()
    while any(writer.poll() is None for writer in writers):
        held = user_cache.load("plans", "shared")
        if held is not None:  # one writer's whole entry at any moment, never a mixture
            assert held["fill"] == [held["writer"]] * 20000
            seen.add(held["writer"])
    assert [writer.wait() for writer in writers] == [0, 0]
    assert seen <= {"first", "second"} and seen
    for name in ("first", "second"):
        assert all(user_cache.load("plans", f"{name} {k}") == {"writer": name} for k in range(40))
    assert not [entry for entry in user_cache.entries() if entry.key is None]


def test_a_killed_writer_leaves_whole_entries(cache: Path) -> None:
    for attempt in range(3):
        writer = start("killed", 100_000)
        ready(writer)
        time.sleep(0.05 * (attempt + 1))
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        # Whatever it was doing: every entry is whole, and the next writer works.
        assert not [entry for entry in user_cache.entries() if entry.key is None]
        held = user_cache.load("plans", "shared")
        assert held is None or held["fill"] == ["killed"] * 20000
        assert user_cache.store("plans", "shared", {"writer": "next", "fill": ["next"] * 20000}) is not None
        user_cache.clear()
        assert list((cache / "plans").iterdir()) == []


def test_what_a_killed_writer_left_goes_after_an_hour(cache: Path) -> None:
    user_cache.store("plans", "a", {})
    old, fresh = cache / "plans" / "0123.x.tmp", cache / "plans" / "0123.y.tmp"
    for path in (old, fresh):
        path.write_text("{")
    os.utime(old, (time.time() - 4000, time.time() - 4000))
    user_cache.store("plans", "b", {})
    assert not old.exists() and fresh.exists()  # a fresh one may belong to a living writer


GARBAGE = {
    "empty": b"",
    "cut off": b'{"format": 1, "key": "k", "value": {"a"',
    "bytes": bytes(range(256)),
    "nested without end": b"[" * 100_000,
    "a list": b"[1, 2]",
    "other fields": b'{"value": {}}',
    "a value that is no object": b'{"format": 1, "key": "k", "value": 3}',
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_damaged_file_is_ignored_with_one_warning(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = user_cache.store("plans", "k", {"a": 1})
    assert path is not None
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        assert [user_cache.load("plans", "k") for _ in range(3)] == [None] * 3
    [record] = caplog.records
    assert str(path) in record.getMessage() and "damaged" in record.getMessage()
    assert [entry.key for entry in user_cache.entries()] == [None]
    assert user_cache.store("plans", "k", {"a": 2}) == path
    assert user_cache.load("plans", "k") == {"a": 2}


@pytest.mark.parametrize("change", [{"key": "other"}, {"format": 99}])
def test_an_entry_of_another_key_or_format_is_none(change: dict[str, Any]) -> None:
    # A file copied under a wrong name, or written by a later version: no damage, and not ours.
    path = user_cache.store("plans", "k", {"a": 1})
    assert path is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert user_cache.load("plans", "k") is None


def test_an_unwritable_directory_works_without_a_cache_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A file where the directory should be: refused for every user, the superuser among them.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMERA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        assert [user_cache.store("plans", str(k), {}) for k in range(3)] == [None] * 3
    [record] = caplog.records
    assert str(tmp_path / "file" / "cache") in record.getMessage() and "COMERA_CACHE_DIR" in record.getMessage()
    assert user_cache.load("plans", "0") is None
    assert user_cache.entries() == [] and user_cache.clear() == 0


def call_without_a_cache(
    where: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[logging.LogRecord]:
    """What is said while models of two dtypes, hence two calibrations, are compiled with that cache."""
    monkeypatch.setenv("COMERA_CACHE_DIR", str(where))
    calibrated_model.cache_clear()
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        for dtype in (torch.float32, torch.float64):
            model, x = tiny.Mlp().to(dtype), tiny.rows(6, dtype=dtype)
            torch.compile(model, backend="comera", options=tiny.OPTIONS)(x).sum().backward()
            assert len(tiny.packed_names(model)) == 2 and comera.report(model)["fc1.weight"].uses[0].plan
    calibrated_model.cache_clear()
    return [r for r in caplog.records if "cache" in r.getMessage()]


def test_a_file_as_cache_directory_is_told_once_by_compiled_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The models train by the shipped figures; the variable that is wrong is named.
    (tmp_path / "file").write_text("mine")
    [record] = call_without_a_cache(tmp_path / "file", monkeypatch, caplog)
    assert "no cache" in record.getMessage() and str(tmp_path / "file") in record.getMessage()
    assert "set COMERA_CACHE_DIR to a directory that can be written" in record.getMessage()
    assert user_cache.store("plans", "k", {}) is None and "cache" not in caplog.records[-1].getMessage()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no directory that refuses every user")
def test_a_directory_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # Nothing is there to read, which is no news; the first thing to be stored is lost, which is, once.
    where = Path("/proc/comera_cache")
    assert call_without_a_cache(where, monkeypatch, caplog) == []
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        assert user_cache.store("plans", "a", {}) is None and user_cache.store("calibration", "b", {}) is None
    [record] = caplog.records
    assert "/proc/comera_cache" in record.getMessage() and "COMERA_CACHE_DIR" in record.getMessage()


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("COMERA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does where no home is known
    with caplog.at_level(logging.WARNING, logger="comera_compile"):
        assert user_cache.directory() is None
        assert user_cache.store("plans", "k", {}) is None and user_cache.store("plans", "k", {}) is None
        assert user_cache.load("plans", "k") is None and user_cache.entries() == [] and user_cache.clear() == 0
    assert len(caplog.records) == 1


def test_a_write_that_fails_leaves_the_old_entry(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_cache.store("plans", "k", {"a": 1})

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert user_cache.store("plans", "k", {"a": 2}) is None
    assert user_cache.load("plans", "k") == {"a": 1}
    assert [path.suffix for path in (cache / "plans").iterdir()] == [".json"]  # nor a temporary file


def test_a_value_that_is_no_json_is_the_callers_error(cache: Path) -> None:
    with pytest.raises(TypeError):
        user_cache.store("plans", "k", {"a": object()})
    assert not (cache / "plans").exists()


def test_list_and_clear_touch_only_entries(cache: Path) -> None:
    user_cache.store("plans", "b", {"a": 1})
    user_cache.store("plans", "a", {})
    user_cache.store("calibration", "c", {})
    (cache / "notes.txt").write_text("mine")
    (cache / "plans" / "notes.txt").write_text("mine")
    assert [(e.namespace, e.key) for e in user_cache.entries()] == [
        ("calibration", "c"),
        ("plans", "a"),
        ("plans", "b"),
    ]
    assert all(e.bytes == e.path.stat().st_size > 0 for e in user_cache.entries())
    assert user_cache.clear() == 3
    assert user_cache.entries() == []
    assert (cache / "notes.txt").exists() and (cache / "plans" / "notes.txt").exists()

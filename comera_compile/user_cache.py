"""What was measured on this machine, kept on disk between runs: one JSON file an entry, under a namespace and a key.

Several processes may write at once and any of them may be killed: an entry is written to a temporary file beside it and
then takes its name in one step, so a reader sees the old entry, the new one, or none. A cache is never needed: where it
cannot be written or read the package goes on without it and says so once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

try:
    import fcntl
except ImportError:  # not a Unix: updates at the same moment may lose one of them
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("comera_compile")

Namespace = Literal["calibration", "plans"]
NAMESPACES: tuple[Namespace, ...] = ("calibration", "plans")
VARIABLE = "COMERA_CACHE_DIR"
_FORMAT = 1
_ENTRY, _TEMPORARY = ".json", ".tmp"
# A writer needs milliseconds: an older temporary file is that of a killed one.
_STALE_SECONDS = 3600.0
# A holder of the lock needs milliseconds: one that takes longer has been stopped.
_LOCK, _LOCK_SECONDS = "lock", 5.0
_said: set[str] = set()


@dataclass(frozen=True)
class Entry:
    """One file of the cache; ``key`` is None where the file is damaged."""

    namespace: Namespace
    key: str | None
    path: Path
    bytes: int


def directory() -> Path | None:
    """``$COMERA_CACHE_DIR``, else ``$XDG_CACHE_HOME/comera_compile``, else ``~/.cache/comera_compile``.

    Returns:
        The directory, which need not exist yet; None where none of these is known (no home directory).
    """
    if chosen := os.environ.get(VARIABLE):
        return Path(os.path.expanduser(chosen)).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is invalid there and to be ignored (XDG base directory specification).
    base = Path(shared) if os.path.isabs(shared) else Path(os.path.expanduser("~")) / ".cache"
    return base / "comera_compile" if base.is_absolute() else None


def load(namespace: Namespace, key: str) -> dict[str, Any] | None:
    """The JSON object stored under a key, or None.

    A damaged file counts as none, with a warning; the next :func:`store` under its key replaces it.
    """
    path = _path(namespace, key)
    if path is None:
        return None
    try:
        held = _read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _say_unusable(path.parent, "read", error)
        return None
    except _DamagedError as error:
        _say_once(str(path), f"{path} is damaged ({error}) and ignored; it is replaced when its entry is next stored")
        return None
    # Equal digests of unequal keys do not happen by chance; a file that was copied about may lie under a wrong name.
    return held["value"] if held["format"] == _FORMAT and held["key"] == key else None


def store(namespace: Namespace, key: str, value: Mapping[str, Any]) -> Path | None:
    """Store a JSON object under a key, in the place of what is there.

    Returns:
        The file, or None where it could not be written (said once a directory).

    Raises:
        TypeError: the value is not JSON.
    """
    text = json.dumps({"format": _FORMAT, "key": key, "value": dict(value)})
    path = _path(namespace, key)
    if path is None:
        _say_once("", f"no cache: there is no home directory; set {VARIABLE} to a directory that can be written")
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
        _remove_stale(path.parent)
    except OSError as error:
        _say_unusable(path.parent, "write to", error)
        return None
    return path


def update(namespace: Namespace, key: str, change: Callable[[dict[str, Any] | None], Mapping[str, Any]]) -> Path | None:
    """Store what ``change`` makes of the entry under a key, without losing what other processes add meanwhile.

    Args:
        namespace, key: the entry.
        change: from the object that is there (None: none that can be read) to the one to store.

    Returns:
        As :func:`store`.
    """
    path = _path(namespace, key)
    with _locked(None if path is None else path.parent):
        return store(namespace, key, change(load(namespace, key)))


def entries() -> list[Entry]:
    """What the cache holds, damaged files included, sorted by namespace and key."""
    found = [_entry(namespace, path) for namespace, path in _files() if path.suffix == _ENTRY]
    return sorted(found, key=lambda e: (e.namespace, e.key or "", e.path.name))


def clear() -> int:
    """Delete every entry and what killed writers left; other files in the directory stay.

    Returns:
        Number of entries deleted.

    Raises:
        OSError: a file cannot be deleted.
    """
    count = 0
    for _, path in list(_files()):
        path.unlink(missing_ok=True)
        count += path.suffix == _ENTRY
    return count


class _DamagedError(ValueError):
    """A file that is no entry."""


def _path(namespace: Namespace, key: str) -> Path | None:
    base = directory()
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    return None if base is None else base / namespace / f"{digest}{_ENTRY}"


@contextmanager
def _locked(folder: Path | None) -> Iterator[None]:
    """One process at a time inside. The system gives a lock back when its process ends, however it ends."""
    handle = None if folder is None else _open_lock(folder)
    try:
        if handle is not None:
            _wait_for(handle)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _open_lock(folder: Path) -> int | None:
    if fcntl is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # store will say so
        return None


def _wait_for(handle: int) -> None:
    """Take the lock, or go on without it where that takes too long or the file system has no locks."""
    latest = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < latest:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.005)
        except OSError:
            return


def _read(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise _DamagedError(str(error)) from None
    if not isinstance(held, dict) or {"format", "key", "value"} - held.keys() or not isinstance(held["value"], dict):
        raise _DamagedError("not an entry of this cache")
    return held


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(suffix=_TEMPORARY, prefix=f"{path.stem}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(f"*{_TEMPORARY}"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
        except FileNotFoundError:  # another process was faster
            continue


def _files() -> Iterator[tuple[Namespace, Path]]:
    base = directory()
    for namespace in NAMESPACES if base is not None else ():
        assert base is not None
        for path in sorted((base / namespace).glob("*")):
            if path.suffix in (_ENTRY, _TEMPORARY) and path.is_file():
                yield namespace, path


def _entry(namespace: Namespace, path: Path) -> Entry:
    try:
        key, size = str(_read(path)["key"]), path.stat().st_size
    except (_DamagedError, OSError):
        key, size = None, 0
    return Entry(namespace, key, path, size)


def _say_unusable(folder: Path, doing: str, error: OSError) -> None:
    """Once a cache, whichever of its folders and entries it is."""
    text = f"no cache: cannot {doing} {error.filename or folder} ({error.strerror}); going on without"
    _say_once(str(folder.parent), f"{text}; set {VARIABLE} to a directory that can be written")


def _say_once(about: str, text: str) -> None:
    if about not in _said:
        _said.add(about)
        _log.warning("comera: %s", text)

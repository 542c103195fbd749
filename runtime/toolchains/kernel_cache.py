"""Compiled kernels in memory and in a private folder on disk, safe for many processes.

Invariant: nothing is loaded from disk unless only this user can write to its folder, and unless its content has the
hash that its name and its index entry promise; an entry names the one symbol that its own key stands for. Files appear
whole (temporary name, then `os.replace`); what is truncated or foreign is deleted, logged and built again.

Layout: `binaries/<sha256 of content>.so`, `index/<key[:2]>/<key>.json` = {"binary", "symbol"}, and `sources/` for the
languages whose compiler reads a file.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger("torchlazy.runtime")

FOLDERS = ("programs", "index", "binaries", "sources", "triton", "tuning")  # what the cache folder is made of
_ATTEMPTS = 3


def symbol_of(key: str) -> str:
    """The name under which a library exports the kernel of that key."""
    return f"kernel_{key[:32]}"


@dataclass(frozen=True, slots=True)
class CachedBinary:
    """Where one compiled kernel is: a shared library and the symbol in it."""

    path: Path
    symbol: str


@dataclass
class KernelCache:
    """Kernels by key: `memory` holds loaded functions, `folder` what survives the process."""

    folder: Path
    memory: dict[str, Any] = field(default_factory=dict)
    _checked: dict[Path, bool] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find_binary(self, key: str) -> CachedBinary | None:
        """The library and symbol stored for `key`, content checked; None if there is nothing that can be trusted."""
        entry_path = self._entry_path(key)
        try:
            entry = json.loads(read_regular(entry_path))
            digest, symbol = entry["binary"], entry["symbol"]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._discard(entry_path, f"unreadable index entry ({error})")
            return None
        if not (isinstance(digest, str) and isinstance(symbol, str) and len(digest) == 64 and digest.isalnum()):
            self._discard(entry_path, "index entry of a foreign form")
            return None
        if symbol != symbol_of(key):  # another kernel's entry under this name: its library is sound, and not ours
            self._discard(entry_path, "index entry of another kernel")
            return None
        path = self._binary_path(digest)
        if not self._is_intact(path, digest):
            self._discard(entry_path, "its library is missing or damaged")
            return None
        with contextlib.suppress(OSError):
            os.utime(entry_path)
        return CachedBinary(path, symbol)

    def store_binary(self, content: bytes, keys: Iterable[str]) -> Path:
        """Keep a library that exports `symbol_of` each of these keys, and point the keys at it; returns its path.

        Where the folder takes no more (a full disk), the library goes to a private temporary folder of this process.
        """
        digest = hashlib.sha256(content).hexdigest()
        try:
            return self._store(digest, content, keys)
        except OSError as error:
            path = _private_folder(self.folder, f"it takes no more ({error})") / f"{digest}.so"
            write_atomically(path, content)
            return path

    def in_private_folder(self, complaint: str) -> KernelCache:
        """A cache in a private temporary folder of this process, for what cannot stay in this one."""
        return KernelCache(_private_folder(self.folder, complaint))

    def _store(self, digest: str, content: bytes, keys: Iterable[str]) -> Path:
        path = self._binary_path(digest)
        if not self._is_intact(path, digest):
            write_atomically(path, content)
            with self._lock:
                self._checked[path] = True
        for key in keys:
            entry = json.dumps({"binary": digest, "symbol": symbol_of(key)})
            write_atomically(self._entry_path(key), entry.encode())
        return path

    def source_file(self, language: str, key: str, text: str) -> Path:
        """A Python file with exactly this text, for compilers that read files; kept when it is already there, because
        its age is part of what such compilers cache by. Where the folder takes no more: in a private temporary one."""
        name = Path("sources", language, f"k{key}.py")
        try:
            return self._source_file(self.folder / name, text.encode())
        except OSError as error:
            return self._source_file(_private_folder(self.folder, f"it takes no more ({error})") / name, text.encode())

    def _source_file(self, path: Path, content: bytes) -> Path:
        try:
            if read_regular(path) == content:
                return path
            self._discard(path, "its text does not match its name")
        except FileNotFoundError:
            pass
        write_atomically(path, content)
        return path

    def _binary_path(self, digest: str) -> Path:
        return self.folder / "binaries" / f"{digest}.so"

    def _entry_path(self, key: str) -> Path:
        return self.folder / "index" / key[:2] / f"{key}.json"

    def _is_intact(self, path: Path, digest: str) -> bool:
        """Whether the library has the content that its name promises; read once a process. Another process may have
        cleared the folder since."""
        with self._lock:
            if path in self._checked and path.is_file():
                return True
        try:
            content = read_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            self._discard(path, f"unreadable ({error})")
            return False
        if hashlib.sha256(content).hexdigest() != digest:
            self._discard(path, "its content has another hash than its name")
            return False
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used are evicted first
        with self._lock:
            self._checked[path] = True
        return True

    def _discard(self, path: Path, reason: str) -> None:
        try:
            path.unlink(missing_ok=True)  # another process may be repairing the same file: gone is as good as deleted
            log.warning("kernel cache: deleted %s, it is built again: %s", path, reason)
        except OSError as error:  # another user's, or a folder: what stands there is built again in each process
            log.warning("kernel cache: %s is built again: %s; remove it by hand (%s)", path, reason, error)


def default_folder() -> Path:
    """TORCHLAZY_CACHE_DIR, else ~/.cache/torchlazy; a full path, also where the program goes to another folder."""
    wish = os.environ.get("TORCHLAZY_CACHE_DIR")
    return (Path(wish).expanduser() if wish else Path.home() / ".cache" / "torchlazy").absolute()


def open_cache(folder: str | os.PathLike[str] | None = None) -> KernelCache:
    """The cache in `folder`, else in `default_folder()`.

    A folder that another user owns or that others may write is refused with a warning: libraries are loaded from it, so
    whoever can write there can run code as this user. A private temporary folder takes its place; where none can be
    made, kernels cannot be compiled, and programs run operator by operator.
    """
    place = Path(folder).absolute() if folder else default_folder()
    complaint = _prepare(place)
    if complaint is None:
        return KernelCache(place)
    try:
        return KernelCache(_private_folder(place, complaint))
    except OSError as error:
        log.warning("kernel cache: %s is not used: %s; no temporary folder either: %s", place, complaint, error)
        return KernelCache(Path(os.devnull) / "torchlazy")  # nothing is found there, and nothing kept


_private: dict[tuple[Path, int], Path] = {}  # by the folder that they stand for, and process
_private_lock = threading.Lock()


def _private_folder(place: Path, complaint: str) -> Path:
    """A temporary folder of this process in the place of one that cannot be used; said once."""
    with _private_lock:
        found = _private.get((place, os.getpid()))
        if found is not None:
            return found
        private = _private[place, os.getpid()] = Path(tempfile.mkdtemp(prefix="torchlazy-"))
    atexit.register(_remove, private, os.getpid())
    log.warning(
        "kernel cache: %s is not used: %s. Kernels of this process are kept in %s and lost at its end. "
        "Remedy: set TORCHLAZY_CACHE_DIR to a folder of your own, with mode 0700 and space left.",
        place,
        complaint,
        private,
    )
    return private


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child that ends leaves its parent's folder alone
        shutil.rmtree(folder, ignore_errors=True)


def complaint_about(folder: Path) -> str | None:
    """Why a folder that is there, or a folder of ours in it, cannot be trusted or used; None if nothing is wrong."""
    complaint = _complaint_about(folder)
    for name in FOLDERS if complaint is None else ():
        try:
            if inner := _complaint_about(folder / name):
                return f"{inner}: its folder {name}"
        except FileNotFoundError:
            continue
    return complaint


def _complaint_about(folder: Path) -> str | None:
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is no folder"
    if not hasattr(os, "getuid"):
        return None
    if status.st_uid != os.getuid():
        return f"it is owned by user {status.st_uid}, this process runs as user {os.getuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "it is read-only"
    return None


def _prepare(folder: Path) -> str | None:
    """Create the folder for this user alone; what is wrong with it, or None."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return complaint_about(folder)
    except OSError as error:
        return f"it cannot be created ({error})"


def read_regular(path: Path) -> bytes:
    """The content of a file. OSError for anything else that stands there: reading from a pipe would wait for a writer,
    from a device without end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is no regular file")
        return file.read()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that other processes see whole or not at all. Another one may clear the folder meanwhile."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return _write_once(path, content)
    _write_once(path, content)


def _write_once(path: Path, content: bytes) -> None:
    _make_private(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _make_private(folder: Path) -> None:
    """Create a folder and those above it for this user alone (`mkdir` gives its mode to the last one only)."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)

"""The cache folder as a whole: what is in it, how large it is, what goes first when it is too large.

Invariant: only files named as this package names them are ever counted or deleted, whatever folder is given; a file
that another process deletes or replaces meanwhile is no error. Whoever uses a file touches it: the oldest goes first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchlazy.runtime.toolchains.kernel_cache import read_regular, symbol_of

log = logging.getLogger("torchlazy.runtime")

_NAMES = {
    "programs": re.compile(r"[0-9a-f]{64}\.json"),
    "index": re.compile(r"[0-9a-f]{64}\.json"),
    "binaries": re.compile(r"[0-9a-f]{64}\.so"),
    "sources": re.compile(r"k[0-9a-f]{64}[.-].*"),  # Python, and what Numba and Python keep beside it
    "triton": re.compile(r"[0-9a-f]{64}\.done"),
    "tuning": re.compile(r"[0-9a-f]{64}\.json"),
}
KINDS = tuple(_NAMES)
DEFAULT_LIMIT = 2 << 30
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_ABANDONED = 3600.0  # seconds after which nobody is still writing a temporary file
_SECONDS_BETWEEN_EVICTIONS = 60.0
_next_eviction: dict[Path, float] = {}


@dataclass(frozen=True, slots=True)
class CacheFile:
    """One file of the cache."""

    kind: str  # one of KINDS
    path: Path
    size: int
    mtime: float


def size_limit() -> int:
    """Bytes that the folder may hold: TORCHLAZY_CACHE_SIZE ("500M", "2GiB", plain bytes), else 2 GiB."""
    text = os.environ.get("TORCHLAZY_CACHE_SIZE", "").strip()
    return parse_size(text) if text else DEFAULT_LIMIT


def parse_size(text: str) -> int:
    """ "1.5G" -> 1610612736; units are powers of 1024. ValueError for anything else."""
    found = _SIZE.fullmatch(text)
    size = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if size <= 0:
        raise ValueError(
            f'TORCHLAZY_CACHE_SIZE is {text!r}: give a size above zero such as "500M", "2GiB" or "1000000"'
        )
    return size


def list_files(folder: Path) -> list[CacheFile]:
    """Every file of the cache that can be listed, in no particular order."""
    return [
        CacheFile(kind, Path(path), size, mtime)
        for kind in KINDS
        for path, size, mtime in _walk(os.path.join(folder, kind))
        if _NAMES[kind].fullmatch(name := os.path.basename(path)) or name.startswith(".tmp-")
    ]


def _walk(folder: str) -> Iterator[tuple[str, int, float]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # not there, no folder, or another user's
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            else:
                status = entry.stat(follow_symlinks=False)
                yield entry.path, status.st_size, status.st_mtime
        except OSError:  # deleted by another process
            continue


def delete(files: Sequence[CacheFile]) -> tuple[list[CacheFile], list[OSError]]:
    """Delete these files; returns which are gone, and why the others are not."""
    gone: list[CacheFile] = []
    errors: list[OSError] = []
    for file in files:
        try:
            file.path.unlink(missing_ok=True)
            gone.append(file)
        except OSError as error:  # in a folder of another user's
            errors.append(error)
    return gone, errors


def evict_now_and_then(folder: Path, limit: int | None = None) -> None:
    """`evict`, but at most once a minute and process; `limit` is by default that of the environment."""
    now = time.monotonic()
    if now >= _next_eviction.get(folder, 0.0):
        _next_eviction[folder] = now + _SECONDS_BETWEEN_EVICTIONS
        evict(folder, size_limit_or_default() if limit is None else limit)


def size_limit_or_default() -> int:
    """`size_limit`, where what it says is no size as well."""
    try:
        return size_limit()
    except ValueError:  # told where programs are kept
        return DEFAULT_LIMIT


def evict(folder: Path, limit: int) -> list[CacheFile]:
    """Delete what was used least recently until the folder holds nine tenths of `limit` at most; returns what went.

    Below the limit only temporary files go that a process left behind when it was killed. A time that is yet to come
    is of before the clock was set back, and so older than any other.
    """
    files = list_files(folder)
    now = time.time()
    temporary = [file for file in files if file.path.name.startswith(".tmp-")]
    gone, _ = delete([file for file in temporary if abs(now - file.mtime) > _ABANDONED])
    total = sum(file.size for file in files) - sum(file.size for file in gone)
    if total > limit:
        rest = [file for file in files if not file.path.name.startswith(".tmp-")]
        for file in sorted(rest, key=lambda file: (file.mtime <= now + _ABANDONED, file.mtime, str(file.path))):
            deleted, _ = delete([file])
            gone += deleted
            total -= sum(file.size for file in deleted)
            if total <= limit * 0.9:
                break
    if gone:
        log.info("cache: %d files, %d bytes deleted from %s", len(gone), sum(file.size for file in gone), folder)
    return gone


def clear(folder: Path) -> tuple[list[CacheFile], list[OSError]]:
    """Delete every file of the cache, and the folders that are empty then; what went, and why the rest did not."""
    gone, errors = delete(list_files(folder))
    for kind in KINDS:
        for parent, _, _ in os.walk(folder / kind, topdown=False):
            try:
                os.rmdir(parent)
            except OSError:  # another process has just written into it
                continue
    return gone, errors


def find_damage(file: CacheFile) -> str:
    """What is wrong with a file of the kinds "binaries" and "index", or nothing; others are checked by their owners."""
    name = file.path.name
    if name.startswith(".tmp-"):
        return ""
    if file.kind == "binaries":
        digest = hashlib.sha256(read_regular(file.path)).hexdigest()
        return "" if name == f"{digest}.so" else "its content has another hash than its name"
    if file.kind == "index":
        try:
            entry = json.loads(read_regular(file.path))
            binary, symbol = entry["binary"], entry["symbol"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return f"unreadable ({error})"
        if not (isinstance(binary, str) and isinstance(symbol, str) and binary.isalnum()):
            return "of a foreign form"
        if symbol != symbol_of(file.path.stem):
            return "another kernel's entry under this name"
        library = file.path.parents[2] / "binaries" / f"{binary}.so"
        return "" if library.exists() else f"its library {binary[:12]}... is gone"
    return ""

"""Whole programs on disk, so that the next process start compiles nothing.

Invariant: a file is read only if its first line is the hash of the rest and the rest names the key that was asked for;
anything else is deleted, logged, and compiled again. Files hold JSON alone: nothing that a file says is executed but
kernel sources, which are as private to the user as the folder that they stand in.

Layout, beside the kernels: `programs/<key[:2]>/<key>.json` of three lines: sha256 of the rest, header, program.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from torchlazy.runtime import cache_folder
from torchlazy.runtime.collector import paused_collector
from torchlazy.runtime.errors import OtherVersion, ProgramError
from torchlazy.runtime.program import text as program_text
from torchlazy.runtime.program.program import Program
from torchlazy.runtime.toolchains.kernel_cache import read_regular, write_atomically

log = logging.getLogger("torchlazy.runtime")

_FORMAT = "torchlazy program 3"
_ANY_FORMAT = re.compile(r"torchlazy program \d+")


@dataclass(frozen=True)
class StoredProgram:
    """A program, what stayed extern as (operator, reason, frame, by choice or not), and how long it took to compile."""

    program: Program
    fallbacks: tuple[tuple[str, str, str, bool], ...] = ()
    seconds: float = 0.0


def program_key(*facts: str) -> str:
    """The name of a program: a hash of everything that it depends on."""
    return hashlib.sha256("\n\0".join((_FORMAT, *facts)).encode()).hexdigest()


def to_text(key: str, stored: StoredProgram) -> str:
    """The content of the file that keeps `stored`."""
    header = json.dumps({"format": _FORMAT, "key": key, "fallbacks": stored.fallbacks, "seconds": stored.seconds})
    rest = f"{header}\n{program_text.to_json(stored.program)}\n"
    return f"{hashlib.sha256(rest.encode()).hexdigest()}\n{rest}"


@paused_collector()
def from_text(key: str, text: str) -> StoredProgram:
    """What `to_text` wrote for the same key; ProgramError for anything else."""
    digest, _, rest = text.partition("\n")
    if hashlib.sha256(rest.encode()).hexdigest() != digest:
        raise ProgramError("program file: truncated or changed: its content has another hash than its first line")
    try:
        header_text, program_line, _ = rest.split("\n")
        header = json.loads(header_text)
        form, named = header["format"], header["key"]
        fallbacks = tuple(
            (str(op), str(reason), str(frame), bool(by_choice)) for op, reason, frame, by_choice in header["fallbacks"]
        )
        seconds = float(header["seconds"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProgramError(f"program file: of a foreign form ({error})") from error
    if form != _FORMAT and isinstance(form, str) and _ANY_FORMAT.fullmatch(form):
        raise OtherVersion(f"program file: in the form {form!r}, this torchlazy reads {_FORMAT!r}; compile it anew")
    if form != _FORMAT or named != key:
        raise ProgramError(f"program file: holds the program {str(named)[:12]} in the form {form!r}")
    return StoredProgram(program_text.from_json(program_line), fallbacks, seconds)


@dataclass
class ProgramStore:
    """The programs in a cache folder; `limit` bounds the bytes of the whole folder, kernels too."""

    folder: Path
    limit: int = field(default_factory=cache_folder.size_limit)
    _has_warned: bool = False

    def has_entries(self) -> bool:
        """Whether a look-up can succeed at all; costs one system call."""
        return os.path.isdir(os.path.join(self.folder, "programs"))

    def get(self, key: str) -> StoredProgram | None:
        """The program of this key, if there is one that can be trusted."""
        path = self._path(key)
        try:
            text = read_regular(path).decode()
            stored = from_text(key, text)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, ProgramError) as error:
            log.warning("program store: deleted %s, it is compiled again: %s", path, error)
            try:
                path.unlink(missing_ok=True)
            except OSError:
                log.warning("program store: %s cannot be deleted; remove it by hand", path)
            return None
        with contextlib.suppress(OSError):  # gone meanwhile
            os.utime(path)  # the least recently used are evicted first
        return stored

    def put(self, key: str, stored: StoredProgram) -> None:
        """Keep a program. A disk that is full or read-only is logged, not raised: the program runs without it."""
        self.put_text(key, to_text(key, stored))

    def put_text(self, key: str, text: str) -> None:
        """`put` of a program whose text (`to_text`) is there already."""
        try:
            write_atomically(self._path(key), text.encode())
            cache_folder.evict_now_and_then(self.folder, self.limit)
        except OSError as error:
            level = logging.INFO if self._has_warned else logging.WARNING  # a full disk: once is enough
            self._has_warned = True
            log.log(level, "program store: %s is not kept: %s", self._path(key), error)

    def _path(self, key: str) -> Path:
        return self.folder / "programs" / key[:2] / f"{key}.json"


def find_damage(file: cache_folder.CacheFile) -> str:
    """What is wrong with a file of the kind "programs", or nothing."""
    if file.path.name.startswith(".tmp-"):
        return ""
    try:
        from_text(file.path.stem, read_regular(file.path).decode())
    except OtherVersion:
        return ""  # sound, and never asked for: the bound on the folder's size removes it
    except (ProgramError, ValueError) as error:
        return str(error)
    except FileNotFoundError:
        raise
    except OSError as error:
        return str(error)
    return ""

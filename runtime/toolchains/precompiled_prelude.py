"""The prelude of C++ kernels, parsed once: a precompiled header in the kernel cache, for the GNU compiler.

A quarter of a small unit's time is the parsing of a prelude of a thousand lines. The header is made by the process that
has compiled a few units without it, and serves all that compile into that folder.

Invariant: a unit means the same with a header and without one: the header's text lies beside it, and is what the
compiler reads where the header does not suit it. The kernel cache keeps it as it keeps libraries, content checked.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torchlazy.runtime import cache_folder
from torchlazy.runtime.toolchains import compiler_run
from torchlazy.runtime.toolchains.kernel_cache import KernelCache

log = logging.getLogger("torchlazy.runtime")

NAME = "prelude.h"
# g++ 12 takes 98 ms for a unit of one kernel, 70 with a header; for 20 units of tests 206 and 185 on average.
_BUILDS_BEFORE = 3
_WORTH_A_HEADER = 10_000  # characters
_ROOM = 128 << 20  # a header has 6 MB: smaller folders keep kernels in its place

_lock = threading.Lock()
_builds: Counter[str] = Counter()  # of this process, by the header's key
_refused: set[str] = set()  # headers that the compiler cannot make or use


def header_text(prelude: str) -> str:
    """What a unit includes: the standard's integers, and the prelude."""
    return f"#include <cstdint>\n{prelude}\n"


def key_of(prelude: str, target: str) -> str:
    """The key of the header in the kernel cache."""
    digest = hashlib.sha256(prelude.encode()).hexdigest()
    return hashlib.sha256("\n".join(("header-1", digest, target)).encode()).hexdigest()


def put_beside(folder: Path, prelude: str, key: str, cache: KernelCache) -> bool:
    """Lay the header where a unit in `folder` includes it; False where there is none."""
    if key in _refused or (found := cache.find_binary(key)) is None:
        return False
    try:
        (folder / NAME).write_text(header_text(prelude))
        (folder / f"{NAME}.gch").symlink_to(found.path)
    except OSError:
        return False
    return True


def refuse(key: str, said: str) -> None:
    """The header does not serve on this machine: units of this process are compiled without it."""
    _refused.add(key)
    log.info("kernels are compiled without a precompiled prelude: %s", said.strip()[-300:])


def is_worth_it(prelude: str) -> bool:
    """Whether parsing the prelude takes long enough."""
    return len(prelude) >= _WORTH_A_HEADER


def is_wanted(prelude: str, key: str, cache: KernelCache) -> bool:
    """Whether to make a header, asked after each build that used the prelude; true once in a process."""
    if not is_worth_it(prelude) or key in _refused or cache_folder.size_limit_or_default() < _ROOM:
        return False
    with _lock:
        _builds[key] += 1
        due = _builds[key] == _BUILDS_BEFORE
    return due and cache.find_binary(key) is None


def make(prelude: str, key: str, command: Sequence[str], cache: KernelCache) -> None:
    """Compile the header and keep it."""
    with tempfile.TemporaryDirectory(prefix="torchlazy-cpp-") as name:
        folder = Path(name)
        (folder / NAME).write_text(header_text(prelude))
        whole = [*command, "-x", "c++-header", NAME, "-o", f"{NAME}.gch"]
        done = compiler_run.run_compiler(whole, name, compiler_run.compile_seconds())
        if done.returncode != 0:
            refuse(key, done.stderr or f"exit status {done.returncode}")
            return
        content = (folder / f"{NAME}.gch").read_bytes()
    cache.store_binary(content, [key])

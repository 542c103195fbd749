"""Compilers that hang, that print anything, and pipes in the place of cached files.

Invariant: programs go on, operator by operator, after no longer than what is stated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torchlazy.runtime.program.store import ProgramStore
from torchlazy.runtime.toolchains import compiler_run
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, read_regular

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a shell and pipes")

COMPILERS = {
    "its version hangs": "sleep 1000",
    "its version hangs, and it does not listen": "trap '' TERM; sleep 1000; sleep 1000",
    "it hangs": 'if [ "$1" = --version ]; then echo "g++ Free Software Foundation"; else sleep 1000; fi',
    "it prints no text": "printf '\\377\\376'; printf '\\377' >&2; exit 1",
    "it fails": "exit 1",
    "it is killed": "kill -9 $$",
}
PROGRAM = """
import os, sys, time, warnings
import torch, torchlazy
from torchlazy.runtime.toolchains import compiler_run
compiler_run.PROBE_SECONDS = 1.0
torchlazy.config.tiers = sys.argv[1]
warnings.simplefilter("ignore")
start = time.perf_counter()
x = torch.arange(6.0).to("lazy")
f = torchlazy.compile(lambda x: (x * 2 + 1).sum())
for turn in range(4):
    assert (torch.relu(x * 2 - turn) + 1).sum().item() == (torch.relu(torch.arange(6.0) * 2 - turn) + 1).sum()
    assert f(torch.arange(6.0)).item() == 36
if sys.argv[1] == "on":
    torchlazy.wait_for_compile()
assert (torch.relu(x * 2) + 1).sum().item() == 36
print(time.perf_counter() - start, torchlazy.metrics()["compiles"], sum(torchlazy.metrics()["fallbacks"].values()))
"""


def fake(folder: Path, text: str) -> Path:
    path = folder / "compiler.sh"
    path.write_text(f"#!/bin/sh\necho $$ >> {folder / 'started'}\n{text}\n")
    path.chmod(0o755)
    return path


def all_have_ended(folder: Path) -> bool:
    """Whether the compilers that were started are gone, with what they started: each led a group, or was in one."""
    alive = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return str(folder / "compiler.sh") not in alive


@pytest.mark.parametrize("name", COMPILERS)
@pytest.mark.parametrize("tiers", ["on", "off"])
def test_a_program_goes_on(name: str, tiers: str, tmp_path: Path) -> None:
    environment = {
        **os.environ, "CXX": str(fake(tmp_path, COMPILERS[name])), "TORCHLAZY_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHLAZY_COMPILE_SECONDS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tiers], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    seconds, compiles, fallbacks = done.stdout.split()
    assert float(seconds) < 120 and (tmp_path / "started").exists()
    if "version" not in name:  # else Numba compiles, where it is
        assert int(compiles) == 0 and int(fallbacks) > 0, done.stdout
    end = time.monotonic() + 20
    while not all_have_ended(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert all_have_ended(tmp_path)


def test_what_a_compiler_starts_ends_with_it(tmp_path: Path) -> None:
    compiler = fake(tmp_path, "trap '' TERM; sleep 1000 & sleep 1000; sleep 1000")
    start = time.monotonic()
    done = compiler_run.run_compiler([str(compiler), "x.cpp"], None, 0.5)
    assert done.returncode == compiler_run.TIMED_OUT and "did not end within 0.5 s" in done.stderr
    assert compiler_run.run_compiler([str(compiler), "y.cpp"], None, 600).returncode == compiler_run.TIMED_OUT
    assert time.monotonic() - start < 60 and compiler_run.has_hung(str(compiler))


def test_a_killed_program_leaves_no_compiler_for_long(tmp_path: Path) -> None:
    compiler = fake(tmp_path, "sleep 1000")
    run = f"run_compiler([{str(compiler)!r}, '--version'], None, 1)"
    code = f"from torchlazy.runtime.toolchains.compiler_run import run_compiler; {run}"
    program = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 120
    while not (tmp_path / "started").exists() and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(program.pid, signal.SIGKILL)
    program.wait()
    end = time.monotonic() + 30
    while not all_have_ended(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert all_have_ended(tmp_path)


def test_pipes_in_the_place_of_cached_files(tmp_path: Path) -> None:
    """A read of a pipe that nobody writes to would never return."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_regular(tmp_path / "pipe")
    cache, key = KernelCache(tmp_path), "ab" * 32
    library = cache.store_binary(b"a library", [key])
    entry = tmp_path / "index" / "ab" / f"{key}.json"
    for path in (library, entry):
        for other in (cache, KernelCache(tmp_path)):
            path.unlink()
            os.mkfifo(path)
            assert other.find_binary(key) is None
            assert not path.exists() or path.is_file(), "it is deleted"
            cache.store_binary(b"a library", [key])
            assert other.find_binary(key) is not None
    store = ProgramStore(tmp_path)
    program = tmp_path / "programs" / "ab" / f"{key}.json"
    program.parent.mkdir(parents=True)
    os.mkfifo(program)
    assert store.get(key) is None and not program.exists()

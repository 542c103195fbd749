"""Native code is compiled in the background where that may be, and by whoever wants it at once else."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from torchlazy.runtime.native import code as native_code
from torchlazy.runtime.native.code import NativeCode
from torchlazy.runtime.toolchains import toolchain_cpp
from torchlazy.runtime.toolchains.background_priority import without_yielding
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

pytestmark = pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")

_SEVEN = '#include <cstdint>\n// {}\nextern "C" int64_t kernel() {{ return 7; }}\n'


def code(text: str = "") -> NativeCode:
    """Code that was never compiled before."""
    text = text or _SEVEN.format(uuid4())
    return NativeCode("seven", lambda: text, ("Py_IncRef",), "six and one are added")


def answer(address: int | None) -> int:
    assert address is not None
    return int(ctypes.CFUNCTYPE(ctypes.c_int64)(address)())


@pytest.fixture
def may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeCode, "may_wait", staticmethod(lambda: True))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compilers begin once it is set."""
    opened = threading.Event()
    original = native_code._load

    def load(*args: object) -> int | None:
        opened.wait(600)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(native_code, "_load", load)
    yield opened
    opened.set()


def test_nobody_waits_for_a_compiler_in_the_background(may_wait: None, gate: threading.Event) -> None:
    seven = code()
    assert seven.if_there() is None and seven.is_coming
    assert seven.if_there() is None and seven.is_coming
    gate.set()
    native_code.wait_for_all()
    assert not seven.is_coming
    assert answer(seven.if_there()) == 7 == answer(seven.wait())


def test_whoever_wants_it_at_once_waits(may_wait: None, gate: threading.Event) -> None:
    seven = code()
    seven.start()
    threading.Timer(0.05, gate.set).start()
    assert answer(seven.wait()) == 7


def test_elsewhere_the_first_question_compiles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeCode, "may_wait", staticmethod(lambda: False))
    seven = code()
    seven.start()
    assert not seven.is_coming
    assert answer(seven.if_there()) == 7


@pytest.mark.parametrize("text", ["this is no C++", ""])
def test_what_cannot_be_compiled_is_told_once(
    may_wait: None, text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst() -> str:
        raise OSError("no disk")

    bad = code(f"// {uuid4()}\nint kernel() {{ {text}; }}")
    if not text:
        bad = NativeCode("bad", burst, (), "six and one are added")
    with caplog.at_level(logging.WARNING, "torchlazy.runtime"):
        assert bad.if_there() is None
        assert bad.wait() is None and bad.if_there() is None and not bad.is_coming
    assert len(caplog.records) == 1 and "six and one are added" in caplog.text


def test_where_no_thread_starts_it_is_compiled_at_once(may_wait: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert answer(code().if_there()) == 7


def test_others_let_it_finish(may_wait: None, gate: threading.Event) -> None:
    seven = code()
    native_code.let_finish(60)  # nothing has begun
    seven.start()
    native_code.let_finish(0.01)  # no longer than that
    with without_yielding():
        native_code.let_finish(60)
    assert seven.is_coming
    threading.Timer(0.05, gate.set).start()
    native_code.let_finish(60)
    assert not seven.is_coming


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_compiles_for_itself(may_wait: None, gate: threading.Event) -> None:
    seven = code()
    seven.start()
    child = os.fork()
    if not child:
        gate.set()
        signal.alarm(600)
        os._exit(0 if not seven.is_coming and answer(seven.wait()) == 7 else 1)
    gate.set()
    assert os.waitpid(child, 0)[1] == 0
    assert answer(seven.wait()) == 7
    assert toolchain_cpp.loading.acquire(timeout=600)
    toolchain_cpp.loading.release()


_SLOW = """
import os, sys, time
if "--version" in sys.argv:
    print("slow 1.0")
else:
    open("half.o", "w").close()
    open(os.environ["MARK"], "w").write(f"{os.getpid()} {os.getcwd()}")
    time.sleep(3600)
"""
_ENDS = """
import os, time
from torchlazy.runtime.native import code as native_code
from torchlazy.runtime.native.code import NativeCode
native_code._SECONDS_AT_EXIT = 600.0  # on a busy machine, too, what it wrote is gone
NativeCode.may_wait = staticmethod(lambda: True)
code = NativeCode("slow", lambda: 'extern "C" int kernel() { return 7; }', (), "it is slow")
assert code.if_there() is None and code.is_coming
while not (os.path.exists(os.environ["MARK"]) and os.path.getsize(os.environ["MARK"])):
    time.sleep(0.01)
"""


def test_a_compiler_ends_with_the_process_and_leaves_nothing(tmp_path: Path) -> None:
    slow, mark = tmp_path / "slow.py", tmp_path / "mark"
    slow.write_text(_SLOW)
    done = subprocess.run(
        [sys.executable, "-c", _ENDS],
        env={
            **os.environ, "CXX": f"{sys.executable} {slow}", "MARK": str(mark),
            "TORCHLAZY_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    process, folder = mark.read_text().split()
    for _ in range(60_000):
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the compiler goes on")
    assert not Path(folder).exists()

"""C++ of the project's own that works on Python's objects, compiled by the kernels' toolchain, in the background.

It calls Python's C functions through addresses that ctypes gives, and so needs no headers of Python's.

Invariant: what calls it has another way to do the same, for where there is no compiler or no global interpreter lock,
and for the time until it is there. A compiler that is at work when the process ends is ended, and leaves nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchlazy.runtime.errors import KernelCompileError, ToolchainMissing
from torchlazy.runtime.program.program import KernelSource
from torchlazy.runtime.toolchains import background_compilers, toolchain_cpp
from torchlazy.runtime.toolchains.background_priority import has_waiters, without_yielding
from torchlazy.runtime.toolchains.kernel_cache import open_cache
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp, load

log = logging.getLogger("torchlazy.runtime")

_FOLDER = Path(__file__).parent
_OWN_INCLUDE = re.compile(r'^#include "(\w+\.h)"$', re.MULTILINE)
_SECONDS_AT_EXIT = 2.0
_SECONDS_BEFORE_FORK = 5.0
_SECONDS_BETWEEN_LOOKS = 0.05


def text_of(name: str) -> str:
    """A file of C++ beside this one, with those that it includes from there in their places: one text is compiled."""
    text = _FOLDER.joinpath(name).read_text()
    return _OWN_INCLUDE.sub(lambda found: text_of(found[1]), text)


class NativeCode:
    """One function in C++, compiled once a process: in the background, or by whoever first wants it at once.

    `needed` are the functions of Python's that it calls. `otherwise` is told where there is a compiler that fails: what
    is done instead.
    """

    # Asked when the code is first looked for: whether it may be compiled in the background.
    may_wait: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, name: str, text: Callable[[], str], needed: Sequence[str], otherwise: str) -> None:
        self.name, self._text, self._needed, self._otherwise = name, text, tuple(needed), otherwise
        self._address: int | None = None
        self._is_done = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        _all.add(self)

    @property
    def is_coming(self) -> bool:
        """Whether it is being compiled in the background."""
        return self._thread is not None and not self._is_done

    def is_kept(self) -> bool:
        """Whether an earlier process compiled it."""
        return has_cpp() and toolchain_cpp.is_kept(_source(self.name, self._text()), open_cache())

    @property
    def reason(self) -> str:
        """Why it has no address; how a compiler failed stands in the log."""
        return f"{'not compiled' if has_cpp() else 'no C++ compiler'}: {self._otherwise}"

    def start(self) -> None:
        """Have it compiled in the background, where that may be and nobody began before."""
        if self._is_done or self._thread is not None or not self.may_wait():
            return
        with self._lock:
            if self._is_done or self._thread is not None:
                return
            thread = threading.Thread(target=self._build, args=(True,), name=f"torchlazy {self.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending, or the system has no threads left
                return
            self._thread = thread

    def if_there(self) -> int | None:
        """Its address; None where it cannot be compiled, and while it `is_coming`."""
        if not self._is_done:
            self.start()
            if not self.is_coming:
                return self.wait()
        return self._address

    def wait(self) -> int | None:
        """Its address, once it is there; None where it cannot be compiled."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            with without_yielding():
                background_compilers.hurry()
                thread.join()
        if not self._is_done:
            with self._lock:
                if not self._is_done:
                    self._build()
        return self._address

    def _build(self, is_background: bool = False) -> None:
        try:
            self._address = _load(self.name, self._text(), self._needed, self._otherwise, is_background)
        except Exception as error:  # of a thread of ours: whoever calls it has another way
            log.warning("%s: %s cannot be built (%s: %s)", self._otherwise, self.name, type(error).__name__, error)
        finally:
            self._is_done = True

    def _after_fork(self) -> None:
        """The parent's threads are not this process's."""
        self._lock = threading.Lock()
        if not self._is_done:
            self._thread = None


_all: weakref.WeakSet[NativeCode] = weakref.WeakSet()


def wait_for_all() -> None:
    """Return when nothing of it is being compiled."""
    for code in list(_all):
        if code.is_coming:
            code.wait()


def let_finish(seconds: float) -> None:
    """Return when nothing of it is being compiled, after so long, or when somebody waits for what is done in the
    background."""
    end = time.perf_counter() + seconds
    for code in list(_all):
        thread = code._thread
        while thread is not None and code.is_coming and not has_waiters() and time.perf_counter() < end:
            thread.join(_SECONDS_BETWEEN_LOOKS)


def _source(name: str, text: str) -> KernelSource:
    return KernelSource("cpp", name, text, pointers=())


def _load(name: str, text: str, needed: Sequence[str], otherwise: str, is_background: bool) -> int | None:
    """The address of the function `kernel` in `text`; None where it cannot be compiled."""
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()  # else others may change what is looked at
    if not has_lock or not has_cpp() or not all(hasattr(ctypes.pythonapi, function) for function in needed):
        return None
    source = _source(name, text)
    try:
        functions, failed = load([(source, "")], open_cache(), is_background=is_background)
    except (OSError, ToolchainMissing) as error:
        log.warning("%s: %s cannot be built (%s)", otherwise, name, error)
        return None
    if failed:
        if not (is_background and background_compilers.has_ended()):
            log.warning("%s: %s", otherwise, KernelCompileError(source, failed[0].log))
        return None
    return ctypes.cast(functions[source.key], ctypes.c_void_p).value  # type: ignore[arg-type]


@atexit.register
def _at_exit() -> None:
    background_compilers.end_background_compilers()
    for code in list(_all):
        if code._thread is not None and code.is_coming:  # it removes what its compiler wrote
            code._thread.join(_SECONDS_AT_EXIT)
    background_compilers.end_background_compilers(signal.SIGKILL)  # that did not listen


def _before_fork() -> None:
    """No library is being loaded while the process is copied: the child could load none."""
    _loading_locks.append(toolchain_cpp.loading.acquire(timeout=_SECONDS_BEFORE_FORK))


def _after_fork_in_parent() -> None:
    if _loading_locks and _loading_locks.pop():
        with contextlib.suppress(RuntimeError):
            toolchain_cpp.loading.release()


def _after_fork_in_child() -> None:
    _loading_locks.clear()
    toolchain_cpp.loading = threading.Lock()
    toolchain_cpp.asking = threading.Lock()
    background_compilers.forget_background_compilers()
    for code in list(_all):
        code._after_fork()


_loading_locks: list[bool] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def python_addresses(names: Sequence[str]) -> list[int | None]:
    """Where these functions of Python's are."""
    return [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in names]


class _ModuleName(str):
    """What a function in C calls its module: whoever looks for the file of it (torch's own capture) wants a text."""

    kept: Any = None


def native_function(description: int | None, own: bytes, kept: Any) -> Callable[..., Any]:
    """The function in C that a `PyMethodDef` at this address describes. `own` is its `self`; it keeps `kept` alive."""
    module = _ModuleName(__name__)
    module.kept = kept
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    found: Callable[..., Any] = make(description, own, module)
    return found

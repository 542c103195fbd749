"""The native recorder's library: brought by a wheel, or compiled once for each version of torch and kept on disk.

It derives from torch's own C++ classes, so a library serves the very build of torch that it was compiled with; one that
a wheel brought for another build, or that cannot be loaded here, is left aside. Where there is no compiler, or it
fails, there is none, and the recorder in Python does the same.

Invariant: nobody waits for the compiler but who calls `wait`; what is loaded has passed its own test.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import compiled_with_cxx11_abi as has_new_abi
from torchlazy.runtime.native.code import NativeCode
from torchlazy.runtime.toolchains import toolchain_cpp
from torchlazy.runtime.toolchains.background_compilers import has_ended, run_in_background
from torchlazy.runtime.toolchains.kernel_cache import open_cache, write_atomically

log = logging.getLogger("torchlazy.runtime")

SOURCES = Path(__file__).parent / "recorder"
PREBUILT = Path(__file__).parent / "prebuilt"  # what `make wheel` lays into the wheel
NAME = "torchlazy_recorder"
_FLAGS = (
    "-O2", "-std=c++20", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={NAME}", *toolchain_cpp.MORE_FLAGS,
)  # fmt: skip
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")


class RecorderLibrary:
    """The library, once it is there. `reason` says why there is none."""

    name = "native_recorder"

    def __init__(self) -> None:
        self.module: Any = None
        self.reason = ""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def if_there(self) -> Any:
        """The loaded module; None while it is compiled in the background, which this begins, and where it cannot be."""
        if self.module is None and not self.reason:
            self.start()
            if not NativeCode.may_wait():
                return self.wait()
        return self.module

    def if_kept(self) -> Any:
        """The loaded module, where a wheel brought it or an earlier process compiled it; else as `if_there`."""
        if self.module is None and not self.reason and self._thread is None and self.is_kept():
            return self.wait()
        return self.if_there()

    def at_once(self) -> Any:
        """As `if_kept`, but never waits for a compiler, be it that nothing may be compiled in the background."""
        may_ask = self.is_kept() or NativeCode.may_wait() if self.module is None else False
        return self.if_kept() if may_ask else self.module

    def is_kept(self) -> bool:
        """Whether nothing is left to compile."""
        try:
            return (brought() or _place()).exists()
        except OSError:  # no place to keep anything
            return False

    def start(self) -> None:
        """Have it compiled in the background, if nobody began before."""
        with self._lock:
            if self._thread is None and self.module is None and not self.reason:
                self._thread = threading.Thread(target=self._build, name="torchlazy recorder", daemon=True)
                self._thread.start()

    def wait(self) -> Any:
        """The loaded module, once it is there; None where it cannot be."""
        self.start()
        thread = self._thread
        if thread is not None:
            thread.join()
        return self.module

    def wait_if_begun(self) -> None:
        """Wait for a compilation that has begun."""
        if self._thread is not None:
            self._thread.join()

    def _build(self) -> None:
        try:
            self.module = _load(find_or_compile())
        except Exception as error:  # whoever asks has another way
            self.reason = f"{type(error).__name__}: {error}"
            if not has_ended():
                log.warning("operators are recorded in Python: the native recorder cannot be built (%s)", self.reason)


LIBRARY = RecorderLibrary()


def _file_name() -> str:
    files = sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h"))
    text = b"".join(file.read_bytes() for file in files)
    facts = (torch.__version__, str(torch.version.git_version), str(has_new_abi()), sys.version, str(_FLAGS))
    key = hashlib.sha256(text + "\n".join(facts).encode()).hexdigest()[:32]
    return f"recorder-{key}.so"


def _place() -> Path:
    return open_cache().folder / _file_name()


@functools.cache
def brought() -> Path | None:
    """The library of the wheel, where it is for this build of torch and this machine can load it.

    Asked before another is loaded: two copies in one process would both register their operators.
    """
    path = PREBUILT / _file_name()
    if not path.exists():
        return None
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("the native recorder that the wheel brought is compiled anew: it cannot be loaded (%s)", error)
        return None
    return path


def find_or_compile() -> Path:
    """Where the library is."""
    found = brought() or _place()
    if not found.exists():
        _compile(found)
    return found


def _compile(into: Path) -> None:
    compiler = toolchain_cpp._compiler()
    if compiler is None or not toolchain_cpp.has_cpp():
        raise RuntimeError("no C++ compiler")
    home = Path(torch.__file__).parent
    headers = [home / "include", home / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(has_new_abi())}"
    with tempfile.TemporaryDirectory(prefix="torchlazy-") as folder:
        command = [
            *compiler, *_FLAGS, abi, *(f"-I{path}" for path in headers), str(SOURCES / "recorder.cpp"),
            "-o", "recorder.so", f"-L{home / 'lib'}", *_LIBRARIES, f"-Wl,-rpath,{home / 'lib'}",
        ]  # fmt: skip
        done = run_in_background(command, folder)
        if done.returncode != 0:
            raise RuntimeError(f"the C++ compiler failed: {(done.stderr or done.stdout or '')[-2000:]}")
        into.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(into, Path(folder, "recorder.so").read_bytes())


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not module.exchange_works():
        raise RuntimeError("tensors of this build of torch cannot be exchanged for deferred ones")
    return module

"""Settings for every test run: this checkout, two threads, and kernels kept between runs in its own cache folder.

They stand in the environment before torch is imported, so that child processes of tests share them. The lazy device has
the first operator of each process, as in a user's program: where another subclass of tensors came before, torch looks
its rules up by itself (`lazy.torch_private.patches.answer_for_dispatch`), and operators would not be walked to.
"""

from __future__ import annotations

import gc
import os
import types
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else they spin, and two workers on two cores wait for each other
os.environ.setdefault("TORCHLAZY_STORE", "off")  # a test compiles what it tests, and counts what it compiles
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each child process compiles the package anew (0.6 s)
os.environ.setdefault("TORCHLAZY_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "torchlazy"))

import pytest
import torch
import torchlazy
from torchlazy.lazy.compiled import audit
from torchlazy.lazy.run import straight_line
from torchlazy.runtime.native import identity_check, recorder_library

if (_found := Path(torchlazy.__file__).resolve().parent) != Path(__file__).resolve().parents[1]:
    raise pytest.UsageError(f"the tests would test {_found}, not this checkout: pip install -e . (or make venv)")

identity_check.CODE.wait()  # what runs must not depend on when a compiler is done
if torchlazy.config.native == "on":
    recorder_library.LIBRARY.wait()
torch.zeros(1).to("lazy").add(1).cpu()

straight_line.FIRST = 2  # what comes again runs as it does in the long run
audit.SHARE = audit.LATER_SHARE = 0  # audits by number: what is audited must not depend on how long it takes

# Each torch.manual_seed notes for three kinds of device that are not there who called it: 0.8 ms, where tests seed at
# each step. What they would do is noted as ever.
for _device in (torch.cuda, torch.xpu, torch.mtia):
    _device.traceback = types.SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]


@pytest.fixture
def device_in_python() -> Iterator[None]:
    """The test is about tensors of the class `LazyTensor`: those on "lazy" are recorded in Python."""
    kept, torchlazy.config.native_device = torchlazy.config.native_device, "off"
    yield
    torchlazy.config.native_device = kept


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """The collector waits while tests are collected, and leaves alone what is there then: three quarters of a million
    objects, of which it would walk all each time that a captured call is asked what holds its values (0.1 to 0.6 s)."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _walked_alone() -> Iterator[None]:
    """What a file's tests left is not walked in the next one's; nor what one thawed to count it (all of it, in every
    later file: 35 s of processor time for tests/lazy/test_compile_differential.py instead of 30). Nor is any of it
    still done by threads in the background then."""
    yield
    torchlazy.wait_for_compile()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Else what libraries keep until the end is never let go of, and they call it a leak."""
    gc.unfreeze()

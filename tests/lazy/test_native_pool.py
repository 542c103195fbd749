"""Memory of programs in C++: what one run frees serves the next, and nothing that is alive shares it."""

from __future__ import annotations

import gc
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torchlazy
from torchlazy.runtime.native.recorder_library import LIBRARY

pytestmark = pytest.mark.skipif(LIBRARY.wait() is None, reason="needs the native library")

Call = Callable[[torch.Tensor], torch.Tensor]
ROWS = 512


@pytest.fixture
def call() -> Iterator[Call]:
    """A compiled call with a product and a kernel of a megabyte each, replayed in C++."""
    LIBRARY.module.forget()
    torch.manual_seed(0)
    weight = torch.randn(ROWS, ROWS)
    found = torchlazy.compile(lambda x: (x @ weight).sin() + 1, audit=False)
    for turn in range(24):
        found(torch.randn(ROWS, ROWS))
        if turn in (5, 8):
            torchlazy.wait_for_compile()
    assert found.report().native
    yield found


def test_what_was_freed_is_used_again(call: Call) -> None:
    x = torch.randn(ROWS, ROWS)
    first = call(x).data_ptr()
    gc.collect()
    held = LIBRARY.module.pooled_bytes()
    assert held >= x.nbytes
    addresses = {call(x).data_ptr() for _ in range(8)}
    assert first in addresses and len(addresses) <= 2
    assert LIBRARY.module.pooled_bytes() == held
    LIBRARY.module.forget()
    assert LIBRARY.module.pooled_bytes() == 0


def test_what_is_alive_is_not(call: Call) -> None:
    given = [torch.randn(ROWS, ROWS) for _ in range(6)]
    made = [call(x) for x in given]
    views = [call(x)[3:, 1].detach() for x in given]
    arrays = [call(x).numpy() for x in given]
    again = [call(x) for x in given]
    for x, *found in zip(given, made, arrays, again, strict=True):
        for one in found:
            torch.testing.assert_close(torch.as_tensor(one), call(x))
    for x, view in zip(given, views, strict=True):
        torch.testing.assert_close(view, call(x)[3:, 1])


def test_memory_goes_other_ways(call: Call) -> None:
    """Resized, shared between processes, saved, set free by another thread."""
    x = torch.randn(ROWS, ROWS)
    want = call(x).clone()
    grown = call(x)
    grown.resize_(2 * ROWS, ROWS)
    torch.testing.assert_close(grown[:ROWS], want)
    shared = call(x).share_memory_()
    torch.testing.assert_close(shared, want)
    file = io.BytesIO()
    torch.save(call(x), file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file), want)
    made = [call(x)]
    thread = threading.Thread(target=made.clear)
    thread.start()
    thread.join()
    torch.testing.assert_close(call(x), want)


def test_threads_have_memory_of_their_own(call: Call) -> None:
    wrong: list[int] = []

    def run(seed: int) -> None:
        x = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(seed))
        want = call(x).clone()
        for _ in range(10):
            if not torch.allclose(call(x), want, rtol=1e-4, atol=1e-4):  # Python may do it
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_goes_on(call: Call) -> None:
    x = torch.randn(8, ROWS)
    kept = call(torch.randn(ROWS, ROWS))
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # the team of OpenMP stays behind
        alive = bool(torch.isfinite(kept).all()) and call(x).shape == (8, ROWS)
        os._exit(0 if alive else 1)
    status, end = None, time.monotonic() + 60
    while status is None and time.monotonic() < end:
        done, found = os.waitpid(child, os.WNOHANG)
        status = found if done else None
        time.sleep(0.01)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status is not None, "the child hangs"
    assert os.waitstatus_to_exitcode(status) == 0

"""Threads, forked processes, and thousands of steps."""

from __future__ import annotations

import gc
import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import recorder
from torchlazy.lazy.compiled.capture.threads import exclusive, recorder_released
from torchlazy.lazy.record.tensor import LazyTensor

from tests.lazy.compare import data, ints


def _in_threads(count, function):
    """Run function(0), function(1), ... at once; returns their results, raises their first error."""
    results, errors = [None] * count, []
    start = threading.Barrier(count)

    def run(number):
        try:
            start.wait()
            results[number] = function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    if errors:
        raise errors[0]
    return results


def _chain(device, number):
    x = data(device, 4, seed=number)
    y = torch.zeros(4, device=device)
    for i in range(60):
        x = x * 0.9 + i
        y.add_(x)
        if i % 20 == 19:
            x = x / x.abs().sum().item()
    return x.tolist(), y.tolist()


def test_two_threads_record_at_once(tier):
    got = _in_threads(2, lambda number: _chain("lazy", number))
    for number in range(2):
        torch.testing.assert_close(got[number], _chain("cpu", number), rtol=1e-4, atol=1e-4)


def _train(device, number, steps=6):
    layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)]
    for position, layer in enumerate(layers[::2]):
        for p in layer.parameters():
            p.data = data("cpu", *p.shape, seed=number * 10 + position) / 3
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = data(device, 5, 4, seed=number), ints(device, 5, high=3, seed=number)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_two_threads_train(tier):
    got = _in_threads(2, lambda number: _train("lazy", number))
    for number in range(2):
        torch.testing.assert_close(got[number], _train("cpu", number), rtol=1e-4, atol=1e-5)


def test_threads_share_a_tensor(tier):
    x = torch.zeros(4, device="lazy")
    lock = threading.Lock()

    def add(number):
        for _ in range(50):
            with lock:
                x.add_(number + 1)
            x.sum()

    _in_threads(3, add)
    assert x.tolist() == [300.0] * 4


def test_a_value_crosses_threads(tier):
    made = {}
    _in_threads(1, lambda number: made.setdefault("x", data("lazy", 3) * 2))
    assert made["x"].tolist() == (data("cpu", 3) * 2).tolist()


class _Dataset(torch.utils.data.Dataset):
    def __init__(self, uses_lazy=False):
        self.uses_lazy = uses_lazy

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if self.uses_lazy:
            return (torch.full((3,), float(i), device="lazy") * 2).cpu()
        return torch.full((3,), float(i)) * 2


@pytest.mark.parametrize("uses_lazy", [False, True])
def test_data_loader_workers_fork_while_tensors_are_pending(uses_lazy, compiled):
    pending = data("lazy", 3) + 1
    loader = torch.utils.data.DataLoader(_Dataset(uses_lazy), batch_size=4, num_workers=2, timeout=600)
    total = torch.zeros(3, device="lazy")
    for batch in loader:
        total += batch.to("lazy").sum(0)
    assert total.tolist() == [132.0] * 3
    assert pending.tolist() == (data("cpu", 3) + 1).tolist()


def _in_child(function):
    """Run in a forked child; the exit status says whether it returned True."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if function() else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_uses_lazy_tensors(tier):
    x = data("lazy", 4)
    y = x * 2
    torchlazy.sync()
    pending = y + 1
    want = (data("cpu", 4) * 2 + 1).tolist()

    def child():
        fresh = torch.ones(3, device="lazy") + 1
        return pending.tolist() == want and fresh.tolist() == [2.0] * 3 and (pending * 0).tolist() == [0.0] * 4

    assert _in_child(child) == 0
    assert pending.tolist() == want


def test_a_fork_while_another_thread_records():
    stop = threading.Event()

    def record():
        x = data("lazy", 4)
        while not stop.is_set():
            x = x + 1
            if x.numel() and recorder.live_storages() > 50:
                torchlazy.flush()

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(5):
            assert _in_child(lambda: (torch.ones(3, device="lazy") + 1).tolist() == [2.0] * 3) == 0
    finally:
        stop.set()
        thread.join()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_2000_steps_leak_nothing(compiled):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    model = model.to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = []
    for step in range(4001):
        x, y = torch.randn(5, 4).to("lazy"), torch.randint(3, (5,)).to("lazy")
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
        if step % 100 == 0:
            loss.item()
        if step in (200, 1000, 2000, 3000, 4000):
            gc.collect()
            tensors = sum(1 for found in gc.get_objects() if issubclass(type(found), LazyTensor))
            rows.append((tensors, recorder.live_storages(), _resident()))
            # What other tests left behind may ask for memory too, once; a leak takes it from each thousand of steps.
            if step >= 2000 and rows[-1][2] - rows[-2][2] < 4 << 20:
                break
    assert all(row[:2] == rows[0][:2] for row in rows)
    assert rows[-1][2] - rows[-2][2] < 4 << 20
    assert torchlazy.metrics()["compiles"] <= 4


@pytest.mark.usefixtures("operator_by_operator")
def test_a_thread_that_the_recorder_itself_starts_in_a_captured_call(monkeypatch):
    """It compiles something, say: the recorder's lock is in use, and the call can be replayed."""
    infer, threads = recorder.infer, []

    def infer_and_start(*args, **kwargs):
        threads.append(threading.Thread(target=lambda: None))
        threads[-1].start()
        return infer(*args, **kwargs)

    monkeypatch.setattr(recorder, "infer", infer_and_start)
    call = torchlazy.compile(lambda x: x.mul(3.25).flip(0).roll(1), audit=False)
    x = torch.arange(7.0, device="lazy")
    for _ in range(3):
        assert call(x).tolist() == x.cpu().mul(3.25).flip(0).roll(1).tolist()
    assert threads and call.report().replays == 2, call.report()


@pytest.mark.parametrize(("name", "replays"), [("torchlazy compile worker", 2), ("loader", 0)])
def test_our_own_threads_do_not_hinder_a_capture(name: str, replays: int) -> None:
    """The first captured call of a process ran its Python for some calls more: a thread began that compiles."""

    def function(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: None, name=name)
        thread.start()
        thread.join()
        return x.mul(3.25).flip(0)

    call = torchlazy.compile(function, audit=False)
    x = torch.arange(7.0)
    for _ in range(4):
        assert torch.equal(call(x), x.mul(3.25).flip(0))
    report = call.report()
    assert ("it starts a thread" in str(report), report.replays >= 2) == (not replays, bool(replays)), str(report)


def test_a_call_that_has_the_recorder_free_may_start_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured calls on ordinary tensors of a GPU are so: torch's backward runs in a thread of its own."""
    refused: list[str] = []
    monkeypatch.setattr(recorder, "capture", SimpleNamespace(refuse=refused.append))
    taken: list[bool] = []

    def take() -> None:
        taken.append(recorder.lock.acquire(timeout=600))
        recorder.lock.release()

    with recorder.lock, exclusive(recorder):
        with recorder_released(recorder):
            thread = threading.Thread(target=take)
            thread.start()
            thread.join()
        assert recorder.lock.is_mine()
    assert taken == [True] and refused == ["it starts a thread"] and not recorder.lock.is_mine()

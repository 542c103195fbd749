"""What lives: outputs are live tensors, parameters keep their one piece of memory, nothing piles up."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import driver, recorder
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.run.driver import CutEvent
from torchlazy.lazy.trace.storage import LazyStorage

from tests.lazy.compare import data, ints


@pytest.fixture
def events():
    """Every cut of the test."""
    found: list[CutEvent] = []
    driver.listeners.append(found.append)
    yield found
    driver.listeners.remove(found.append)


def _mlp(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model.to(device)


def _live_storages() -> int:
    gc.collect()
    return sum(1 for found in gc.get_objects() if issubclass(type(found), LazyTensor))


def test_only_live_tensors_are_outputs(events, tier):
    x = data("lazy", 3)
    y = x + 1
    z = y * 2
    w = z - 1
    del y, z
    torchlazy.flush()
    assert [len(e.trace.outputs) for e in events] == [1]
    assert w.tolist() == ((data("cpu", 3) + 1) * 2 - 1).tolist()


def test_a_live_view_keeps_its_whole_storage(events, tier):
    x = data("lazy", 4, 3) * 2
    v = x[1:]
    del x
    torchlazy.flush()
    assert [geom.shape for _, geom in events[0].trace.outputs] == [(4, 3)]
    assert v.tolist() == (data("cpu", 4, 3) * 2)[1:].tolist()


def test_dead_code_does_not_run(events):
    x = data("lazy", 3)
    y = x.exp()
    (x.log() @ x).sin()
    torchlazy.flush()
    assert torchlazy.metrics()["extern_calls"].keys() == {"aten.exp.default"}
    assert y.shape == (3,)


def test_nothing_alive_runs_nothing(events):
    data("lazy", 3).exp()
    torchlazy.sync()
    assert not events
    assert torchlazy.metrics()["cuts"] == {}


def test_dead_code_is_not_compiled(events, compiled):
    x = data("lazy", 3, 3)
    y = x.exp()
    (x @ x).sin()
    torchlazy.flush()
    assert torchlazy.metrics()["extern_calls"] == {}
    assert torchlazy.metrics()["kernels"] == 1
    assert y.shape == (3, 3)


def test_tensors_saved_for_backward_are_alive_until_it_ran(events, tier):
    x = data("lazy", 4, grad=True)
    y = x.exp().sin().sum()
    torchlazy.flush()
    with_graph = len(events[-1].trace.outputs)
    y.backward()
    del y
    torchlazy.flush()
    assert with_graph > 1
    assert len(events[-1].trace.outputs) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ],
    ids=["sgd", "adamw", "adamw one by one", "rmsprop"],
)
def test_parameters_stay_in_their_memory(make, compiled):
    model, reference = _mlp("lazy"), _mlp("cpu")
    parameters = list(model.parameters())
    optimizer, reference_optimizer = make(parameters), make(list(reference.parameters()))
    x, y = data("lazy", 5, 4), ints("lazy", 5, high=3)
    before = [p._storage_.real.data_ptr() for p in parameters]
    for step in range(4):
        for m, o, (a, b) in ((model, optimizer, (x, y)), (reference, reference_optimizer, (x.cpu(), y.cpu()))):
            o.zero_grad()
            torch.nn.functional.cross_entropy(m(a), b).backward()
            o.step()
        if step == 1:
            state = [s["exp_avg"]._storage_.real.data_ptr() for s in optimizer.state.values() if "exp_avg" in s]
    assert [p._storage_.real.data_ptr() for p in parameters] == before
    assert [p.data_ptr() for p in parameters] == before
    assert state == [s["exp_avg"].data_ptr() for s in optimizer.state.values() if "exp_avg" in s]
    for mine, theirs in zip(parameters, reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_a_donated_tensor_that_is_also_read_elsewhere(tier):
    x = data("lazy", 4)
    torchlazy.sync()
    kept = x.clone()
    y = x * 3
    x.add_(1)
    z = x * 2
    x.mul_(kept)
    torchlazy.sync()
    want = data("cpu", 4)
    assert kept.tolist() == want.tolist()
    torch.testing.assert_close(y.cpu(), want * 3)
    torch.testing.assert_close(z.cpu(), (want + 1) * 2)
    torch.testing.assert_close(x.cpu(), (want + 1) * want)


def test_swapped_parameters(compiled):
    a, b = data("lazy", 4), data("lazy", 4, seed=1)
    torchlazy.sync()
    for _ in range(3):
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        torchlazy.flush()
    assert a.tolist() == data("cpu", 4, seed=1).tolist()
    assert b.tolist() == data("cpu", 4).tolist()


def test_writing_one_tensor_into_two(compiled):
    a, b, c = data("lazy", 4), data("lazy", 4, seed=1), data("lazy", 4, seed=2)
    torchlazy.sync()
    a.copy_(c)
    b.copy_(c)
    torchlazy.sync()
    a.add_(1)
    torchlazy.sync()
    assert b.tolist() == c.tolist() == data("cpu", 4, seed=2).tolist()


def test_storages_are_flat_over_steps(compiled):
    model = _mlp("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = data("lazy", 5, 4), ints("lazy", 5, high=3)
    counts = []
    for step in range(300):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step in (5, 150, 299):
            counts.append(_live_storages())
    assert len(set(counts)) == 1
    assert torchlazy.metrics()["compiles"] <= 3
    assert recorder.live_storages() == 0


def test_a_dropped_tensor_frees_its_slot_in_the_trace():
    x = data("lazy", 3)
    for _ in range(50):
        x + 1
    assert recorder.live_storages() <= 1


def test_cut_traces_hold_no_memory(compiled):
    x = data("lazy", 64)
    y = x * 2
    torchlazy.flush()
    storage: LazyStorage = y._storage_
    memory = storage.real
    del y, storage
    gc.collect()

    assert sys.getrefcount(memory) == 2


def test_an_untouched_copy_has_memory_of_its_own(compiled):
    x = data("lazy", 4)
    torchlazy.sync()
    y, z = x.clone(), x.view(2, 2).clone()
    torchlazy.sync()
    x.add_(1)
    y.mul_(2)
    torchlazy.sync()
    want = data("cpu", 4)
    assert (x.tolist(), y.tolist(), z.tolist()) == ((want + 1).tolist(), (want * 2).tolist(), want.view(2, 2).tolist())


def test_a_copy_of_a_parameter_leaves_its_memory_in_place(compiled):
    x = data("lazy", 4)
    torchlazy.sync()
    address = x.data_ptr()
    kept = x.clone()
    x.add_(1)
    torchlazy.sync()
    assert x.data_ptr() == address
    assert kept.tolist() == data("cpu", 4).tolist()

"""What running a trace operator by operator holds: state once, as eager does, and nothing when it is over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchlazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchlazy.lazy.api import recorder
from torchlazy.lazy.run import interpreter
from torchlazy.lazy.run.straight_line import ByOperators
from torchlazy.lazy.trace.trace import CutTrace

pytestmark = pytest.mark.usefixtures("device_in_python")

Run = Callable[..., list[Any]]
Cut = tuple[CutTrace, list[torch.Tensor], list[Any]]


def _last_cut(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> Cut:
    """The last trace that `run` leaves, with what goes in; it is run all the same."""
    found: list[Cut] = []

    def driver(trace: CutTrace, memory: list[torch.Tensor], scalars: list[Any], *_: Any) -> list[Any]:
        found.append((trace, [value.clone() for value in memory], list(scalars)))
        return interpreter.run_entries(trace, memory, scalars)

    monkeypatch.setattr(recorder, "driver", driver)
    run()
    torchlazy.sync()
    return found[-1]


@pytest.fixture(params=["interpreted", "straight"])
def run(request: pytest.FixtureRequest) -> Run:
    """A way to run a trace operator by operator: for the first time, or once more."""
    return interpreter.run_entries if request.param == "interpreted" else _once_more


def _once_more(trace: CutTrace, inputs: list[torch.Tensor], scalars: list[Any]) -> list[Any]:
    ways = ByOperators()
    ways.run(trace, [value.clone() for value in inputs], scalars)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchlazy.lazy.run.straight_line.run_entries", None)
        return ways.run(trace, inputs, scalars)


def _training(steps: int = 3) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for _ in range(steps):
        model(torch.randn(2, 64).to("lazy")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torchlazy.sync()


def _bytes_held(monkeypatch: pytest.MonkeyPatch, beside: list[torch.Tensor]) -> list[int]:
    """Bytes of all values of a run after each operator, and of what others hold `beside`."""
    held: list[int] = []
    store = interpreter._store
    depth = [0]

    def storing(outputs: Any, result: Any, values: list[Any]) -> None:
        depth[0] += 1
        store(outputs, result, values)
        depth[0] -= 1
        if not depth[0]:
            tensors = [v for v in (*values, *beside) if isinstance(v, torch.Tensor)]
            memory = {v.untyped_storage()._cdata: v.untyped_storage() for v in tensors}
            held.append(sum(storage.nbytes() for storage in memory.values()))

    monkeypatch.setattr(interpreter, "_store", storing)
    return held


def test_new_state_takes_the_place_of_the_old_while_the_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, memory, scalars = _last_cut(monkeypatch, _training)
    parameters = 4 * (2 * 64 * 512 + 512 + 64)
    assert len(trace.donations) == 12  # four parameters, and two states of each
    held = _bytes_held(monkeypatch, memory)
    want = interpreter.run_entries(replace(trace, donations=()), list(memory), scalars)
    apart = max(held)
    held.clear()
    found = interpreter.run_entries(trace, list(memory), scalars)
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    for output, given in trace.donations:
        assert found[output].data_ptr() == memory[given].data_ptr()
    # Parameters, two states, gradients, and what the optimizer computes with.
    assert max(held) <= 7.1 * parameters < apart, [h / parameters for h in (max(held), apart)]


def test_a_value_that_is_read_later_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def program() -> torch.Tensor:
        w = torch.arange(6.0).to("lazy")
        torchlazy.sync()
        seen = w.view(2, 3) + 1
        w.mul_(2)
        torchlazy.sync()
        return seen

    trace, (w,), scalars = _last_cut(monkeypatch, program)
    assert trace.donations
    ops = [str(entry.op) for entry in trace.entries]
    mul = next(entry for entry in trace.entries if "mul" in str(entry.op))
    view = next(entry for entry in trace.entries if "view" in str(entry.op))
    others = [entry for entry in trace.entries if entry is not mul and entry is not view]
    assert others, ops
    late = replace(trace, entries=(view, mul, *others), frames=())  # the old value is read after the new one is there
    for order in (trace, late):
        want = interpreter.run_entries(replace(order, donations=()), [w.clone()], scalars)
        mine = w.clone()
        found = run(order, [mine], scalars)
        torch.testing.assert_close(found, want, rtol=0, atol=0)
        ((output, _),) = trace.donations
        assert found[output] is mine or found[output].data_ptr() == mine.data_ptr()


def test_nothing_of_a_run_waits_for_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, memory, scalars = _last_cut(monkeypatch, _training)
    refs: list[weakref.ref[torch.Tensor]] = []
    store = interpreter._store

    def storing(outputs: Any, result: Any, values: list[Any]) -> None:
        if isinstance(result, torch.Tensor):
            refs.append(weakref.ref(result))
        store(outputs, result, values)

    monkeypatch.setattr(interpreter, "_store", storing)
    gc.collect()
    gc.disable()
    try:
        found = interpreter.run_entries(trace, list(memory), scalars)
        kept = {id(value) for value in found}
        assert refs and all(ref() is None or id(ref()) in kept for ref in refs)
    finally:
        gc.enable()


def test_inputs_on_one_memory_are_each_read_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> torch.Tensor:
        w, other = torch.arange(6.0).to("lazy"), torch.arange(6.0).to("lazy")
        torchlazy.sync()
        w.mul_(2)
        other = other + 1
        torchlazy.sync()
        return w + other

    cuts: list[Cut] = []
    run_once = interpreter.run_entries

    def driver(trace: CutTrace, memory: list[torch.Tensor], scalars: list[Any], *_: Any) -> list[Any]:
        cuts.append((trace, [value.clone() for value in memory], list(scalars)))
        return run_once(trace, memory, scalars)

    monkeypatch.setattr(recorder, "driver", driver)
    program().tolist()
    trace, memory, scalars = next(cut for cut in cuts if cut[0].donations and len(cut[1]) == 2)
    ways = ByOperators()
    for _ in range(3):
        ways.run(trace, [value.clone() for value in memory], scalars)
    ((_, at),) = trace.donations
    shared = memory[at].clone()
    given = [shared if number == at else shared.view(-1) for number in range(2)]
    want = interpreter.run_entries(trace, [value.clone() for value in given], scalars)
    torch.testing.assert_close(ways.run(trace, given, scalars), want, rtol=0, atol=0)


class _Held(TorchDispatchMode):
    """The most bytes that values of a run take at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(value) for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        alive = [value.untyped_storage() for ref in self._made if (value := ref()) is not None]
        self.most = max(self.most, sum({found._cdata: found.nbytes() for found in alive}.values()))
        return result


def test_a_step_that_comes_again_holds_what_it_held_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, memory, scalars = _last_cut(monkeypatch, _training)
    want = interpreter.run_entries(trace, [value.clone() for value in memory], scalars)
    ways, most = ByOperators(), []
    for _ in range(3):
        given = [value.clone() for value in memory]
        with _Held() as held:
            found = ways.run(trace, given[:], scalars)
        torch.testing.assert_close(found, want, rtol=0, atol=0)
        for output, at in trace.donations:
            assert found[output].data_ptr() == given[at].data_ptr()
        most.append(held.most)
    assert most[0] > 0 and most[1] <= most[0] and most[2] <= most[0], most

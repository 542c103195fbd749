"""Programs whose result depends on what guards do not see: an audit catches each, names the line with what was there
then and is now, and the program's Python runs from then on."""

from __future__ import annotations

import ctypes
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
import torchlazy.lazy.compiled.capture.call as capture_of_calls

pytestmark = pytest.mark.usefixtures("operator_by_operator")


_LIBRARY = ctypes.CDLL(None)


def hidden_in_c() -> int:
    """A number that C code counts up, where no guard sees it."""
    return int(_LIBRARY.rand()) % 4096


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("audit", ["spaced", "all"])
def test_hidden_state_is_caught(audit: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchlazy.config, "audit", audit)
    run = torchlazy.compile(lambda x: x * hidden_in_c())
    x = torch.ones(3).to(device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [run(x).tolist()[0] for _ in range(8)]
    (text,) = [str(w.message) for w in told if "does not do the same" in str(w.message)]
    assert "test_compile_hidden_state.py" in text and " was " in text and ", is " in text, text
    assert run.report().alarm in text
    assert len(set(found[-4:])) == 4


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_every_call_is_compared(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchlazy.config, "audit", "all")
    run = torchlazy.compile(lambda x: x * 2)
    for _ in range(9):
        run(torch.ones(3).to(device))
    assert (run.report().replays, run.report().audits) == (0, 8)


def a_branch(values: Callable[[], float]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        if values() < 2:
            return x + 1
        return x * 2

    return run


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_hidden_branch_is_told_with_both_lines(device: str) -> None:
    hidden = iter(range(20))
    counted = ctypes.PYFUNCTYPE(ctypes.c_int)(lambda: next(hidden))
    address = ctypes.cast(counted, ctypes.c_void_p).value
    assert address is not None
    run = torchlazy.compile(a_branch(ctypes.PYFUNCTYPE(ctypes.c_int)(address)))
    x = torch.ones(3).to(device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [run(x).tolist()[0] for _ in range(12)]
    (text,) = [str(w.message) for w in told if "does not do the same" in str(w.message)]
    assert "add" in text and "mul" in text and text.count("test_compile_hidden_state.py") == 2, text
    assert found[-1] == 2.0


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_exchanged_parameters_are_let_go(device: str) -> None:
    """`load_state_dict(assign=True)`: variants on the old parameters do not keep them alive."""
    model = torch.nn.Linear(3, 2).to(device)
    run = torchlazy.compile(model)
    for batch in (2, 2, 2, 4, 4, 4):
        run(torch.randn(batch, 3).to(device))
    old = [weakref.ref(p) for p in model.parameters()]
    other = torch.nn.Linear(3, 2)
    model.load_state_dict({name: p.detach().to(device) for name, p in other.state_dict().items()}, assign=True)
    for batch in (2, 2, 4, 4, 2, 2):
        x = torch.randn(batch, 3)
        torch.testing.assert_close(run(x.to(device)).cpu(), other(x))
    gc.collect()
    assert [ref() for ref in old] == [None, None]
    assert run.report().replays >= 1 and not run.report().alarm, run.report()


def test_parameters_that_take_turns_keep_their_variants() -> None:
    model = torch.nn.Linear(3, 2)
    run = torchlazy.compile(model)
    turns = [torch.nn.Parameter(torch.randn(2, 3)) for _ in range(2)]
    for step in range(60):
        model.weight = turns[step % 2]
        x = torch.randn(2, 3)
        torch.testing.assert_close(run(x), torch.nn.functional.linear(x, model.weight, model.bias))
    assert run.report().captures <= 12 and run.report().replays >= 30, run.report()


@pytest.mark.parametrize("when", ["before the call", "after the call"])
def test_state_that_changes_while_it_is_looked_at_is_no_error(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Another thread, or the garbage collector, takes items out of a container that the call reaches."""
    held, ran = [1.0, 2.0, 3.0], []

    def call(x: torch.Tensor) -> torch.Tensor:
        ran.append(None)
        return x * held[0]

    compiled = torchlazy.compile(call)
    look, looks = capture_of_calls.discover, []

    def discover(*args: Any) -> Any:
        found = look(*args)
        looks.append(None)
        if len(held) > 1 and (when == "before the call" or len(looks) > 1):
            held.pop()
        return found

    monkeypatch.setattr(capture_of_calls, "discover", discover)
    x = torch.ones(2)
    for i in range(6):
        assert compiled(x).tolist() == [1.0, 1.0]
        assert len(ran) <= i + 1
    monkeypatch.undo()
    held[0] = 5.0
    assert compiled(x).tolist() == [5.0, 5.0]


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Around(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


SCRIPTED: dict[str, Callable[[Any], Callable[..., torch.Tensor]]] = {
    "itself": lambda module: module,
    "in a module": Around,
    "called": lambda module: lambda x: module(x) * 1,
    "its method": lambda module: lambda x, forward=module.forward: forward(x) * 1,
    "its attribute": lambda module: lambda x: x * module.scale,
    "of a module of its own": lambda module: torch.jit.script(Around(module)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTED)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_attributes_of_scripted_modules(name: str, device: str) -> None:
    module = torch.jit.script(Scaled())
    program = SCRIPTED[name](module)
    compiled = torchlazy.compile(program, audit=False)
    x = torch.ones(2)
    for scale in (2.0, 3.0, 5.0):
        module.scale = scale
        for _ in range(4):
            assert compiled(x.to(device)).tolist() == program(x).tolist()
    compiled = torchlazy.compile(lambda x, given: given(x), audit=False)
    for scale in (2.0, 3.0):
        module.scale = scale
        assert [compiled(x.to(device), module)[0].item() for _ in range(4)] == [scale] * 4

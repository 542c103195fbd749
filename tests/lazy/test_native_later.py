"""The native walk may come late: the general way serves until it is compiled; from the next trace on it is walked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import recorder
from torchlazy.lazy.record.follow import compiled_step, follower
from torchlazy.runtime.native import compiled_step as native_compiled_step
from torchlazy.runtime.native.code import NativeCode

pytestmark = [
    pytest.mark.skipif(native_compiled_step._loaded() is None, reason="no C++ compiler here"),
    pytest.mark.usefixtures("device_in_python"),
]


Steps = tuple[Callable[[], float], Callable[[], float]]


class Late(NativeCode):
    """The walk's own code, which is there when somebody says so."""

    def __init__(self) -> None:
        super().__init__("late", str, (), "")
        self.there, self.address = threading.Event(), native_compiled_step.CODE.wait()

    def _build(self, is_background: bool = False) -> None:
        self.there.wait(600)
        self._address, self._is_done = self.address, True


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    code = Late()
    monkeypatch.setattr(NativeCode, "may_wait", staticmethod(lambda: True))
    monkeypatch.setattr(native_compiled_step, "CODE", code)
    recorder.forget_paths()
    yield code
    code.there.set()
    code.wait()
    monkeypatch.undo()
    recorder.forget_paths()


def training() -> Steps:
    """The same step on the lazy device and on the CPU."""
    torch.manual_seed(0)
    model, twin = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    twin.load_state_dict(model.state_dict())
    model = model.to("lazy")
    x = torch.rand(2, 4)

    def step_of(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step() -> float:
            loss = model(x).reshape(-1).square().mean() + model(x).detach().view(2, 4).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    return step_of(model, x.to("lazy")), step_of(twin, x)


def turns(steps: Steps, count: int) -> None:
    for _ in range(count):
        mine, theirs = steps[0](), steps[1]()
        assert abs(mine - theirs) < 1e-5


def functions_of_python(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The walks that Python makes from here on."""
    made: list[object] = []
    monkeypatch.setattr(compiled_step, "_generator", lambda *facts: made.append(facts))
    return made


def test_steps_are_joined_when_it_is_there(late: Late, general: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = functions_of_python(monkeypatch)
    steps = training()
    turns(steps, 4)
    assert late.is_coming and recorder.native_steps.walk is None and not made
    general.clear()
    turns(steps, 1)
    before = len(general)
    late.there.set()
    late.wait()
    turns(steps, 2)  # the cut of the first takes it
    assert recorder.native_steps.walk is not None
    general.clear()
    turns(steps, 1)
    assert before > 20 and len(general) <= 2, general


def test_whoever_waits_for_compiling_has_it(late: Late, general: list[str]) -> None:
    steps = training()
    turns(steps, 4)
    threading.Timer(0.05, late.there.set).start()
    torchlazy.wait_for_compile()
    assert recorder.native_steps.walk is not None
    turns(steps, 1)  # what is seen idle is learned
    general.clear()
    turns(steps, 1)
    assert len(general) <= 2, general


@pytest.fixture
def three_at_once(late: Late, general: list[str], monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Steps that were recorded four times, and a walk that is there now and takes three of them at each cut."""
    monkeypatch.setattr(follower, "_JOINED_AT_ONCE", 3)
    steps = training()
    turns(steps, 4)
    late.there.set()
    late.wait()
    return steps


def test_few_steps_are_joined_at_once(three_at_once: Steps, general: list[str]) -> None:
    counts = []
    for _ in range(12):
        general.clear()
        turns(three_at_once, 1)
        counts.append(len(general))
    assert counts[1] - counts[2] in range(1, 10) and counts[-1] <= 2, counts


def test_whoever_waits_has_all_steps_joined(three_at_once: Steps, general: list[str]) -> None:
    turns(three_at_once, 1)
    torchlazy.wait_for_compile()
    turns(three_at_once, 1)  # what is seen idle is learned
    general.clear()
    turns(three_at_once, 1)
    assert len(general) <= 2, general


def test_it_comes_in_the_middle_of_a_trace(late: Late) -> None:
    x = torch.rand(3).to("lazy")

    def program(in_the_middle: Callable[[], None]) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        z = y.detach().t()
        in_the_middle()
        return (z + y).neg()

    def arrives() -> None:
        late.there.set()
        torchlazy.wait_for_compile()

    wanted = program(lambda: None).cpu()
    for happens in (lambda: None, lambda: None, arrives, lambda: None):
        assert torch.equal(program(happens).cpu(), wanted)
    assert recorder.native_steps.walk is not None


def test_where_it_cannot_be_compiled_python_walks(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    made = functions_of_python(monkeypatch)
    monkeypatch.setattr(late, "address", None)
    steps = training()
    turns(steps, 3)
    late.there.set()
    late.wait()
    with pytest.raises(TypeError):  # the walks of this test are no functions
        turns(steps, 2)
    assert made


def test_with_tiers_off_it_is_compiled_when_it_is_needed(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeCode, "may_wait", staticmethod(lambda: torchlazy.config.tiers == "on"))
    torchlazy.config.tiers = "off"
    late.there.set()
    x = torch.rand(3).to("lazy")
    for _ in range(2):
        (x * 2).cpu()
    assert not late.is_coming and recorder.native_steps.walk is not None

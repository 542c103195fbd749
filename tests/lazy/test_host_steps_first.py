"""Replays of steps that read their loss: counts of optimizer steps are brought up to date before the first program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.compiled.replay import replay
from torchlazy.lazy.compiled.replay.hosts import host_steps_first, written
from torchlazy.lazy.compiled.template.template import HostCall, HostItem, Segment


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(torchlazy.config, "tiers", "foreground")
    made: list[Any] = []
    begin = replay.Replay.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(replay.Replay, "__init__", init)
    return made


class Training:
    def __init__(self, device: str = "lazy") -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5)
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, foreach=True)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(self.net(x), y)
        number = loss.item()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return number

    def counts(self) -> list[float]:
        return [float(state["step"]) for state in self.optimizer.state.values()]


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)) for _ in range(number)
    ]


def test_counts_come_first_and_nothing_is_held_back(replays: list[Any]):
    training, eager = Training(), Training("cpu")
    run = torchlazy.compile(training.step)
    for x, y in batches(8):
        torch.testing.assert_close(run(x.to("lazy"), y.to("lazy")), eager.step(x, y), rtol=1e-4, atol=1e-5)
    found = replays[-1]
    kinds = [type(step) for step in host_steps_first(found.template).steps]
    programs = [position for position, kind in enumerate(kinds) if kind is Segment]
    assert len(programs) == 2
    assert {HostCall, HostItem} <= set(kinds[: programs[0]])
    assert not {HostCall, HostItem} & set(kinds[programs[0] :])
    assert not found._held and all(at < found._first for at in found._midway)
    assert training.counts() == eager.counts()
    torch.testing.assert_close(
        {name: value.cpu() for name, value in training.net.state_dict().items()}, eager.net.state_dict(), rtol=1e-4,
        atol=1e-5,
    )  # fmt: skip


@pytest.mark.usefixtures("device_in_python")  # its settings change midway
@pytest.mark.parametrize("failing", ["first", "second"])
def test_counts_are_as_before_where_a_program_raises(failing: str, replays: list[Any], monkeypatch: pytest.MonkeyPatch):
    training = Training()
    run = torchlazy.compile(training.step)
    *before, (x, y) = batches(7)
    for inputs, labels in before:
        run(inputs.to("lazy"), labels.to("lazy"))
    counts = training.counts()
    if failing == "first":
        with pytest.raises((IndexError, RuntimeError)):
            run(x.to("lazy"), (y + 5).to("lazy"))
    else:
        outputs = replay.Replay._outputs

        def fails(self: Any, step: Any, *rest: Any) -> Any:
            if step is [s for s in self.template.steps if isinstance(s, Segment)][-1]:
                raise MemoryError("no room for the backward")
            return outputs(self, step, *rest)

        monkeypatch.setattr(replay.Replay, "_outputs", fails)
        with pytest.raises(MemoryError):
            run(x.to("lazy"), y.to("lazy"))
        monkeypatch.undo()
    assert training.counts() == counts
    run(x.to("lazy"), y.to("lazy"))
    assert training.counts() == [count + 1 for count in counts]


def test_what_is_written_again_after_a_program_stays_in_its_place(replays: list[Any]):
    """Two optimizer steps in one call: the second one's counts are not there before the first one's program ran."""
    training = Training()

    def twice(x: torch.Tensor, y: torch.Tensor) -> Any:
        return training.step(x, y), training.step(x, y)

    run = torchlazy.compile(twice)
    eager = Training("cpu")
    for x, y in batches(7):
        wanted = eager.step(x, y), eager.step(x, y)
        torch.testing.assert_close(run(x.to("lazy"), y.to("lazy")), wanted, rtol=1e-4, atol=1e-5)
    assert training.counts() == eager.counts()
    ordered = host_steps_first(replays[-1].template)
    assert len([until for until, steps in ordered.moved().items() if written(steps)]) == 1


def test_a_loss_that_is_only_returned_is_waited_for_at_the_end(replays: list[Any], monkeypatch: pytest.MonkeyPatch):
    """The backward is launched while the device still computes the loss."""
    order: list[str] = []

    def begin_read(value: torch.Tensor) -> Any:
        order.append("begun")
        copy = value.clone()
        return lambda: (order.append("waited"), copy.item())[1]

    outputs = replay.Replay._outputs

    def runs(self: Any, *args: Any) -> Any:
        order.append("program")
        return outputs(self, *args)

    monkeypatch.setattr(replay, "begin_read", begin_read)
    monkeypatch.setattr(replay.Replay, "_outputs", runs)
    training, eager = Training(), Training("cpu")
    run = torchlazy.compile(training.step)
    for x, y in batches(8):
        order.clear()
        torch.testing.assert_close(run(x.to("lazy"), y.to("lazy")), eager.step(x, y), rtol=1e-4, atol=1e-5)
    assert order == ["program", "begun", "program", "waited"] or order == []  # the last call may have been an audit
    assert replays[-1]._read_later


def test_a_loss_that_decides_is_waited_for_at_once(replays: list[Any]):
    training, eager = Training(), Training("cpu")

    def step_of(world: Training) -> Any:
        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = F.cross_entropy(world.net(x), y)
            number = loss.item()
            if number < 1.7:
                loss = loss * 2
            loss.backward()
            world.optimizer.step()
            world.optimizer.zero_grad()
            return number

        return step

    run, wanted = torchlazy.compile(step_of(training)), step_of(eager)
    for x, y in batches(9):
        torch.testing.assert_close(run(x.to("lazy"), y.to("lazy")), wanted(x, y), rtol=1e-4, atol=1e-5)
    assert not replays[-1]._read_later

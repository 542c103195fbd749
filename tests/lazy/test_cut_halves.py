"""Steps on the lazy device that read their loss before `backward()`: forward and backward planned as one, whatever the
program does between the two."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.api import driver, recorder
from torchlazy.lazy.run.programs import Tiers
from torchlazy.lazy.run.segments import device as segments_device
from torchlazy.lazy.run.segments import watch

pytestmark = pytest.mark.usefixtures("device_in_python")

STEPS = 9


class Counts:
    """How many second halves ran, and how many promises were kept."""

    def __init__(self) -> None:
        self.halves = 0
        self.kept = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Halves are compiled at first sight, whatever they hold, and all other cuts run operator by operator."""

    def submit(self: Tiers, known: Any, trace: Any, options: Any, device: str, frame: str) -> str:
        if trace.half is None:
            return "tier 0: not compiled in this test"
        return self._compile_here(known, "", trace, options, frame)

    monkeypatch.setattr(Tiers, "_submit", submit)
    monkeypatch.setattr(torchlazy.config, "dynamic", "off")
    monkeypatch.setattr(torchlazy.config, "strict", True)
    monkeypatch.setattr(watch, "LEAST_BYTES", 0)
    found = Counts()
    second, rematerialize = segments_device.CutHalves._run_second, segments_device.Crossing.rematerialize

    def run_second(self: Any, *args: Any) -> Any:
        found.halves += 1
        return second(self, *args)

    def keep_values(self: Any, *args: Any) -> Any:
        values = rematerialize(self, *args)
        found.kept += bool(values)
        return values

    monkeypatch.setattr(segments_device.CutHalves, "_run_second", run_second)
    monkeypatch.setattr(segments_device.Crossing, "rematerialize", keep_values)
    torchlazy.sync()
    driver.halves.forget()
    yield found
    torchlazy.sync()
    driver.halves.forget()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.second = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.last = torch.nn.Linear(48, 5)
        self.looked_at: Any = None
        self.keeps = False
        self.hooked: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.norm(self.first(x)))
        g = torch.tanh(self.second(h) * 2.0) + h
        self.looked_at = g if self.keeps else None
        return self.last(g.flatten(1))


class World:
    """A model in training on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        torch.manual_seed(0)
        self.net = Net().to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9, foreach=True)
        self.told: list[float] = []

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)

    def read_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss, once it was read: a cut."""
        loss = self.loss(x, y)
        self.told.append(loss.item())
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


Event = Callable[[World, torch.Tensor, torch.Tensor], Any]


def usual(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = world.read_loss(x, y)
    loss.backward()
    world.update()


def no_backward(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    world.told.append(world.loss(x, y).item())


def twice_the_loss(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = world.read_loss(x, y)
    (loss * 2).backward()
    world.update()


def two_backwards(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = world.read_loss(x, y)
    loss.backward(retain_graph=True)
    loss.backward()
    world.update()


def parameter_changes(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    """Of a parameter that autograd did not save."""
    loss = world.read_loss(x, y)
    with torch.no_grad():
        world.net.last.bias.mul_(0.5)
        world.net.second.bias.add_(1.0)
    loss.backward()
    world.update()


def parameter_changes_and_is_sent_off(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = world.read_loss(x, y)
    world.net.second.weight.data.mul_(0.5)  # behind autograd's back: the gradients are those of the new weights
    world.told.append(world.net.second.weight.detach().sum().item())
    loss.backward()
    world.update()


def statistics_change(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = world.read_loss(x, y)
    world.net.norm.running_mean.data.zero_()
    world.told.append(world.net.norm.running_var.sum().item())
    loss.backward()
    world.update()


def input_changes(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    x = x * 1.0
    y = y + 0
    loss = world.read_loss(x * 2.0, y)
    x.zero_()
    world.told.append(x.sum().item())
    loss.backward()
    world.update()


def looks_at_inner_value(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    world.net.keeps = True
    loss = world.read_loss(x, y)
    world.told.append(world.net.looked_at.sum().item())
    loss.backward()
    world.update()
    world.told.append(world.net.looked_at.mean().item())
    world.net.keeps = False


def looks_after_update(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    world.net.keeps = True
    loss = world.read_loss(x, y)
    loss.backward()
    world.update()
    world.told.append(world.net.looked_at.mean().item())
    world.net.keeps = False


def saved_tensor_is_read(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = world.read_loss(x, y)
    saved = loss.grad_fn.next_functions[0][0]._saved_result
    world.told.append(saved.sum().item())
    loss.backward()
    world.update()


def raises_between(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    try:
        loss = world.loss(x, y)
        if loss.item() < 1e9:
            raise RuntimeError("skipped")
        loss.backward()
    except RuntimeError:
        world.optimizer.zero_grad()


def forwards_then_backwards(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    one = world.loss(x, y)
    world.told.append(one.item())
    other = world.loss(x * 0.5, y)
    world.told.append(other.item())
    other.backward()
    world.optimizer.step()
    world.optimizer.zero_grad()


def both_backwards(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    one = world.loss(x, y)
    world.told.append(one.item())
    other = world.loss(x * 0.5, y)
    world.told.append(other.item())
    one.backward()
    other.backward()
    world.update()


def accumulates(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    for part, labels in zip(x.chunk(2), y.chunk(2), strict=True):
        for _ in range(2):
            loss = world.read_loss(torch.cat((part, part)), torch.cat((labels, labels)))
            loss.backward()
    world.update()


def evaluates_between(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = world.read_loss(x, y)
    with torch.no_grad():
        world.net.eval()
        world.told.append(world.net(x).argmax(1).sum().item())
        world.net.train()
    loss.backward()
    world.update()


def grad_of_inputs(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = world.read_loss(x, y)
    (found,) = torch.autograd.grad(loss, [world.net.second.weight])
    world.told.append(found.sum().item())


def fails_in_forward(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        world.told.append(world.loss(x, y + 5).item())
    usual(world, x, y)


EVENTS: list[Event] = [
    no_backward, twice_the_loss, two_backwards, parameter_changes, parameter_changes_and_is_sent_off, statistics_change,
    input_changes, looks_at_inner_value, looks_after_update, saved_tensor_is_read, raises_between,
    forwards_then_backwards, both_backwards, accumulates, evaluates_between, grad_of_inputs, fails_in_forward,
]  # fmt: skip


def play(device: str, events: list[Event]) -> tuple[list[float], dict[str, Any]]:
    world = World(device)
    generator = torch.Generator().manual_seed(3)
    for event in events:
        x = torch.randn(16, 1, 2, 3, generator=generator).to(device)
        y = torch.randint(0, 5, (16,), generator=generator).to(device)
        event(world, x, y)
    return world.told, {name: value.cpu() for name, value in world.net.state_dict().items()}


def compare(events: list[Event]) -> None:
    wanted, found = play("cpu", events), play("lazy", events)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)


def test_steady_steps_run_as_halves(counts: Counts):
    compare([usual] * STEPS)
    assert counts.halves == STEPS - 3  # the first backward is another one: it makes the optimizer states
    assert counts.kept == 0


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_values_are_eagers_whatever_happens_between(event: Event, counts: Counts):
    compare([usual] * 6 + [event, usual, event, usual, usual])
    assert counts.halves >= 3


@pytest.mark.parametrize("event", [accumulates, both_backwards, twice_the_loss], ids=lambda event: event.__name__)
def test_other_steady_steps(event: Event, counts: Counts):
    compare([event] * 7)


@pytest.mark.parametrize("seed", range(2))
def test_random_steps(seed: int, counts: Counts):
    chosen = random.Random(seed)
    compare([usual, usual, *chosen.choices([usual, usual, *EVENTS], k=12)])


def test_what_is_promised_goes_with_those_who_wait_for_it(counts: Counts):
    world = World("lazy")
    x, y = torch.randn(16, 1, 2, 3).to("lazy"), torch.randint(0, 5, (16,)).to("lazy")
    for _ in range(4):
        usual(world, x, y)
    loss = world.loss(x, y)
    loss.item()
    assert len(recorder.rematerializing) == 1
    del loss
    gc.collect()
    assert len(recorder.rematerializing) == 0


def test_what_is_looked_at_is_memory_from_then_on(counts: Counts):
    world = World("lazy")
    x, y = torch.randn(16, 1, 2, 3).to("lazy"), torch.randint(0, 5, (16,)).to("lazy")
    for _ in range(4):
        usual(world, x, y)
    for _ in range(8):
        saved_tensor_is_read(world, x, y)
    assert counts.kept == 1
    assert counts.halves >= 6


def test_a_pair_that_does_not_hold_is_given_up(counts: Counts):
    """Another backward follows from now on: after a few forwards that ran twice, halves run apart."""
    world = World("lazy")
    x, y = torch.randn(16, 1, 2, 3).to("lazy"), torch.randint(0, 5, (16,)).to("lazy")
    for _ in range(4):
        usual(world, x, y)
    for scale in range(2, 10):
        loss = world.loss(x, y)
        loss.item()
        (loss.detach() * loss * scale).backward()
        world.update()
    assert 1 <= counts.kept <= 4


def test_a_trace_that_reads_a_promise_goes_on_when_it_is_kept(counts: Counts):
    def event(world: World, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = world.read_loss(x, y)
        result = loss.grad_fn.next_functions[0][0]._saved_result
        pending = result * 2
        world.told.append(float(result.detach().cpu().sum()))
        world.told.append(pending.sum().item())
        loss.backward()
        world.update()

    compare([usual] * 5 + [event, usual])
    assert counts.kept >= 1


def test_audited_calls_run_halves_too(counts: Counts):
    """An audited call of a compiled step runs its Python, recorded: its cuts are the step's own."""
    device, found = World("cpu"), World("lazy")
    run = torchlazy.compile(lambda x, y: usual(found, x, y))
    generator = torch.Generator().manual_seed(3)
    for _ in range(18):  # audits: 1, 2, 4, 8 and 16 replays on
        x, y = torch.randn(16, 1, 2, 3, generator=generator), torch.randint(0, 5, (16,), generator=generator)
        usual(device, x, y)
        run(x.to("lazy"), y.to("lazy"))
    assert counts.halves >= 2
    torch.testing.assert_close(found.told, device.told, rtol=2e-3, atol=2e-4)

"""Steps inside `lazy_mode` that read their loss before `backward()`: forward and backward planned as one, whoever
writes to ordinary tensors between the two."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.api import recorder

from tests.lazy import test_cut_parts as rounds
from tests.lazy.test_cut_halves import Counts, counts

__all__ = ["counts"]  # the fixture
pytestmark = pytest.mark.usefixtures("recorded_in_python")


class World(rounds.World):
    """A model of ordinary tensors; `mode`: whether its steps are recorded."""

    def __init__(self, mode: bool) -> None:
        super().__init__("cpu")
        self.mode = mode
        self.plain = torch.ones(8, 6) * 0.2
        self.scale = torch.tensor(1.5)
        self.block: Any = None

    def do(self, step: Step) -> None:
        self.block = torchlazy.lazy_mode() if self.mode else contextlib.nullcontext()
        with self.block:
            step(self)

    @contextlib.contextmanager
    def outside(self) -> Any:
        self.block.__exit__(None, None, None)
        yield
        self.block.__enter__()

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        """The loss, once it was read."""
        loss = F.log_softmax(self.net(x), -1)[:, 0].square().mean()
        self.told.append(loss.item())
        return loss

    def learn(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.update()


Step = Callable[[World], Any]


def usual(world: World) -> None:
    world.learn(world.loss_of(world.plain * 2))


def scaled(world: World) -> None:
    world.learn(world.loss_of(world.data() * world.scale))


def ordinary_changes(world: World) -> None:
    loss = world.loss_of(world.plain * 2)
    world.plain.mul_(0.9)
    world.told.append(world.plain.sum().item())
    world.learn(loss)


def array_changes(world: World) -> None:
    array = np.full((8, 6), 0.3, dtype=np.float32)
    loss = world.loss_of(torch.from_numpy(array) + 1)
    array[:] = 7
    world.learn(loss)


def array_of_tensor_changes(world: World) -> None:
    loss = world.loss_of(world.plain * 2)
    array = world.plain.numpy()
    array[:] = array * 0.5 + 0.1
    world.learn(loss)


def by_address(world: World) -> None:
    loss = world.loss_of(world.plain * 2)
    ctypes.memset(world.plain.data_ptr(), 0, 4 * 8)
    world.learn(loss)


def leaves_between(world: World) -> None:
    loss = world.loss_of(world.plain * 2)
    with world.outside():
        world.plain.add_(0.01)
        world.net[3].bias.data.add_(0.5)
    world.learn(loss)


def parameter_is_exchanged(world: World) -> None:
    loss = world.loss_of(world.plain * 2)
    world.net[3].weight.data = world.net[3].weight.data * 0.5
    world.learn(loss)


def one_number_changes(world: World) -> None:
    loss = world.loss_of(world.data() * world.scale)
    world.scale.mul_(0.9)
    world.learn(loss)


def memory_is_exchanged(world: World) -> None:
    loss = world.loss_of(world.plain * 2)
    world.plain.set_(world.plain.clone())
    world.learn(loss)


def is_looked_at(world: World) -> None:
    loss = world.loss_of(world.plain * 2)
    world.told.append(world.plain.tolist()[0][0] + len(str(world.plain)))
    world.learn(loss)


EVENTS: list[Step] = [
    ordinary_changes, array_changes, array_of_tensor_changes, by_address, leaves_between, parameter_is_exchanged,
    one_number_changes, memory_is_exchanged, is_looked_at, rounds.accumulates, rounds.backward_twice,
    rounds.gradient_is_read, rounds.saved_is_overwritten, rounds.evaluates_between, rounds.hook_raises,
]  # fmt: skip


@pytest.fixture(autouse=True)
def eager_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchlazy.config, "rng", "eager")


def play(mode: bool, steps: list[Step]) -> tuple[list[float], dict[str, Any]]:
    world = World(mode)
    for step in steps:
        world.do(step)
    return list(map(float, world.told)), dict(world.net.state_dict())


def compare(steps: list[Step]) -> None:
    torch.testing.assert_close(play(True, steps), play(False, steps), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("step", [usual, rounds.accumulates, rounds.rolls_out], ids=lambda step: step.__name__)
def test_steady_steps_run_as_halves(step: Step, counts: Counts):
    compare([step] * 12)
    assert counts.halves >= 6


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_values_are_eagers_whatever_happens_between(event: Step, counts: Counts):
    compare([usual] * 5 + [scaled] * 4 + [event, usual, scaled, event, usual])
    assert counts.halves >= 4


@pytest.mark.parametrize("event", [ordinary_changes, by_address, one_number_changes], ids=lambda event: event.__name__)
def test_promises_are_kept_before_somebody_writes(event: Step, counts: Counts):
    before = counts.kept
    compare([usual] * 5 + [scaled] * 4 + [event])
    assert counts.kept > before


def test_nothing_is_kept_from_step_to_step(counts: Counts):
    world = World(True)
    alive = []
    for _ in range(20):
        world.do(rounds.accumulates)
        gc.collect()
        alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        assert len(recorder.rematerializing) == 0
    assert counts.halves >= 20
    assert alive[-1] == alive[-2] == alive[12]

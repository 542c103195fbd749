"""Steps of several rounds on the lazy device without compile: accumulated gradients, and several forwards before one
backward, each forward planned with its own backward, whatever the program does between the two."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.api import driver, recorder
from torchlazy.lazy.run.programs import KnownTrace

from tests.lazy.round_worlds import RoundWorld
from tests.lazy.test_cut_halves import Counts, counts

pytestmark = pytest.mark.usefixtures("device_in_python")

__all__ = ["counts"]  # the fixture
ROUNDS = 3


@pytest.fixture(scope="module")
def programs() -> dict[Any, KnownTrace]:
    return {}


@pytest.fixture
def programs_stay(programs: dict[Any, KnownTrace], counts: Counts) -> Iterator[None]:
    """The usual steps' programs are those of the test before: the halves are found anew, and not compiled anew."""
    driver.tiers._known.update(programs)
    yield
    torchlazy.sync()
    programs |= driver.tiers._known


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 12, bias=False), torch.nn.BatchNorm1d(12), torch.nn.SiLU(), torch.nn.Linear(12, 3)
    )


class World(RoundWorld):
    width = 6

    def __init__(self, device: str) -> None:
        super().__init__(device, net, momentum=0.9)

    def loss(self) -> torch.Tensor:
        return F.log_softmax(self.net(self.data()), -1)[:, 0].square().mean()

    def read_loss(self) -> torch.Tensor:
        loss = self.loss()
        self.told.append(loss.item())
        return loss

    def round(self) -> None:
        self.read_loss().backward()

    def chance(self) -> torch.Tensor:
        """Of an action, which is looked at."""
        chances = F.log_softmax(self.net(self.data()), -1)
        action = chances[0].detach().argmax()
        self.told.append(int(action))
        return chances.index_select(1, action.view(1)).mean()


Step = Callable[[World], Any]


def accumulates(world: World) -> None:
    for _ in range(ROUNDS):
        world.round()
    world.update()


def rolls_out(world: World) -> None:
    total = torch.stack([world.chance() for _ in range(ROUNDS)]).sum()
    (-total).backward()
    world.update()


def one_round_more(world: World) -> None:
    for _ in range(ROUNDS + 1):
        world.round()
    world.update()


def longer_episode(world: World) -> None:
    torch.stack([world.chance() for _ in range(ROUNDS + 1)]).sum().backward()
    world.update()


def round_without_backward(world: World) -> None:
    world.round()
    world.read_loss()
    world.round()
    world.update()


def backward_twice(world: World) -> None:
    world.round()
    loss = world.read_loss()
    loss.backward(retain_graph=True)
    world.told.append(world.loss().item())
    loss.backward()
    world.round()
    world.update()


def another_backward(world: World) -> None:
    world.round()
    (world.read_loss() * 3).backward()
    world.round()
    world.update()


def gradient_is_read(world: World) -> None:
    for _ in range(ROUNDS):
        world.round()
        world.told.append(world.net[3].weight.grad.norm().item())
    world.update()


def manual_update_between(world: World) -> None:
    for _ in range(ROUNDS):
        world.round()
        with torch.no_grad():
            for parameter in world.net.parameters():
                parameter -= 0.1 * parameter.grad
        world.net.zero_grad()


def update_before_backward(world: World) -> None:
    world.round()
    loss = world.read_loss()
    with torch.no_grad():
        world.net[3].bias.add_(1.0)  # nobody saved it
    loss.backward()
    world.round()
    world.update()


def saved_is_overwritten(world: World) -> None:
    """Eager raises at the backward."""
    world.round()
    loss = world.read_loss()
    with torch.no_grad():
        world.net[3].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    world.optimizer.zero_grad()
    world.round()
    world.update()


def saved_is_overwritten_unseen(world: World) -> None:
    world.round()
    loss = world.read_loss()
    world.net[3].weight.data.mul_(0.5)
    loss.backward()
    world.round()
    world.update()


def evaluates_between(world: World) -> None:
    for _ in range(ROUNDS):
        loss = world.read_loss()
        with torch.no_grad():
            world.net.eval()
            world.told.append(world.loss().item())
            world.net.train()
        loss.backward()
    world.update()


def raises_between(world: World) -> None:
    world.round()
    try:
        if world.read_loss().item() < 1e9:
            raise RuntimeError("skipped")
    except RuntimeError:
        pass
    world.round()
    world.update()


def hook_raises(world: World) -> None:
    world.round()
    x = world.data().requires_grad_()
    x.register_hook(_raise)
    loss = F.log_softmax(world.net(x), -1)[:, 0].square().mean()
    world.told.append(loss.item())
    with pytest.raises(RuntimeError, match="of the hook"):
        loss.backward()
    world.optimizer.zero_grad()
    world.round()
    world.update()


def _raise(gradient: torch.Tensor) -> None:
    raise RuntimeError("of the hook")


def hook_reads(world: World) -> None:
    seen: list[float] = []
    handle = world.net[3].register_full_backward_hook(lambda m, i, o: seen.append(o[0].norm().item()))
    accumulates(world)
    handle.remove()
    world.told += seen


def logits_are_kept(world: World) -> None:
    kept = []
    for _ in range(ROUNDS):
        logits = world.net(world.data())
        loss = logits.square().mean()
        world.told.append(loss.item())
        loss.backward()
        kept.append(logits)
    world.update()
    world.told.append(torch.stack(kept).sum().item())


def state_is_carried(world: World) -> None:
    """From round to round, cut off the graph: truncated backpropagation."""
    state = torch.zeros(8, 6, device=world.device)
    for _ in range(ROUNDS):
        made = world.net(world.data() + state)
        loss = made.square().mean()
        world.told.append(loss.item())
        loss.backward()
        state = torch.cat((made, made), 1).detach()
    world.update()


def gradients_are_asked_for(world: World) -> None:
    world.round()
    (found,) = torch.autograd.grad(world.read_loss(), [world.net[0].weight])
    world.told.append(found.sum().item())
    world.round()
    world.update()


def in_a_thread(world: World) -> None:
    world.round()
    loss = world.read_loss()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    world.round()
    world.update()


def two_rollouts(world: World) -> None:
    for _ in range(2):
        torch.stack([world.chance() for _ in range(2)]).sum().backward()
    world.update()


def part_of_a_rollout(world: World) -> None:
    """The chance of one action is left out; the first one's backward comes by itself, and before."""
    one, _, three = [world.chance() for _ in range(ROUNDS)]
    one.backward()
    three.backward()
    world.update()


def in_the_order_of_time(world: World) -> None:
    for chance in [world.chance() for _ in range(ROUNDS)]:
        chance.backward()
    world.update()


def updates_within_a_rollout(world: World) -> None:
    one, two = world.chance(), world.chance()
    with torch.no_grad():
        world.net[3].bias.add_(0.5)
    (one + two + world.chance()).backward()
    world.update()


def looks_back(world: World) -> None:
    """At what the first forward saved, after the second one."""
    one, two = world.chance(), world.chance()
    saved = one.grad_fn.next_functions[0][0].next_functions[0][0]._saved_result
    world.told.append(saved.sum().item())
    (one + two).backward()
    world.update()


EVENTS: list[Step] = [
    one_round_more, longer_episode, round_without_backward, backward_twice, another_backward, gradient_is_read,
    manual_update_between, update_before_backward, saved_is_overwritten, saved_is_overwritten_unseen, evaluates_between,
    raises_between, hook_raises, hook_reads, logits_are_kept, state_is_carried, gradients_are_asked_for, in_a_thread,
    two_rollouts, part_of_a_rollout, in_the_order_of_time, updates_within_a_rollout, looks_back,
]  # fmt: skip


def play(device: str, steps: list[Step]) -> tuple[list[Any], dict[str, Any]]:
    world = World(device)
    for step in steps:
        step(world)
    return world.told, world.weights()


def compare(steps: list[Step]) -> None:
    wanted, found = play("cpu", steps), play("lazy", steps)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("step", [accumulates, rolls_out], ids=lambda step: step.__name__)
def test_steady_steps_run_as_halves(step: Step, counts: Counts):
    compare([step] * 12)
    assert counts.halves >= 3 * ROUNDS


@pytest.mark.usefixtures("programs_stay")
@pytest.mark.parametrize("usual", [accumulates, rolls_out], ids=lambda step: step.__name__)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_values_are_eagers_whatever_happens_between(event: Step, usual: Step, counts: Counts):
    compare([usual] * 11 + [event, usual, event, usual, usual])
    assert counts.halves >= ROUNDS


@pytest.mark.usefixtures("programs_stay")
@pytest.mark.parametrize("seed", range(2))
def test_random_steps(seed: int, counts: Counts):
    chosen = random.Random(seed)
    usual = [accumulates, rolls_out]
    compare([*usual * 6, *chosen.choices([*usual, *usual, *EVENTS], k=12)])


@pytest.mark.parametrize("step", [accumulates, rolls_out], ids=lambda step: step.__name__)
def test_nothing_is_kept_from_step_to_step(step: Step, counts: Counts):
    world = World("lazy")
    alive = []
    for _ in range(30):
        step(world)
        gc.collect()
        alive.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
        assert len(recorder.rematerializing) == 0
    assert counts.halves >= 15 * ROUNDS
    assert alive[-1] == alive[-2] == alive[15]

"""Forwards that wait for one backward on the lazy device hold once what they make alike: half-precision copies of
weights; each its own where a weight was written to between two of them."""

from __future__ import annotations

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.api import recorder

from tests.lazy.round_worlds import RoundWorld
from tests.lazy.test_cut_halves import Counts, counts

pytestmark = pytest.mark.usefixtures("device_in_python")

__all__ = ["counts"]  # the fixture
ROUNDS = 3


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)
    )


class World(RoundWorld):
    """A model under autocast that is asked for an action a few times before each backward."""

    def __init__(self, device: str) -> None:
        super().__init__(device, net)
        self.waiting: list[tuple[int, int]] = []

    def chance(self) -> torch.Tensor:
        x = self.data()
        with torch.autocast(self.device, torch.bfloat16):
            chances = F.log_softmax(self.net(x).float(), -1)
        self.told.append(chances[0].detach().amax().item())
        return chances[:, 0].mean()

    def rolls_out(self, change: str = "") -> None:
        total = torch.zeros((), device=self.device)
        for number in range(ROUNDS):
            if number == 2 and change.startswith("weight"):
                with torch.no_grad():
                    self.net[0].weight.mul_(1.5)
                if change == "weight, then a cut":
                    torchlazy.flush()
            if number == 2 and change == "data":
                self.net[0].weight.data = self.net[0].weight.data * 1.5
            total = total - self.chance()
        self.look()
        total.backward()
        self.update()

    def look(self) -> None:
        """How many tensors of halves as large as a weight wait, and how many of them are of their own."""
        if self.device == "lazy":
            held = [t for crossing in list(recorder.rematerializing) for t in crossing._made if t is not None]
            held = [t for t in held if t.dtype == torch.bfloat16 and t.numel() == 16 * 16]
            self.waiting.append((len(held), len({t.untyped_storage()._cdata for t in held})))


def play(device: str, change: str = "", steps: int = 12) -> World:
    world = World(device)
    for number in range(steps):
        world.rolls_out(change if number >= steps - 2 else "")
    return world


@pytest.mark.parametrize("change", ["", "weight", "weight, then a cut", "data"])
def test_values_are_eagers(change: str, counts: Counts) -> None:
    wanted, found = play("cpu", change), play("lazy", change)
    assert counts.halves >= 3 * ROUNDS
    torch.testing.assert_close(found.told, wanted.told, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.weights(), wanted.weights(), rtol=2e-2, atol=2e-2)


def test_copies_of_weights_are_held_once(counts: Counts) -> None:
    held, own = play("lazy").waiting[-1]
    assert held == ROUNDS and own == 1

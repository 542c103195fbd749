"""Calls that are followed as a whole: random operators with their seeds, and a batch norm with what it writes.

Invariant: values, written memory and the state of torch's generator are those of the same program recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.api import recorder

from tests.lazy.known_traces import known

pytestmark = pytest.mark.usefixtures("way")
Program = Callable[[torch.Tensor, int], Any]


def dropouts(x: torch.Tensor, turn: int) -> torch.Tensor:
    """Other probabilities, other arguments, now and then one call more or less."""
    y = F.dropout(x * 2, (0.1, 0.1, 0.5)[turn % 3])
    y = F.dropout(y if turn % 5 else x, 0.1)
    return F.dropout(y, 0.1) if turn % 7 == 6 else y


def drawn_in_place(x: torch.Tensor, turn: int) -> torch.Tensor:
    """New memory, memory that was there, windows, and a generator of the caller's."""
    y = torch.empty_like(x).normal_(0.5, (0.1, 0.2)[turn % 4 == 3])
    z = (x * 1).bernoulli_(0.5)
    if turn % 3 == 2:
        z[0].uniform_(-1, 1)
    own = torch.Generator().manual_seed(turn) if turn % 2 else None
    return y + z + torch.empty_like(x).uniform_(generator=own)


def made(x: torch.Tensor, turn: int) -> torch.Tensor:
    """Other sizes and types."""
    y = torch.rand(3, (3, 1)[turn % 4 == 2], device=x.device) + torch.rand_like(x)
    y = y + torch.randint(0, 5 + turn % 2, (3, 3), device=x.device)
    return y + torch.rand_like(x, dtype=torch.float64 if turn % 5 == 4 else None) + torch.bernoulli(x)


def normed(x: torch.Tensor, turn: int) -> list[torch.Tensor]:
    """The running statistics are two, or one, or read in between; other momenta."""
    mean, var = torch.zeros_like(x[0]), torch.ones_like(x[0])
    y = F.batch_norm(x, mean, var, training=True, momentum=(0.1, 0.2)[turn % 4 == 3])
    if turn % 3 == 2:
        mean = mean * 2
    z = F.batch_norm(y + 1, mean, mean if turn % 5 == 4 else var, training=True)
    return [y, z, mean, var]


@pytest.mark.parametrize("program", [dropouts, drawn_in_place, made, normed], ids=lambda program: program.__name__)
def test_values_and_the_generator_are_as_when_recorded_anew(program: Program) -> None:
    x = torch.rand(3, 3).to("lazy")

    def run(forgets: bool) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
        torch.manual_seed(3)
        found = []
        for turn in (0, 0, 0, 0, *range(1, 12), 1, 2, 1, 2, 0, 0):
            result = program(x, turn)
            state = torch.get_rng_state()
            found.append(([one.cpu() for one in (result if type(result) is list else [result])], state))
            if forgets:
                recorder.forget_paths()
        return found

    for turn, (mine, theirs) in enumerate(zip(run(False), run(True), strict=True)):
        assert torch.equal(mine[1], theirs[1]), turn
        for one, other in zip(mine[0], theirs[0], strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other)


def test_the_running_statistics_are_the_module_s(way: str) -> None:
    torch.manual_seed(0)
    norm, x = torch.nn.BatchNorm1d(3), torch.rand(5, 3)
    lazy_norm = torch.nn.BatchNorm1d(3).to("lazy")
    lazy_x = x.to("lazy")
    for _ in range(6):
        one, other = norm(x), lazy_norm(lazy_x)
        torchlazy.flush()
        torch.testing.assert_close(other.detach().cpu(), one.detach())
        torch.testing.assert_close(lazy_norm.running_mean.cpu(), norm.running_mean)
        torch.testing.assert_close(lazy_norm.running_var.cpu(), norm.running_var)


def test_numbers_drawn_eagerly_leave_the_known_trace() -> None:
    x = torch.rand(3, 3).to("lazy")
    known(lambda: F.dropout(x * 2, 0.5) + 1, 5)
    eager = torchlazy.config.rng
    torchlazy.config.rng = "eager"
    try:
        torch.manual_seed(1)
        found = (F.dropout(x * 2, 0.5) + 1).cpu()
        torch.manual_seed(1)
        torch.testing.assert_close(found, F.dropout(x.cpu() * 2, 0.5) + 1)
    finally:
        torchlazy.config.rng = eager


def test_factories_follow_the_target_and_the_default_type() -> None:
    def program() -> torch.Tensor:
        return torch.ones(3, device="lazy") + torch.zeros(3, device="lazy")

    known(program, 4)
    torch.set_default_dtype(torch.float64)
    try:
        known(program, 2)
        assert program().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    known(program, 2)
    assert program().dtype == torch.float32

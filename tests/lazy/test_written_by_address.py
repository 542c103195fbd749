"""Ordinary tensors that C++ fills by their address, in compiled calls: replays have what the capture saw in them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
import torchlazy
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def filled() -> Iterator[None]:
    """New memory that nobody writes holds the largest integer, or NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lengths_of_a_loss(reduction: str, tier: str) -> None:
    """torch divides by a tensor of the lengths, which it makes empty and then fills with the numbers of the list."""
    words = torch.tensor([[1, 2, 3, 1], [2, 3, 1, 2]])

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(scores.log_softmax(-1), words.to(scores.device), (8, 7), (4, 3), reduction=reduction)

    run = torchlazy.compile(loss, audit=False)
    for i in range(5):
        want, have = (
            (torch.arange(64.0).view(8, 2, 4) * (i + 1)).sin().to(d).requires_grad_() for d in ("cpu", "lazy")
        )
        wanted, found = loss(want), run(have)
        torch.testing.assert_close(found.cpu(), wanted)
        wanted.sum().backward()
        found.sum().backward()
        torch.testing.assert_close(have.grad.cpu(), want.grad)
    assert run.report().replays >= 3, run.report()


def test_what_operators_write_is_written_in_each_replay() -> None:
    def call(x: torch.Tensor, scale: float) -> torch.Tensor:
        room = torch.empty(3)
        room[:2] = scale
        room[2] = 1
        whole = torch.empty(3).fill_(scale)
        return x * room.to(x.device) + whole.to(x.device)

    run = torchlazy.compile(call, audit=False)
    for i in range(6):
        torch.testing.assert_close(run(torch.ones(3).to("lazy"), i + 0.5).cpu(), call(torch.ones(3), i + 0.5))
    assert run.report().replays >= 2, run.report()


@pytest.mark.usefixtures("device_in_python")
def test_memory_that_is_written_and_then_changed_in_place() -> None:
    """A write by its address stands for one of C++ code."""

    def call(x: torch.Tensor) -> torch.Tensor:
        filled = torch.empty(3)
        for i in range(3):
            set_by_address(filled, i, 4.0 + i)
        return x * filled.mul_(2).to(x.device)

    run = torchlazy.compile(call, audit=False)
    for i in range(5):
        x = torch.arange(3.0) + i
        torch.testing.assert_close(run(x.to("lazy")).cpu(), x * torch.tensor([8.0, 10.0, 12.0]))
    assert run.report().replays >= 2, run.report()


def set_by_address(tensor: torch.Tensor, position: int, value: float) -> None:
    ctypes.c_float.from_address(tensor.data_ptr() + 4 * position).value = value

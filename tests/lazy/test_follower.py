"""Steps learned along a path: in-place writes, lists, several results, keyword arguments and numbers that vary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.api import recorder
from torchlazy.lazy.record.recorder import Recorder

Program = Callable[[torch.Tensor, int], torch.Tensor]


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators that went the general way."""
    seen: list[str] = []
    original = Recorder._record

    def spy(self: Recorder, op: torch._ops.OpOverload, args: object, kwargs: object) -> object:
        seen.append(str(op))
        return original(self, op, args, kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Recorder, "_record", spy)
    yield seen


def in_place(x: torch.Tensor, turn: int) -> torch.Tensor:
    y = x * 2
    y.add_(x)
    y.mul_(x)
    return y + y


def lists(x: torch.Tensor, turn: int) -> torch.Tensor:
    values = [x * 2, x + 1, x.abs()]
    torch._foreach_add_(values, [x, x, x])
    torch._foreach_mul_(values, 0.5 + turn)
    added = torch._foreach_add(values, 1.0)
    return torch.cat(list(added))


def several_results(x: torch.Tensor, turn: int) -> torch.Tensor:
    values, indices = (x * 2).sort(dim=0)
    normal = F.layer_norm(x, x.shape[-1:])
    return values + indices + normal


def keywords(x: torch.Tensor, turn: int) -> torch.Tensor:
    y = torch.add(x, x, alpha=2)
    z = torch.full_like(y, 3.0, dtype=torch.float64)
    return z.sum(0, dtype=torch.float32) + y


def numbers(x: torch.Tensor, turn: int) -> torch.Tensor:
    y = x.mul(0.1 * (turn + 1)).add(0.1 * (turn + 1)).mul(0.25)
    return y.add(x, alpha=1.5 + turn)


def detached(x: torch.Tensor, turn: int) -> torch.Tensor:
    y = (x + 1).detach()
    y.mul_(2)
    return y.t() + x.detach()


def windows(x: torch.Tensor, turn: int) -> torch.Tensor:
    first, _ = (x * 2).split(2)
    first.add_(1.5)
    return torch.stack([*x.unbind(1), first.sum(0)])


PROGRAMS = {p.__name__: p for p in (in_place, lists, several_results, keywords, numbers, detached, windows)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_eager_s_at_each_turn(name: str) -> None:
    x = torch.rand(4, 4)
    lazy = x.to("lazy")
    for turn in range(6):
        torch.testing.assert_close(PROGRAMS[name](lazy, turn).cpu(), PROGRAMS[name](x, turn))


def test_a_write_to_an_alias_of_an_operand_is_noticed() -> None:
    """The same slots, but the written tensor now shares its memory with the operand."""
    for turn in range(8):
        x = torch.arange(6.0)
        lazy = x.to("lazy")
        for base in (x, lazy):
            first = base * 2
            other = first.detach() if turn % 3 == 2 else first.clone()
            first.add_(other)
            base.copy_(first + other)
        torch.testing.assert_close(lazy.cpu(), x)


def test_a_window_elsewhere_on_the_memory_is_noticed() -> None:
    """A value written into a window has the window's value, but not its place."""
    for turn in range(8):
        x = torch.arange(8.0)
        lazy = x.to("lazy")
        results = []
        for base in (x, lazy):
            value = base[:4] * 3
            window = base[4:]
            window.copy_(value)
            source = window if turn % 2 else value
            view = source.view(2, 2)
            view.add_(1)
            results.append((base * 1, value * 1))
        for mine, theirs in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(mine.cpu(), theirs)


def test_what_an_operator_leaves_unread_is_no_input(compiled: None) -> None:
    """Batch norm's backward in training is given the running statistics and does not look at them. In a trace of its
    own nothing else reads them, so that a look at them would be an input more, and another trace at each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 1)).to("lazy")
    x = torch.rand(8, 4).to("lazy")

    def step() -> None:
        loss = model(x).square().mean()
        loss.item()
        loss.backward()
        torchlazy.flush()
        model.zero_grad()

    for _ in range(4):
        step()
    misses = torchlazy.metrics()["misses"]
    for _ in range(3):
        step()
    assert torchlazy.metrics()["misses"] == misses
    frozen = model.eval()
    frozen(x).sum().backward()  # now it does look at them
    expected = copy.deepcopy(frozen).cpu()
    expected.zero_grad()
    frozen.zero_grad()
    frozen(x).sum().backward()
    expected(x.cpu()).sum().backward()
    for mine, theirs in zip(frozen.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_an_input_that_comes_earlier_is_noticed() -> None:
    x, y = torch.rand(3), torch.rand(3)
    for turn in range(8):
        lx, ly = x.to("lazy"), y.to("lazy")
        mine = lx * 2 + ly if turn % 3 else ly * 2 + lx
        theirs = x * 2 + y if turn % 3 else y * 2 + x
        torch.testing.assert_close(mine.cpu(), theirs)


def test_traces_cut_at_their_limit_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A followed operator watches the limit as a recorded one does: every turn has the same cuts."""
    monkeypatch.setattr(torchlazy.config, "max_trace_length", 40)
    x = torch.rand(3).to("lazy")
    lengths: list[list[int]] = []
    original = recorder.on_cut
    monkeypatch.setattr(recorder, "on_cut", lambda cause, frame, entries: lengths[-1].append(entries))
    for _ in range(5):
        lengths.append([])
        y = x
        for _ in range(100):
            y = y + 1
        y.tolist()
    assert original is not None
    assert lengths[0] == lengths[2] == lengths[3] == lengths[4]


def test_a_capture_writes_down_its_own_numbers() -> None:
    scale = [0.5]
    x = torch.rand(4)
    lazy = x.to("lazy")

    def step(value: torch.Tensor) -> torch.Tensor:
        return value * scale[0] + scale[0]

    compiled = torchlazy.compile(step)
    for turn in range(6):
        scale[0] = 0.5 + turn
        step(lazy).tolist()
        torch.testing.assert_close(compiled(lazy).cpu(), step(x))

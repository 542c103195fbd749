"""Results of compiled calls that are views of what the caller has are views in autograd's eyes, as in eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor

pytestmark = pytest.mark.usefixtures("operator_by_operator")
State = SimpleNamespace


def of_an_argument(x: Tensor, state: State) -> list[Tensor]:
    return [x[0], x]


def of_another_result(x: Tensor, state: State) -> list[Tensor]:
    made = x * 2
    return [made[:, 1:], made]


def two_of_what_nobody_has(x: Tensor, state: State) -> list[Tensor]:
    made = x * 2
    return [made[0], made[0, :2]]


def of_state(x: Tensor, state: State) -> list[Tensor]:
    state.cache.add_(x)
    return [state.cache[:, :2], state.cache]


def kept_in_the_state(x: Tensor, state: State) -> list[Tensor]:
    state.row = state.cache[0]
    return [state.row, state.cache]


def written_under_autograd(view: Tensor, other: Tensor, weight: Tensor) -> list[object]:
    view.mul_(weight)
    other.sum().backward()
    return [other.requires_grad, None if weight.grad is None else weight.grad.tolist()]


def saved_and_written(view: Tensor, other: Tensor, weight: Tensor) -> list[object]:
    loss = (view * weight).sum()
    other.add_(1)
    loss.backward()
    return [weight.grad.tolist()]  # type: ignore[union-attr]


def looked_at(view: Tensor, other: Tensor, weight: Tensor) -> list[object]:
    other.detach().add_(1)
    return [view.tolist(), view._is_view(), view._version, view.requires_grad]


def seen(body: Any, use: Any, device: str, window: bool, is_compiled: bool) -> list[object]:
    state = State(cache=torch.zeros(2, 3).to(device), row=None)

    def call(x: Tensor) -> list[Tensor]:
        return body(x, state)

    function = torchlazy.compile(call, audit=False) if is_compiled else call
    found: list[object] = []
    for number in range(4):
        x = (torch.arange(12.0) + number).to(device).view(2, 6)
        x = x[:, 1:4] if window else x[:, :3].clone()
        state.cache = state.cache.detach().clone()
        view, other = function(x)
        factor = torch.tensor(2.0).to(device).requires_grad_()
        try:
            found.append(use(view, other, factor))
        except RuntimeError as error:
            found.append(str(error)[:40])
    return found


@pytest.mark.parametrize("window", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("use", [written_under_autograd, saved_and_written, looked_at])
@pytest.mark.parametrize(
    "body",
    [of_an_argument, of_another_result, two_of_what_nobody_has, of_state, kept_in_the_state],
)
def test_views_are_as_in_eager(body: Any, use: Callable[..., Any], device: str, window: bool) -> None:
    assert seen(body, use, device, window, True) == seen(body, use, device, window, False)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.filterwarnings("ignore:torchlazy.compile")
def test_results_of_calls_that_run_their_python_are_views_too(device: str) -> None:
    def call(x: Tensor) -> list[Tensor]:
        made = x * (2 if random.random() < 2 else 3)
        return [made, made[0], x[0], made]

    compiled = torchlazy.compile(call, audit=False)
    for _ in range(5):
        weight = torch.tensor(2.0).to(device).requires_grad_()
        x = torch.ones(2, 3).to(device)
        made, row, other, again = compiled(x)
        assert made is again
        row.mul_(weight)
        other.mul_(weight)
        (made.sum() + x.sum()).backward()
        assert weight.grad is not None and weight.grad.item() == 9
    assert compiled.report().replays == 0


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 3), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "turn",
    [
        lambda x: x.squeeze_().unsqueeze_(-1),
        lambda x: x.unsqueeze_(0).squeeze_(),
        lambda x: x.unsqueeze_(0).add_(1),
        lambda x: x.resize_(2).fill_(3),
        lambda x: x.swapaxes_(0, -1) if x.dim() else x.unsqueeze_(0),
    ],
    ids=["there and back", "back and forth", "written", "resized", "turned"],
)
@pytest.mark.filterwarnings("ignore")
def test_an_argument_whose_form_changes(shape: tuple[int, ...], turn: Callable[[Tensor], Tensor]) -> None:
    def step(x: Tensor) -> Tensor:
        turn(x)
        return x * 2

    compiled = torchlazy.compile(step)
    for number in range(6):
        mine, eagers = (torch.arange(6.0)[: torch.Size(shape).numel()].reshape(shape) + number for _ in range(2))
        assert torch.equal(compiled(mine), step(eagers))
        assert (mine.shape, mine.stride()) == (eagers.shape, eagers.stride()) and torch.equal(mine, eagers)

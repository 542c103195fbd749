"""`requires_grad` of arguments and of the state that a compiled call leaves changed is changed by each replay."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("operator_by_operator")
State = SimpleNamespace


def asks(x: Tensor, state: State) -> Any:
    x.requires_grad_()


def asks_and_takes_back(x: Tensor, state: State) -> Any:
    x.requires_grad_()
    found = torch.autograd.grad((x * x).sum(), x)[0]
    x.requires_grad_(False)
    return found


def asks_and_runs_backward(x: Tensor, state: State) -> Any:
    x.requires_grad_()
    (x * state.p).sum().backward()
    return x.grad


def gives_what_needs_it(x: Tensor, state: State) -> Any:
    x.requires_grad_()
    return x * 2


def turns_a_parameter(x: Tensor, state: State) -> Any:
    state.p.requires_grad_(not state.p.requires_grad)
    return x * 2


def turns_state(x: Tensor, state: State) -> Any:
    state.a.requires_grad_(not state.a.requires_grad)


def keeps_the_argument(x: Tensor, state: State) -> Any:
    state.a = x.requires_grad_()


def seen(body: Callable[[Tensor, State], Any], device: str, window: bool, is_compiled: bool) -> list[object]:
    state = State(p=nn.Parameter(torch.ones(3).to(device)), a=torch.ones(3).to(device))

    def call(x: Tensor) -> Any:
        return body(x, state)

    function = torchlazy.compile(call, audit=False) if is_compiled else call
    found: list[object] = []
    for number in range(4):
        x = (torch.arange(6.0) + number).to(device)
        x = x[1::2] if window else x[:3].clone()
        result = function(x)
        needs = result is not None and result.requires_grad
        if needs:
            result.sum().backward()
        found += [x.requires_grad, x.is_leaf, state.p.requires_grad, state.a.requires_grad, needs]
        found.append(None if x.grad is None else x.grad.tolist())
    return found


@pytest.mark.parametrize("window", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize(
    "body",
    [asks, asks_and_takes_back, asks_and_runs_backward, gives_what_needs_it, turns_a_parameter, turns_state,
     keeps_the_argument],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:torchlazy.compile")
def test_flags_are_as_in_eager(body: Callable[[Tensor, State], Any], device: str, window: bool) -> None:
    assert seen(body, device, window, True) == seen(body, "cpu", window, False)


def test_a_changed_flag_is_replayed() -> None:
    step = torchlazy.compile(lambda x: torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0], audit=False)
    for _ in range(3):
        x = torch.ones(3)
        assert step(x).tolist() == [2, 2, 2] and x.requires_grad
    assert step.report().replays == 2

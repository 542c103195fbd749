"""Compiled calls whose Python raises: what they did until then stays, as in eager, on argument views, in containers of
the caller and in the state, which hold ordinary tensors."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchlazy


def _containers(state, x, items, table, box, k):
    items.append(k)
    table["made"] = x * 2
    del table["number"]


def _numbers(state, x, items, table, box, k):
    state.k, state.w = state.k + 1, x * 2
    table["number"] = k
    box.k = k * 2


def _arguments(state, x, items, table, box, k):
    x.add_(1)
    x.mul_(k)
    items[0].add_(1)
    items[0] = items[0] * 2
    table["x"].mul_(2)
    box.x.unsqueeze_(0)


def _views(state, x, items, table, box, k):
    state.x = x[1:]
    state.x.add_(1)
    state.y = items[0].detach()
    state.y.add_(2)


def _turns(state, x, items, table, box, k):
    state.q.append(x * k)
    state.q.popleft()
    state.buffer.add_(x.sum())
    items.append(x.sum().item())


def _gradient(state, x, items, table, box, k):
    (state.p * k).sum().backward()


def _loop(state, x, items, table, box, k):
    for i in range(k):
        x[i % 3].add_(i)


STEPS = [_containers, _numbers, _arguments, _views, _turns, _gradient, _loop]


def _seen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist(), value._version, value.dtype, type(value)
    if isinstance(value, (list, deque)):
        return [_seen(item) for item in value]
    if isinstance(value, dict):
        return {name: _seen(item) for name, item in value.items()}
    return type(value), value


def _run(called: Any, device: str, of_larger: bool) -> list[Any]:
    """What is seen after each of some calls."""

    def made(number: int) -> torch.Tensor:
        rows = torch.full((9, 2), number + 1.0, device=device)[3:6]
        return rows if of_larger else rows.clone()

    state = SimpleNamespace(k=1.5, p=torch.nn.Parameter(torch.ones(2, device=device)))
    state.buffer = torch.zeros(2, device=device)
    found = []
    for number in range(6):
        state.q = deque([1])
        x, items, table = made(number), [made(number), 2], {"x": made(number), "number": 1}
        box = SimpleNamespace(x=made(number))
        raised = ""
        try:
            called(state, x, items, table, box, 2 + number % 2)
        except ArithmeticError as error:
            raised = str(error)
        found.append([raised, *map(_seen, (x, items, table, vars(box), vars(state), state.p.grad))])
    return found


@pytest.mark.parametrize("of_larger", [False, True], ids=["own", "views"])
@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("always", [True, False], ids=["always", "at times"])
def test_what_a_call_did_before_it_raised_stays(step: Any, device: str, of_larger: bool, always: bool) -> None:
    def called(state, x, items, table, box, k):
        step(state, x, items, table, box, k)
        if always or k == 3:
            raise ArithmeticError("odd")

    wanted = _run(called, device, of_larger)
    assert _run(torchlazy.compile(called), device, of_larger) == wanted
    assert any(seen[0] for seen in wanted)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_the_traceback_leads_to_the_line(device: str) -> None:
    def called(x):
        x.add_(1)
        return x.view(7, 7)

    x = torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match="shape") as caught:
        torchlazy.compile(called)(x)
    assert any(entry.name == "called" for entry in caught.traceback)
    assert x.tolist() == [1, 1, 1]

"""Compiled calls that leave a tensor on other memory or in another form: replays do so as well.

Invariant: values, shapes and who shares memory with whom are eager's after each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("operator_by_operator")
Play = tuple[list[Tensor], Callable[..., Tensor]]


def swapped(device: str) -> Play:
    p, q = nn.Parameter(torch.randn(3, 4).to(device)), torch.randn(3, 4).to(device)

    def call(x: Tensor) -> Tensor:
        p.data, other = q, p.data
        q.data = other
        return x * p.detach() + 2 * q

    return [p, q], call


def argument_transposed(device: str) -> Play:
    def call(x: Tensor) -> Tensor:
        x.t_()
        return x * 2

    return [], call


def argument_replaced(device: str) -> Play:
    def call(x: Tensor) -> Tensor:
        x.data = x.data * 2
        return x + 1

    return [], call


def argument_on_another(device: str) -> Play:
    def call(x: Tensor, y: Tensor) -> Tensor:
        x.set_(y)
        return x + 1

    return [], call


def state_on_an_argument(device: str) -> Play:
    p = torch.zeros(3, 4).to(device)

    def call(x: Tensor) -> Tensor:
        p.data = x.data
        return p.add_(1) * 2

    return [p], call


def another_window(device: str) -> Play:
    p = torch.zeros(3, 4).to(device)
    whole = p.view(12)

    def call(x: Tensor) -> Tensor:
        p.data = whole.view(4, 3).t()
        p.add_(x)
        return p * 2

    return [p, whole], call


def turned_each_time(device: str) -> Play:
    p = torch.zeros(4, 4).to(device)

    def call(x: Tensor) -> Tensor:
        p.add_(x.sum()).t_()
        return p[1] * x[0]

    return [p], call


def _played(make: Callable[[str], Play], device: str, compiled: bool) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    state, call = make(device)
    run = torchlazy.compile(call, audit=False) if compiled else call
    found: list[Any] = []
    for i in range(8):
        count = 2 if make is argument_on_another else 1
        given = [(torch.arange(12.0).view(3, 4) * (i + n + 1)).to(device) for n in range(count)]
        value = run(*given)
        everything = [*given, *state]
        shared = [
            [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in everything] for b in everything
        ]
        found.append([[x.detach().cpu().clone() for x in (value, *everything)], shared if device == "cpu" else None])
    return found, run


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize(
    "make",
    [
        swapped, argument_transposed, argument_replaced, argument_on_another, state_on_an_argument, another_window,
        turned_each_time,
    ],
)  # fmt: skip
def test_memory_after_each_call_is_eagers(make: Callable[[str], Play], device: str) -> None:
    wanted, _ = _played(make, "cpu", False)
    found, run = _played(make, device, True)
    for number, ((have, shared), (want, as_eager)) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(have, want, msg=lambda text, n=number: f"call {n}: {text}")
        assert shared in (None, as_eager), number
    captured_each_time = make in (argument_replaced, state_on_an_argument)
    assert run.report().replays >= (0 if captured_each_time else 6), run.report()

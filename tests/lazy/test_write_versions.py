"""Writes to ordinary tensors are counted once, when they are recorded, so that autograd notices what it would in eager.

Invariant: a tensor written before it is saved for a backward outside of the recording does not spoil it; one written
afterwards does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("operator_by_operator")

WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda w: w.add_(0.1),
    "data": lambda w: w.data.add_(0.1),
    "view": lambda w: w[0].mul_(2),
    "view of a view": lambda w: w.view(2, 2).t()[0].mul_(2),
    "detached": lambda w: w.detach().mul_(2),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "setitem": lambda w: w.__setitem__(1, 3.0),
}


def play(write: Callable[[Tensor], object], first: bool, way: str) -> list[object]:
    torch.manual_seed(0)
    linear, weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def run(x: Tensor) -> Tensor:
        def change() -> None:
            with torch.no_grad():
                write(weight)

        hidden = linear(x)
        if first:
            change()
        y = hidden * weight
        if not first:
            change()
        return y

    compiled = torchlazy.compile(run, audit=False) if way == "compiled" else run
    found: list[object] = []
    for call in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(call))
        if way == "lazy_mode":
            with torchlazy.lazy_mode():
                y = run(x)
        else:
            y = compiled(x)
        linear.zero_grad()
        try:
            y.sum().backward()
            found.append(linear.weight.grad.clone())  # type: ignore[union-attr]
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            found.append("refused")
    return found


@pytest.mark.parametrize("way", ["lazy_mode", "compiled"])
@pytest.mark.parametrize("first", [True, False], ids=["written, then used", "used, then written"])
@pytest.mark.parametrize("name", WRITES)
def test_a_backward_outside_is_as_in_eager(name: str, first: bool, way: str) -> None:
    want = play(WRITES[name], first, "eager")
    assert any(isinstance(found, Tensor) for found in want) or not first
    for mine, theirs in zip(play(WRITES[name], first, way), want, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine == theirs


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def _kept_beside(x: Tensor) -> Any:
    _Doubled.apply(x * 1).masked_fill_(x > 0, 5)
    return [x.detach(), x.chunk(2, -1)[0]]


DETACHED: dict[str, Any] = {
    "alone": lambda x: [x.detach()],
    "twice": lambda x: [x.detach().detach(), x],
    "a part": lambda x: [x.detach()[1:]],
    "beside a result with a graph": lambda x: [x.detach(), x + 1],
    "beside a view": _kept_beside,
    "its data": lambda x: [x.data],
    "as a leaf": lambda x: [x.detach().requires_grad_()],
    "as a parameter": lambda x: [torch.nn.Parameter(x.detach())],
}


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("name", DETACHED)
@pytest.mark.parametrize("native", ["off", "on"])
@pytest.mark.parametrize("of_larger", [False, True], ids=["own memory", "a view"])
def test_a_write_to_what_a_call_detached_is_one_to_its_argument(
    name: str, needs: bool, device: str, native: str, of_larger: bool, operator_by_operator: None
) -> None:
    """Autograd refuses a backward that saved the argument; `data` alone has a version of its own."""
    torchlazy.config.native = native

    def seen(run: Any, device: str) -> list[Any]:
        found = []
        for _ in range(6):
            w = torch.ones(3, 2, device=device, requires_grad=needs)
            x = torch.cat([w, w, w])[3:6] * 2 if not of_larger else torch.cat([w, w * 2, w])[3:6]
            loss = (x * x).sum()
            before = x._version
            with torch.no_grad():
                run(x)[0].mul_(10)
            found.append((x._version - before, x.tolist()))
            try:
                loss.backward()
                found.append(w.grad.tolist())
            except RuntimeError as error:
                found.append("inplace operation" in str(error))
        return found

    assert seen(torchlazy.compile(DETACHED[name]), device) == seen(DETACHED[name], "cpu")


# ---- versions of what is written through `.data`


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_writes_through_data_raise_no_version(shape: tuple[int, ...], device: str) -> None:
    state = torch.zeros(shape).to(device)
    weight = torch.nn.Parameter(torch.zeros(shape).to(device))

    def step(x: Tensor) -> Tensor:
        state.data.add_(1)
        weight.data.clamp_(0, 1)
        x.data.mul_(2)
        return x + 1

    run, x = torchlazy.compile(step), torch.ones(shape).to(device)
    versions = state._version, weight._version, x._version
    for _ in range(6):
        run(x)
    assert (state._version, weight._version, x._version) == versions
    assert state.flatten()[0].item() == 6 and x.flatten()[0].item() == 64


def test_versions_of_detached_numbers_are_raised() -> None:
    state = torch.zeros(())

    def step(x: Tensor) -> Tensor:
        state.detach().add_(1)
        state.data.add_(1)
        return x + 1

    run, begin = torchlazy.compile(step), state._version
    for count in range(1, 7):
        run(torch.ones(3))
        assert state._version == begin + count
    assert state.item() == 12


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_views_of_leaves_written_through_data(device: str) -> None:
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        view = weight.view_as(weight)
        view.data.add_(1)
        return x.exp(), view

    run, x = torchlazy.compile(step), torch.ones(3).to(device)
    for _ in range(6):
        weight = torch.ones(4).to(device).requires_grad_()
        version = weight._version
        _, view = run(x, weight)
        assert (weight._version, view._version) == (version, version)
        assert weight.tolist() == [2.0] * 4 == view.tolist()
        (view * 3).sum().backward()
        assert weight.grad is not None and weight.grad.tolist() == [3.0] * 4


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_an_argument_turned_in_place_beside_a_joint(device: str) -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        x.t_()
        return weight * 2

    run, weight = torchlazy.compile(step), torch.ones(4).to(device).requires_grad_()
    for _ in range(6):
        x = torch.ones(3, 2).to(device)
        version = x._version
        run(x, weight)
        assert (tuple(x.shape), x._version) == ((2, 3), version + 1)

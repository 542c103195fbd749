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


def fresh_each_time(device: str) -> Play:
    p, momentum = nn.Parameter(torch.randn(3, 4).to(device)), torch.zeros(3, 4).to(device)

    def call(x: Tensor) -> Tensor:
        (p * x).sum().backward()
        with torch.no_grad():
            old = p.data.clone()
            p.add_(p.grad, alpha=0.1)
            momentum.mul_(0.5).add_(p)
            p.data = old
            p.sub_(momentum, alpha=0.01)
            p.grad = None
        return p * x

    return [p, momentum], lambda x: call(x).detach()


def tied_each_time(device: str) -> Play:
    p, q = torch.randn(3, 4).to(device), torch.randn(3, 4).to(device)
    view = p.view(12)

    def call(x: Tensor) -> Tensor:
        p.data = q.data = x * 2
        p.add_(1)
        return p + q * view[0]

    return [p, q, view], call


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
        turned_each_time, fresh_each_time, tied_each_time,
    ],
)  # fmt: skip
def test_memory_after_each_call_is_eagers(make: Callable[[str], Play], device: str) -> None:
    wanted, _ = _played(make, "cpu", False)
    found, run = _played(make, device, True)
    for number, ((have, shared), (want, as_eager)) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(have, want, msg=lambda text, n=number: f"call {n}: {text}")
        assert shared in (None, as_eager), number
    moves = make in (state_on_an_argument, fresh_each_time, tied_each_time)  # known from the second capture on
    assert run.report().replays >= (5 if moves else 6), run.report()


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("change", ["tied", "form", "other"])
def test_state_that_moves_is_looked_at_for_its_form_and_who_shares_it(device: str, change: str) -> None:
    def play(device: str, compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        (p, momentum), call = fresh_each_time(device)
        run = torchlazy.compile(call, audit=False) if compiled else call
        found = []
        for i in range(9):
            if i == 5 and change == "tied":
                momentum.data = p.data
            elif i == 5 and change == "form":
                p.data = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(device).t()
            elif i == 5:
                p.data = torch.ones(3, 4).to(device)
            value = run((torch.arange(12.0).view(3, 4) * (i + 1)).to(device))
            found += [x.detach().cpu().clone() for x in (value, p, momentum)]
        if compiled:
            assert run.report().captures <= (2 if change == "other" else 4), run.report()
        return found

    torch.testing.assert_close(play(device, True), play("cpu", False))


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its users write it."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], **kwargs: Any) -> None:
        super().__init__(params, {"rho": 0.05, **kwargs})
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base.step()
        self.zero_grad()


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_sharpness_aware_minimisation_is_replayed(device: str, base: type[torch.optim.Optimizer]) -> None:
    def train(device: str, compiled: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(device)
        optimizer = Sharpness(model.parameters(), base, lr=0.05)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.climb()
            model(x).square().mean().backward()
            optimizer.descend()
            return loss.detach()

        run: Any = torchlazy.compile(step) if compiled else step
        found = [run(torch.full((3, 4), 0.1 * i).to(device)).cpu() for i in range(10)]
        return [*found, *[p.detach().cpu() for p in model.parameters()]], run

    found, run = train(device, True)
    torch.testing.assert_close(found, train("cpu", False)[0])
    assert run.report().replays + run.report().audits >= 6, run.report()
    assert run.report().captures <= 4, run.report()


def _data(x: Tensor) -> Tensor:
    y = x * 1
    y.data = y.data * 2
    return y


def _constant(x: Tensor) -> Tensor:
    y = torch.tensor(3.0)
    y.data = x * 2
    return y + x


def _swapped(x: Tensor) -> Tensor:
    y = x * 1
    torch.utils.swap_tensors(y, x * 3)
    return y


def _other_size(x: Tensor) -> Tensor:
    torch.arange(4, out=x)
    x.data.add_(1)
    return x + 1


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("step", [_data, _constant, _swapped, _other_size])
def test_of_numbers(step: Any, shape: tuple[int, ...], device: str) -> None:
    compiled = torchlazy.compile(step, audit=False)
    for number in range(6):
        x = torch.full(shape, number + 1.0, device=device)
        given = x.clone()
        assert compiled(given).tolist() == step(x).tolist()
        assert given.tolist() == x.tolist()

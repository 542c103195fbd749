"""Numbers of captured calls that outlive them: in what autograd saves, in contexts, hooks and regions computed again.

Invariant: a module whose attribute changes gives, compiled and with its backward outside, what it gives as it is.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("operator_by_operator")
VALUES = (
    1.5,
    2.0,
    2.5,
)  # the first is a constant of its template, the second is captured as an input, the third replayed


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: float) -> Tensor:
        ctx.number, ctx.held = number, (number, [number])
        return x * number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.number + gradient * ctx.held[0] - gradient * ctx.held[1][0], None


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * self.number


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    y = x * 2
    y.register_hook(hook)
    return y * 3


def assigned(x: Tensor, number: float) -> Tensor:
    y = x * 1
    y[0] = number
    return y * x


OPERATORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "mul": lambda x, g: x * g,
    "mul of a number": lambda x, g: g * x,
    "div": lambda x, g: x / g,
    "div of a number": lambda x, g: g / x,
    "neg": lambda x, g: x * -g,
    "exp": lambda x, g: x * math.exp(g),
    "int": lambda x, g: x * round(g * 3),
    "polynomial": lambda x, g: x * sum(g**k for k in range(4)),
    "in place": lambda x, g: (x * 1).mul_(g).div_(g),
    "complex": lambda x, g: (torch.complex(x, x) * g).abs(),
    "power": lambda x, g: x.abs() ** g,
    "power of a number": lambda x, g: g**x,
    "float_power of a number": lambda x, g: torch.float_power(g, x).float(),
    "alpha": lambda x, g: torch.sub(x, x * x, alpha=g),
    "rsub": lambda x, g: torch.rsub(x, x * x, alpha=g),
    "clamp": lambda x, g: x.clamp(-g, g),
    "leaky_relu": F.leaky_relu,
    "where": lambda x, g: torch.where(x > 0, x, g),
    "lerp": lambda x, g: torch.lerp(x, x * 2, g),
    "setitem": assigned,
    "foreach": lambda x, g: torch._foreach_mul([x, x * 2], g)[1],
    "sizes": lambda x, g: x.expand(round(g), 3, 4) * x[: round(g), None, :].as_strided((round(g), 1, 4), (4, 4, 1)),
    "sizes of zeros": lambda x, g: x.as_strided((round(g), 3), (4, 1)).clone().unfold(1, round(g), 1),
    "linspace": lambda x, g: x * torch.linspace(0, g, 4, device=x.device),
    "interpolate": lambda x, g: F.interpolate(x[None, None], scale_factor=g),
    "attention": lambda x, g: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=g),
    "function": Scale.apply,
    "hook": lambda x, g: hooked(x, lambda gradient: gradient * g),
    "hook by partial": lambda x, g: hooked(x, functools.partial(torch.mul, other=g)),
    "hook by partial, in order": lambda x, g: hooked(x, functools.partial(lambda g, gradient: gradient * g, g)),
    "hook with a tuple": lambda x, g: hooked(x, lambda gradient, held=((g,), 1): gradient * held[0][0]),
    "hook with slots": lambda x, g: hooked(x, Slotted(g)),
    "checkpoint": lambda x, g: checkpoint(lambda x: (x * g).sin(), x, use_reentrant=False),
    "checkpoint, an argument": lambda x, g: checkpoint(lambda x, g: (x * g).sin(), x, g, use_reentrant=False),
    "checkpoint, reentrant": lambda x, g: checkpoint(lambda x, g: (x * g).sin(), x, g, use_reentrant=True),
    "vmap": lambda x, g: torch.func.vmap(lambda row: row * g)(x),
    "grad": lambda x, g: torch.func.grad(lambda x: (x * g).sin().sum())(x),
    "grad of a grad": lambda x, g: torch.autograd.grad((x * g).sin().sum(), x, create_graph=True)[0],
}


class Model(nn.Module):
    def __init__(self, operator: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
        self.operator, self.number = operator, 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(self.weight * x, self.number)


def play(name: str, device: str, compiled: bool) -> list[Tensor]:
    model = Model(OPERATORS[name]).to(device)
    run = torchlazy.compile(model, audit=False) if compiled else model
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2)).to(device)
    found = []
    for model.number in VALUES:
        model.zero_grad()
        y = run(x)
        y.square().sum().backward()
        found += [y.detach().cpu().clone(), model.weight.grad.cpu().clone()]
    return found


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_a_module_whose_number_changes(name: str, device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        have = play(name, device, compiled=True)
    for mine, theirs in zip(have, play(name, "cpu", compiled=False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_what_a_backward_raises_is_raised_by_the_backward_alone(device: str) -> None:
    model = nn.Linear(4, 4).to(device)

    @torchlazy.compile
    def run(x: Tensor) -> Tensor:
        y = model(x)
        with torch.no_grad():
            x.mul_(2)
        return y

    for _ in range(3):
        x = torch.ones(3, 4).to(device)
        y = run(x)
        assert x.tolist() == [[2.0] * 4] * 3
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_numbers_kept_by_a_call_that_raises_are_plain(device: str) -> None:
    held: dict[str, Any] = {}
    scale = [1.5]

    @torchlazy.compile
    def run(x: Tensor) -> Tensor:
        y = x * scale[0]
        held["it"] = (scale[0] * 2, [scale[0]])
        if len(y) > 3:
            raise KeyError("too long")
        return y

    for number in (1.5, 2.0, 2.5):
        scale[0] = number
        run(torch.ones(3).to(device))
        assert type(held["it"][0]) is float and type(held["it"][1][0]) is float
        with pytest.raises(KeyError):
            run(torch.ones(4).to(device))
        assert held["it"] == (number * 2, [number])
        assert type(held["it"][0]) is float and type(held["it"][1][0]) is float


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_numbers_among_keys_and_in_sets_are_plain(device: str) -> None:
    seen: set[Any] = set()
    table: dict[Any, int] = {0: 0}

    def run(x: Tensor, number: float) -> Tensor:
        seen.add(number + 1)
        table[number * 2] = len(seen)
        table[(1, number)] = 1  # type: ignore[index]
        return x * number

    call = torchlazy.compile(run)
    for number in VALUES:
        assert call(torch.ones(2, device=device), number).tolist() == [number, number]
    assert list(table) == [0, *(key for number in VALUES for key in (number * 2, (1, number)))]
    assert all(type(number) is float for number in seen)
    assert {type(part) for key in table for part in (key if isinstance(key, tuple) else (key,))} == {int, float}

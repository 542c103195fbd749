"""Complex numbers that are others at each call: after the second value nothing is compiled.

Invariant: each program gives what it gives eagerly on the CPU, on the lazy device, in `lazy_mode`, and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor
from torchlazy.lazy.numbers.fit import DoesNotFit, SizeFit

from tests.lazy.compare import data

pytestmark = pytest.mark.usefixtures("compiled")
CALLS = 10
WAYS = ["lazy", "lazy_mode", "compile", "compile lazy"]
ONLY_ONCE = ("of a real tensor", "powers", "a product", "written")  # beyond the recorder they are as the others


def _complex(device: str, *shape: int, seed: int) -> Tensor:
    return torch.complex(data("cpu", *shape, seed=seed), data("cpu", *shape, seed=seed + 100)).to(device)


def _trained(x: Tensor, c: complex) -> Tensor:
    x = x.clone().requires_grad_()
    (x * c + (x / (c + 3)) ** 2).abs().sum().backward()
    assert x.grad is not None
    return x.grad


def _written(x: Tensor, c: complex) -> Tensor:
    made = torch.zeros_like(x)
    made[1] = c
    made.add_(x, alpha=c).mul_(c).masked_fill_(x.real > 0.5, c)
    return made


PROGRAMS: dict[str, Callable[[Tensor, complex], Tensor]] = {
    "a factor": lambda x, c: x * c,
    "of a real tensor": lambda x, c: x.real * c + x.imag.exp(),
    "alpha": lambda x, c: torch.add(x, x.conj().exp(), alpha=c) - torch.sub(x, x.sin(), alpha=c),
    "filled": lambda x, c: x + torch.full_like(x, c) * torch.full((4,), c, device=x.device),
    "powers": lambda x, c: x**c + c**x,
    "a product": lambda x, c: torch.addmm(x, x, x, beta=c, alpha=c + 1),
    "written": _written,
    "trained": _trained,
}


def _call(function: Callable[..., Any], way: str, *args: Any) -> Any:
    if way != "lazy_mode":
        return function(*args)
    with torchlazy.lazy_mode():
        return function(*args)


@pytest.mark.parametrize(("name", "way"), [(n, way) for n in PROGRAMS for way in WAYS[: 1 if n in ONLY_ONCE else 4]])
def test_two_values_are_compiled(name: str, way: str) -> None:
    function = PROGRAMS[name]
    run = torchlazy.compile(function, audit=False) if way.startswith("compile") else function
    compiles = 0
    for i in range(CALLS):
        c, x = complex(0.5 + 0.25 * i, 2.0 - 0.5 * i), _complex("cpu", 4, 4, seed=i)
        before = torchlazy.metrics()["compiles"]
        value = _call(run, way, x.to("lazy") if way.endswith("lazy") else x.clone(), c)
        have = value.detach().cpu().clone()
        compiles += torchlazy.metrics()["compiles"] - before
        torch.testing.assert_close(have, function(x.clone(), c), rtol=1e-4, atol=1e-4)
    assert compiles <= 2


@pytest.mark.parametrize("way", WAYS[:2])
def test_sizes_and_numbers_vary_together(way: str) -> None:
    compiles = 0
    for i in range(6):
        c, x = complex(i - 2.5, 1 / (i + 1)), _complex("cpu", 3 + i, 4, seed=i)
        before = torchlazy.metrics()["compiles"]
        value = _call(lambda x, c: (x * c).sum(0) + 2j, way, x.to("lazy") if way == "lazy" else x, c)
        have = value.cpu().clone()
        compiles += torchlazy.metrics()["compiles"] - before
        torch.testing.assert_close(have, (x * c).sum(0) + 2j)
    assert compiles <= 2


def test_a_complex_number_that_moves_with_a_size_has_no_expression() -> None:
    fit = SizeFit(2)
    fit.add_argument((4, 9))
    with pytest.raises(DoesNotFit, match="complex"):
        fit.text_of_float([0.5j, 1j / 3], "a number")

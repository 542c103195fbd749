"""A call that writes a value with a gradient into its caller's memory: which tensors require gradients afterwards, and
what gradients they carry, is as in eager, in captures and in replays.

Eager is the oracle; each call gets new tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy

CALLS = 6
Fn = Callable[..., Any]

INTO_WINDOWS: dict[str, Fn] = {
    "copy_": lambda x, w: x.copy_(w),
    "copy_, nothing given back": lambda x, w: (x.copy_(w), None)[1],
    "mul_": lambda x, w: (x.add_(1).mul_(w.exp()), None)[1],
    "item": lambda x, w: x.__setitem__(0, w[0]),
    "by a view": lambda x, w: (x.t()[1:].copy_(w.t()[1:]), None)[1],
    "a view given back": lambda x, w: (x.copy_(w), x[0])[1],
    "the transpose given back": lambda x, w: x.mul_(w).t(),
    "memory asked for": lambda x, w: (x.copy_(w), x.untyped_storage(), None)[2],
    "gradient asked for": lambda x, w: (x.grad, x.copy_(w), None)[2],
}


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that such calls run their Python
        yield


def _same(mine: Any, theirs: Any) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a.cpu(), b)
        else:
            assert a == b


@pytest.mark.parametrize("name", INTO_WINDOWS)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_view_of_larger_memory_takes_the_gradient_that_is_written_into_it(name: str, device: str) -> None:
    def looks(run: Fn, on: str) -> list[Any]:
        memory = torch.zeros(5, 3, device=on)
        x = memory[1:3]
        w = torch.full((2, 3), 2.0, device=on, requires_grad=True)
        out = run(x, w)
        if isinstance(out, torch.Tensor):
            with torch.no_grad():
                out.mul_(3)  # the memory is the caller's
        total = (x * x).sum() + (out.sum() if isinstance(out, torch.Tensor) else 0)
        (gradient,) = torch.autograd.grad(total, [w])
        facts = (x.requires_grad, memory.requires_grad, x.is_leaf, x._version)
        return [*facts, x.detach(), memory.detach(), gradient]

    compiled = torchlazy.compile(INTO_WINDOWS[name])
    for _ in range(CALLS):
        _same(looks(compiled, device), looks(INTO_WINDOWS[name], "cpu"))


def _lin() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 3)


def _whole(y: torch.Tensor, row: torch.Tensor) -> Any:
    return y.detach().copy_(row.exp())


def _data(y: torch.Tensor, row: torch.Tensor) -> Any:
    alias = y.data
    alias.t()[1:].copy_(row[1:, None])
    return alias


def _turned(y: torch.Tensor, row: torch.Tensor) -> Any:
    alias = y.detach()
    alias.t()[1:].copy_(row[1:, None])
    return alias


def _flat(y: torch.Tensor, row: torch.Tensor) -> Any:
    alias = y.view(-1).detach()
    alias.view(4, 3).copy_(row)
    return alias


def _part(y: torch.Tensor, row: torch.Tensor) -> Any:
    alias = y[1:].detach()
    y[0] = 5
    return alias.copy_(row)


def _view(y: torch.Tensor, row: torch.Tensor) -> Any:
    alias = y.detach()
    last = alias[1:]
    alias.copy_(row)
    return last


def _sum(y: torch.Tensor, row: torch.Tensor) -> Any:
    alias = y.detach()
    alias.copy_(row)
    return alias.sum()


ALIASES = [_whole, _data, _turned, _flat, _part, _view, _sum]


def _facts(out: torch.Tensor, y: torch.Tensor, lin: torch.nn.Linear) -> list[Any]:
    versions = (y._version, out.requires_grad, out.is_leaf)
    with torch.no_grad():
        y.add_(7)  # what the backward keeps is not the caller's memory
    lin.zero_grad()
    out.sum().backward()
    assert lin.weight.grad is not None
    return [y.requires_grad, y.grad_fn is None, *versions, y.detach(), out.detach(), lin.weight.grad]


@pytest.mark.parametrize("write", ALIASES)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("window", [False, True])
def test_a_detached_alias_keeps_its_gradient_to_itself(write: Fn, device: str, window: bool) -> None:
    mine, theirs = _lin().to(device), _lin()

    def call(lin: torch.nn.Linear, run: Fn, on: str) -> list[Any]:
        memory = torch.zeros(6, 3, device=on)
        y = memory[1:5] if window else torch.zeros(4, 3, device=on)
        return _facts(run(torch.ones(2, 3, device=on), y), y, lin)

    compiled = torchlazy.compile(lambda x, y: write(y, mine(x).sum(0)))
    for _ in range(CALLS):
        _same(call(mine, compiled, device), call(theirs, lambda x, y: write(y, theirs(x).sum(0)), "cpu"))


@pytest.mark.parametrize("write", ALIASES)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_detached_alias_of_state_does_so_too(write: Fn, device: str) -> None:
    mine, theirs = _lin().to(device), _lin()
    held, plain = torch.zeros(4, 3, device=device), torch.zeros(4, 3)
    compiled = torchlazy.compile(lambda x: write(held, mine(x).sum(0)))
    for _ in range(CALLS):
        found = _facts(compiled(torch.ones(2, 3, device=device)), held, mine)
        _same(found, _facts(write(plain, theirs(torch.ones(2, 3)).sum(0)), plain, theirs))


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_tells_the_alias_from_the_input() -> None:
    for write in (_whole, _turned):
        lin = _lin()
        compiled = torch.compile(lambda x, y, write=write, lin=lin: write(y, lin(x).sum(0)), backend="torchlazy")
        y, plain = torch.zeros(4, 3), torch.zeros(4, 3)
        for _ in range(3):
            out, want = compiled(torch.ones(2, 3), y), write(plain, lin(torch.ones(2, 3)).sum(0))
            assert (y.requires_grad, out.requires_grad) == (False, True)
            torch.testing.assert_close((out, y), (want, plain))

"""Positions on the host beside lazy tensors, and tensors in caches of functions: calls that read them replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torchlazy

ROWS = numpy.array([3, 1])


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    kept = torchlazy.config.tiers, torchlazy.config.store
    torchlazy.config.tiers, torchlazy.config.store = "off", "off"
    yield
    torchlazy.config.tiers, torchlazy.config.store = kept


def _made_inside(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(4).flip(0)
    places[0] = 1
    return x[places, places] + 1


def _lists(x: torch.Tensor) -> torch.Tensor:
    return x[[0, 2]] + x[torch.tensor([1, 0])] + x[range(2)] + x[:, ROWS, None].sum()


def _writes(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[torch.arange(2)] = 3.0
    y[:, [1]] = 5.0
    return y


def _gradient(x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    (leaf[[0, 0, 3]].exp().sum()).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("function", [_made_inside, _lists, _writes, _gradient])
@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_positions_on_the_host(function: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    compiled = torchlazy.compile(function)
    for _ in range(5):
        x = torch.randn(4, 4)
        torch.testing.assert_close(compiled(x.to(device)).cpu(), function(x))
    report = compiled.report()
    assert not report.alarm
    assert (report.captures, report.replays + report.audits, report.verified) == (1, 4, 0), report.reasons


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_module_whose_table_is_read_by_host_positions(device: str) -> None:
    """The backward of a compiled module works on what the forward read with: on positions that were brought over."""

    class Bias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(5, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[_limited(4).clamp(max=2)]

    torch.manual_seed(0)
    module, other = Bias().to(device), Bias()
    other.load_state_dict({"table": module.table.detach().cpu()})
    compiled = torchlazy.compile(module)
    for _ in range(6):
        x = torch.randn(4, 3)
        compiled(x.to(device)).square().sum().backward()
        other(x).square().sum().backward()
        assert module.table.grad is not None and other.table.grad is not None
        torch.testing.assert_close(module.table.grad.cpu(), other.table.grad)
    report = compiled.report()
    assert report.verified == 0 and not report.alarm and report.replays, report.reasons


def test_positions_that_change() -> None:
    rows = [0, 1]
    compiled = torchlazy.compile(lambda x: x[rows] * 2)
    x = torch.randn(4, 3)
    for now in ([0, 1], [0, 1], [2, 3], [2, 3], [1, 1, 0]):
        rows[:] = now
        assert torch.equal(compiled(x.to("lazy")).cpu(), x[now] * 2)


@functools.lru_cache(maxsize=2)
def _limited(count: int) -> torch.Tensor:
    return torch.arange(count).flip(0)


@functools.cache
def _unlimited(count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.arange(count).flip(0), {"scale": torch.tensor(2.0)}


def _reads_limited(x: torch.Tensor) -> torch.Tensor:
    return x[_limited(len(x))] * 2


def _reads_unlimited(x: torch.Tensor) -> torch.Tensor:
    places, more = _unlimited(len(x))
    return x[places] * more["scale"]


@pytest.mark.parametrize(("function", "cache"), [(_reads_limited, _limited), (_reads_unlimited, _unlimited)])
def test_tensors_in_caches(function: Callable[[torch.Tensor], torch.Tensor], cache: Any) -> None:
    """The first call fills the cache; who clears it, or writes to what it keeps, is noticed."""
    cache.cache_clear()
    compiled = torchlazy.compile(function)

    def call() -> None:
        x = torch.randn(4, 2)
        torch.testing.assert_close(compiled(x.to("lazy")).cpu(), function(x))

    for _ in range(4):
        call()
    report = compiled.report()
    assert (report.captures, report.verified) == (2, 0) and not report.alarm, report.reasons
    found = cache(4)
    (found if isinstance(found, torch.Tensor) else found[0]).copy_(torch.tensor([0, 0, 1, 2]))
    for _ in range(3):
        call()
    captures = compiled.report().captures
    cache.cache_clear()
    for _ in range(3):
        call()
    report = compiled.report()
    assert report.captures > captures and report.verified == 0 and not report.alarm, report.reasons


def test_a_method_that_caches() -> None:
    class Scaled:
        @functools.lru_cache(maxsize=4)  # noqa: B019
        def table(self, width: int) -> torch.Tensor:
            return torch.full((width, width), 2.0)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table(x.shape[1]).to(x.device)

    compiled = torchlazy.compile(Scaled())
    for _ in range(5):
        x = torch.randn(4, 4)
        assert torch.equal(compiled(x.to("lazy")).cpu(), x * 2)
    report = compiled.report()
    assert (report.captures, report.verified) == (2, 0) and not report.alarm, report.reasons

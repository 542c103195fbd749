"""Compiled calls that take one of many ways by their data: a bounded table of ways, which keeps those that come often.

Invariant: results are eager's whatever the way; a number that is only taken as a whole one is fixed as that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor
from torchlazy.lazy.compiled import variants
from torchlazy.lazy.compiled.replay.replay import Replay
from torchlazy.lazy.compiled.variants import CheckTree
from torchlazy.lazy.numbers.expr import Applied, SourceRef

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def rounds(x: Tensor) -> Tensor:
    for number in range(int(x.abs().sum()) % 28):
        x = x + number
    return x * 2


def rounds_ahead(x: Tensor) -> Tensor:
    for number in range(math.floor(x.abs().sum().item()) % 28):
        x = x + number
    return x * 2


def _data(seed: int) -> Tensor:
    return torch.randn(8, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("call", [rounds, rounds_ahead])
def test_more_ways_than_a_few_are_replayed(call: Callable[[Tensor], Tensor], device: str) -> None:
    run = torchlazy.compile(call, audit=False)
    for seed in range(100):
        torch.testing.assert_close(run(_data(seed).to(device)).cpu(), call(_data(seed)))
    report = run.report()
    ways = len({int(_data(seed).abs().sum()) % 28 for seed in range(100)})
    assert ways > 16 and report.captures <= 2 * ways and report.replays >= 100 - 2 * ways, report


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_what_is_no_number_is_an_error_in_replays_too(device: str) -> None:
    run = torchlazy.compile(rounds, audit=False)
    for seed in (1, 1, 1):
        run(_data(seed).to(device))
    for bad, error in ((math.inf, OverflowError), (math.nan, ValueError)):
        with pytest.raises(error):
            run(torch.full((8,), bad).to(device))
    torch.testing.assert_close(run(_data(1).to(device)).cpu(), rounds(_data(1)))


def test_a_ratio_that_is_rounded_is_captured_once_for_each_whole_number() -> None:
    class Schedule:
        ratio = 0.0

    def call(x: Tensor) -> Tensor:
        kept = int(Schedule.ratio * 8)
        return x[:kept].sum() * 2 + Schedule.ratio

    run = torchlazy.compile(call, audit=False)
    for i in range(60):
        Schedule.ratio = 0.3 + i * 0.01
        torch.testing.assert_close(run(_data(i).to("lazy")).cpu(), call(_data(i)))
    assert run.report().captures <= 9, run.report()


def test_the_ways_that_serve_most_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MAX_VARIANTS", 4)

    def call(x: Tensor, n: int) -> Tensor:
        y = x * 2
        for _ in range(int(x.sum().long()) % 64):  # a trace of its own for each value
            y = y + n
        return y

    run: Any = torchlazy.compile(call, audit=False)
    for i in range(100):
        often = i % 2 == 0
        x = torch.full((2,), float(i % 4 // 2 if often else 10 + i)).to("lazy")
        torch.testing.assert_close(run(x, 3), call(x, 3))
    report = run.report()
    assert report.replays >= 36, report
    assert report.captures < 25, report
    assert any("serve most calls" in reason for reason in report.reasons), report


def _flags(x: Tensor, flags: Tensor) -> Tensor:
    for number in range(len(flags)):
        x = x * 2 + number if flags[number] > 0 else torch.tanh(x) - number
    return x


def _way(number: int, bits: int) -> Tensor:
    return torch.tensor([float(number >> bit & 1) for bit in range(bits)])


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_way_is_found_by_what_is_read_not_by_trying_each(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = torchlazy.compile(_flags, audit=False)
    x = torch.ones(3)

    def play() -> None:
        for number in range(8):
            flags = _way(number * 5 % 8, 3)
            torch.testing.assert_close(run(x.to(device), flags.to(device)).cpu(), _flags(x, flags))

    for _ in range(3):
        play()
    before, tried = run.report(), []
    agrees = Replay.agrees
    monkeypatch.setattr(Replay, "agrees", lambda *args: bool(tried.append(0)) or agrees(*args))
    play()
    assert run.report().replays == before.replays + 8 and before.captures <= 10, run.report()
    assert len(tried) <= 3 * 8


def test_ways_that_come_again_are_not_forgotten_while_most_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_MISSES", 8)
    run = torchlazy.compile(_flags, audit=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(80):
        flags = _way(int(torch.randint(0, 16, (), generator=generator)), 4)
        torch.testing.assert_close(run(torch.ones(3), flags), _flags(torch.ones(3), flags))
    report = run.report()
    assert report.captures <= 18 and report.replays >= 55, report


def test_a_tree_of_ways_finds_those_that_agree() -> None:
    class Way:
        def __init__(self, *checks: tuple[Any, Any]) -> None:
            self.checks = checks

    first, second = SourceRef(0), SourceRef(1)
    positive, large = Applied("gt", (first, 0.0)), Applied("gt", (second, 9))
    inverse = Applied("gt", (Applied("truediv", (1, first)), 1))
    ways = [
        Way((positive, True), (large, True)),
        Way((positive, True), (large, False)),
        Way((positive, False), (inverse, False)),
        Way((positive, False), (first, -0.0)),
        Way(),
    ]
    tree: CheckTree[Way] = CheckTree()
    for way in ways:
        tree.add(way)

    def found(*sources: Any) -> set[int]:
        return {ways.index(way) for way in tree.find(sources)}

    assert found(None, None) == found() == {0, 1, 2, 3, 4}
    assert found(1.0, None) == found(1.0) == {0, 1, 4}
    assert found(1.0, 10) == {0, 4} and found(1.0, 9) == {1, 4}
    assert found(-1.0, 0) == {2, 4} and found(-0.0, 0) == {3, 4} and found(0.0, 0) == {4}
    tree.remove(ways[0])
    assert found(1.0, 10) == {4} and found(1.0, 9) == {1, 4}
    tree.remove(ways[1])
    assert found(1.0, 9) == {4}

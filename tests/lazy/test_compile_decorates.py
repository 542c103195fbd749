"""What `torchlazy.compile` decorates: members of classes of every kind, coroutines, generators; what is said of it."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
import torchlazy

CALLS = 5


class Members:
    scale = 3.0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @torchlazy.compile
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.scale

    @staticmethod
    @torchlazy.compile
    def static_inside(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @torchlazy.compile
    @staticmethod
    def static_outside(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @classmethod
    @torchlazy.compile
    def class_inside(cls, x: torch.Tensor) -> torch.Tensor:
        return x + cls.scale

    @torchlazy.compile
    @classmethod
    def class_outside(cls, x: torch.Tensor) -> torch.Tensor:
        return x + cls.scale

    @property
    @torchlazy.compile
    def property_inside(self) -> torch.Tensor:
        return self.weight * 2

    @torchlazy.compile
    @property
    def property_outside(self) -> torch.Tensor:
        return self.weight * 2

    @torchlazy.compile
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.weight


def _values(owner: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [
        owner.method(x), owner.static_inside(x), owner.static_outside(x), type(owner).static_outside(x),
        owner.class_inside(x), owner.class_outside(x), type(owner).class_outside(x), owner.property_inside,
        owner.property_outside, owner(x),
    ]  # fmt: skip


def _expected(owner: Any, x: torch.Tensor) -> list[torch.Tensor]:
    w, scale = owner.weight, type(owner).scale
    one, two, three = x + 1, x + scale, w * 2
    return [x * w + scale, one, one, one, two, two, two, three, three, x - w]


def test_members_of_classes() -> None:
    owners = [Members(torch.randn(4)), Members(torch.randn(4))]
    for turn in range(CALLS + 2):
        for owner in owners:
            x = torch.randn(3, 4)
            torch.testing.assert_close(_values(owner, x), _expected(owner, x))
        if turn == CALLS - 1:
            owners[0].weight = torch.randn(4)  # noticed by guards
    assert Members.__dict__["static_outside"].__func__.report().replays > 0


@torchlazy.compile
async def _doubled(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return x * 2


@torchlazy.compile
def _steps(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for i in range(3):
        yield x + i


@torchlazy.compile
async def _later(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    for i in range(3):
        yield x + i


def test_coroutines_and_generators_run_as_they_are() -> None:
    x = torch.randn(4)

    async def all_at_once() -> list[torch.Tensor]:
        return await asyncio.gather(*[_doubled(x + i) for i in range(CALLS)])

    async def drained() -> list[torch.Tensor]:
        return [value async for value in _later(x)]

    for _ in range(3):
        torch.testing.assert_close(asyncio.run(all_at_once()), [(x + i) * 2 for i in range(CALLS)])
        torch.testing.assert_close(list(_steps(x)), [x + i for i in range(3)])
        torch.testing.assert_close(asyncio.run(drained()), [x + i for i in range(3)])


@torchlazy.compile
def _power(x: torch.Tensor, n: int) -> torch.Tensor:
    return x if n == 0 else _power(x, n - 1) + x


def test_recursion() -> None:
    x = torch.randn(4)
    for n in (3, 3, 3, 3, 1, 5, 0):
        torch.testing.assert_close(_power(x, n), x * (n + 1))


def test_threads_that_call_one_function() -> None:
    program = torchlazy.compile(lambda a, b: (a @ b).relu() * 2)
    wrong: list[int] = []

    def run(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(12):
            a, b = (torch.randn(4, 4, generator=draw) for _ in range(2))
            if not torch.allclose(program(a, b), (a @ b).relu() * 2, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_said_of_it() -> None:
    def halved(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
        "x over `by`."
        return x / by

    program = torchlazy.compile(halved)
    assert program.__wrapped__ is halved and program.__doc__ == "x over `by`." and program.__name__ == "halved"
    assert str(inspect.signature(program)).startswith("(x: torch.Tensor, *, by: float = 2.0)")
    assert repr(program).startswith("torchlazy.compile(") and "halved" in repr(program)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        program()

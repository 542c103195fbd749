"""The native walk: what it is told, what it makes of it, what it leaves to the general way, and what it holds on to.

Invariant: values are those that the same program has on ordinary tensors.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import recorder
from torchlazy.lazy.native_steps import record_of
from torchlazy.lazy.recorder import Recorder
from torchlazy.runtime import native_walk

pytestmark = pytest.mark.skipif(native_walk._loaded() is None, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    recorder.forget_paths()
    yield
    recorder.forget_paths()


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that were not walked to."""
    seen: list[str] = []
    original = Recorder.general

    def spy(self: Recorder, cls: object, op: object, *rest: Any) -> object:
        seen.append(str(op))
        return original(self, cls, op, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Recorder, "general", spy)
    recorder.forget_paths()  # the native walk is told anew what the general way is
    return seen


def known(program: Callable[[], object], turns: int = 4) -> None:
    for _ in range(turns):
        kept = program()
        torchlazy.flush()
        del kept


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = torch.addmm(bias, x, weight.t())
    y.mul_(bias)
    return y.unsqueeze(0) - weight.sum(0)


def leaves(count: int, *shape: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    made = [torch.rand(shape) for _ in range(count)]
    return made, [one.to("lazy") for one in made]


def test_operators_that_meet_inputs_are_walked_to(general: list[str]) -> None:
    (x, weight), (lazy_x, lazy_weight) = leaves(2, 3, 3)
    (bias,), (lazy_bias,) = leaves(1, 3)
    known(lambda: layer(lazy_x, lazy_weight, lazy_bias))
    for turn in range(3):
        before = [lazy_x._storage_.version for _ in range(1)]  # type: ignore[attr-defined]
        general.clear()
        found = layer(lazy_x, lazy_weight, lazy_bias)
        assert general == [], turn
        torch.testing.assert_close(found.cpu(), layer(x, weight, bias))
        assert before == [lazy_x._storage_.version]  # type: ignore[attr-defined]
        with torch.no_grad():  # the inputs' memory is written to in between
            lazy_weight.add_(1)
            weight.add_(1)
        torchlazy.flush()


def test_inputs_change_places_with_each_other_and_with_values() -> None:
    plain, lazy = leaves(3, 4)

    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        y = a * b
        z = y - c
        z.add_(b)
        return z / (y + 2)

    orders = [(0, 1, 2), (0, 1, 2), (0, 1, 2), (1, 0, 2), (0, 0, 2), (0, 1, 0), (2, 2, 2), (0, 1, 1), (0, 1, 2)]
    for order in orders * 2:
        found = program(*(lazy[i] for i in order))
        torch.testing.assert_close(found.cpu(), program(*(plain[i] for i in order)))
        fresh_one = lazy[0] * 2  # a value of this very trace where an input was
        torch.testing.assert_close(
            program(lazy[1], fresh_one, lazy[2]).cpu(), program(plain[1], plain[0] * 2, plain[2])
        )


def test_inputs_that_are_windows_shared_or_of_another_shape() -> None:
    (whole, other), (lazy_whole, lazy_other) = leaves(2, 4, 4)

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a + b).mul_(a).t() * b.t()

    pairs: list[Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = [
        lambda x, y: (x, y),
        lambda x, y: (x.detach(), x.detach()),
        lambda x, y: (x.t(), y),
        lambda x, y: (x[:2, :2], y[:2, :2]),
        lambda x, y: (x.double(), y.double()),
        lambda x, y: (x, y.view(4, 4)),
    ]
    for pair in [pairs[0]] * 4 + pairs + pairs[::-1] + [pairs[0]] * 2:
        torch.testing.assert_close(program(*pair(lazy_whole, lazy_other)).cpu(), program(*pair(whole, other)))


def test_an_input_whose_value_was_lost_raises_as_ever() -> None:
    (x, y), (lazy_x, lazy_y) = leaves(2, 3)
    known(lambda: lazy_x * lazy_y)
    lazy_y._storage_.poison = RuntimeError("lost")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="lost"):
        lazy_x * lazy_y
    lazy_y._storage_.poison = None  # type: ignore[attr-defined]
    torch.testing.assert_close((lazy_x * lazy_y).cpu(), x * y)


def test_a_finalizer_that_computes_while_a_walk_makes_its_objects() -> None:
    """Python (3.11) collects garbage as objects are made: what a finalizer then records stands before the walk's."""
    (x, y), (lazy_x, lazy_y) = leaves(2, 3)
    ran: list[torch.Tensor] = []

    class Cycle:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            ran.append(lazy_x + len(ran))

    def program(a: torch.Tensor, b: torch.Tensor, cycles: bool) -> torch.Tensor:
        value = a * b
        for _ in range(10):
            if cycles:
                Cycle()
            value = (value + b).view(3, 1).squeeze(1)
            value.mul_(a)
        return value.detach()

    known(lambda: program(lazy_x, lazy_y, False))
    expected = program(x, y, False)
    threshold = gc.get_threshold()
    try:
        for limit in (1, 2, 3, 5, 7, 11):
            gc.set_threshold(limit, 1000, 1000)
            torch.testing.assert_close(program(lazy_x, lazy_y, True).cpu(), expected)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert ran
    for number, value in enumerate(ran):
        torch.testing.assert_close(value.cpu(), x + number)


def test_tensors_of_users_classes_and_numbers_of_other_types() -> None:
    class Image(torch.Tensor):
        pass

    (x, y), (lazy_x, lazy_y) = leaves(2, 3)
    numbers: list[Any] = [2, 2, 2, 2, True, 2.0, torch.tensor(2), 3]

    def program(a: torch.Tensor, b: torch.Tensor, number: Any) -> torch.Tensor:
        return (a.pow(number) + b).sum([0], True)

    for number in numbers:
        torch.testing.assert_close(program(lazy_x, lazy_y, number).cpu(), program(x, y, number))
        image = lazy_y.as_subclass(Image)
        torch.testing.assert_close(
            program(lazy_x, image, number).cpu().as_subclass(torch.Tensor), program(x, y, number)
        )


def test_what_is_refused_a_record() -> None:
    _, (lazy_x,) = leaves(1, 3)

    def program() -> torch.Tensor:
        z = lazy_x * lazy_x  # one input for two arguments
        return torch.relu(z)

    known(program)
    kept = program()
    path = recorder.path
    assert path is not None and path.start is not None
    first, second = path.steps[:2]
    assert first is not None and second is not None and path.start.record is None and first.record is not None
    assert first.record[1] is second.op and first.record[2] is second and first.record[0] == b"NT"
    assert record_of(first, second, ["is"] * 17, path.geometries) is None  # more arguments than it has room for
    del kept


def test_nothing_is_held_that_nobody_needs_and_nothing_let_go_that_is() -> None:
    """Counts of references to whatever a walk touches are the same after many turns."""
    _, (lazy_x, lazy_weight, lazy_bias) = leaves(3, 3)

    def program() -> list[torch.Tensor]:
        y = lazy_x * lazy_weight
        views = [y.view(3, 1), y.detach(), y.view(3, 1).squeeze(1).detach()]
        y.add_(lazy_bias).pow(2.5)
        return [y, *views, y.sum([0], True) + 7]

    def touched() -> list[Any]:
        path = recorder.paths.begin()
        assert path is not None and path.start is not None
        steps = [path.start, *path.steps]
        found: list[Any] = [recorder, recorder.made, recorder.inputs, lazy_x, lazy_weight._storage_]  # type: ignore[attr-defined]
        found += [type(lazy_x), type(lazy_x._storage_), dict, tuple, None, True, False]  # type: ignore[attr-defined]
        for step in steps:
            if step is not None and step.record is not None:
                found += [step, *step.record]
        return found

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(one) for one in touched()]

    def turns(count: int) -> None:
        for _ in range(3):  # left in the middle, and by an error
            y = lazy_x * lazy_weight
            with pytest.raises(RuntimeError):
                y.view(4)
            del y
            known(program, 1)
        known(program, count)

    turns(10)
    assert len(touched()) > 60
    before = counts()
    turns(200)
    after = counts()
    differences = [(b - a, one) for a, b, one in zip(before, after, touched(), strict=True) if abs(b - a) > 12]
    assert not differences, differences  # a few more or less of common objects, others hold

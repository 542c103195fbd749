"""Calls of a known trace whose lists, numbers and inputs are not as they were: natively, and recorded in Python.

Invariant: values are those that the same program has on ordinary tensors.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy

from tests.lazy.known_traces import known

pytestmark = pytest.mark.usefixtures("way")


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = torch.addmm(bias, x, weight.t())
    y.mul_(bias)
    return y.unsqueeze(0) - weight.sum(0)


def leaves(count: int, *shape: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    made = [torch.rand(shape) for _ in range(count)]
    return made, [one.to("lazy") for one in made]


def adam(params: list[torch.Tensor], grads: list[torch.Tensor], moments: list[torch.Tensor], rate: float) -> None:
    """Operators on lists, in place and not, with numbers that vary and others that do not."""
    torch._foreach_mul_(params, 1 - 0.1 * rate)
    torch._foreach_lerp_(moments, grads, 0.1)
    scaled = torch._foreach_sqrt(torch._foreach_mul(moments, moments))
    torch._foreach_add_(scaled, 1e-8)
    torch._foreach_addcdiv_(params, moments, scaled, [-rate, rate / 2, 0.0][: len(params)])


def test_lists_of_numbers_that_are_equal_or_not() -> None:
    params, lazy_params = leaves(4, 2)
    same, other = [0.1, 0.1, 0.1, 0.1], [0.2, 0.2, 0.2, 0.2]
    for numbers in (same, same, same, other, [0.1, 0.1, 0.2, 0.2], [0.1, 0.1, 0.2, 0.2], [0.1, 0.1, 0.2, 0.2],
                    [0.1, 0.2, 0.2, 0.2], [0.1, 0.1, 0.1, 0.2], same, [0.0, -0.0, 0.0, 0.1], other, same):  # fmt: skip
        torch._foreach_mul_(lazy_params, numbers)
        torch._foreach_mul_(params, numbers)
        torchlazy.flush()
        for mine, theirs in zip(lazy_params, params, strict=True):
            found = mine.cpu()
            torch.testing.assert_close(found, theirs)
            assert torch.equal(found.signbit(), theirs.signbit())
        with torch.no_grad():
            for one in (*params, *lazy_params):
                one.copy_(torch.ones(2))


@pytest.mark.parametrize("how", ["the same twice", "a gradient is a parameter", "windows", "shorter", "other numbers"])
def test_lists_that_are_not_as_they_were(how: str) -> None:
    plain, lazy = [leaves(3, 2, 3) for _ in range(3)], []
    lazy = [pair[1] for pair in plain]
    eager = [pair[0] for pair in plain]

    def other(lists: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        params, grads, moments = lists
        if how == "the same twice":
            return [[params[0], params[1], params[0]], grads, moments]
        if how == "a gradient is a parameter":
            return [params, [params[1], grads[1], params[1]], moments]
        if how == "windows":
            return [[params[0].t(), params[1].t(), params[2].t()], [g.t() for g in grads], [m.t() for m in moments]]
        return [lists[0][:2], lists[1][:2], lists[2][:2]] if how == "shorter" else lists

    for turn in range(14):
        odd = turn in (5, 6, 9, 13)
        rate = float("inf") if odd and how == "other numbers" else 0.01
        adam(*(other(lazy) if odd else lazy), rate)  # type: ignore[call-arg, arg-type]
        adam(*(other(eager) if odd else eager), rate)  # type: ignore[call-arg, arg-type]
        if turn % 3:
            torchlazy.flush()
    pairs = zip(itertools.chain(*lazy), itertools.chain(*eager), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.cpu(), theirs, equal_nan=True)


def test_floats_are_compared_by_their_bits() -> None:
    x = torch.tensor([0.0, -0.0, 1.0])
    lazy = x.to("lazy")
    for value in [0.0, 0.0, 0.0, 0.0, -0.0, float("nan"), float("nan"), 0.0, 1e-320, -1e-320]:
        found, expected = torch.threshold(lazy + 1, 0.0, value) * 2, torch.threshold(x + 1, 0.0, value) * 2
        torch.testing.assert_close(found.cpu(), expected, equal_nan=True)
        found, expected = torch.clamp(lazy, min=value), torch.clamp(x, min=value)
        assert found.cpu().signbit().tolist() == expected.signbit().tolist()


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


@pytest.mark.parametrize("way", ["python"], indirect=True)
def test_an_input_whose_value_was_lost_raises_as_ever() -> None:
    (x, y), (lazy_x, lazy_y) = leaves(2, 3)
    known(lambda: lazy_x * lazy_y)
    lazy_y._storage_.poison = RuntimeError("lost")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="lost"):
        lazy_x * lazy_y
    lazy_y._storage_.poison = None  # type: ignore[attr-defined]
    torch.testing.assert_close((lazy_x * lazy_y).cpu(), x * y)


def test_a_finalizer_that_computes_while_objects_are_made() -> None:
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

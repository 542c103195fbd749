"""Calls whose arguments are like those of the last one: no facts are told of them, and no other call is taken for one.

Invariant: after each other call the callable gives what the plain function gives, and the first kind of call is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.compiled import inline_cache
from torchlazy.lazy.torch_private.dispatch import tensor_readers
from torchlazy.runtime.native.identity_check import is_available

needs_native = pytest.mark.skipif(
    not is_available() or tensor_readers() is None, reason="needs a C++ compiler, and tensors that are read natively"
)
pytestmark = [needs_native, pytest.mark.usefixtures("operator_by_operator", "device_in_python")]


class Program:
    """A compiled function of two tensors, a number, a flag and a name, whose state is one weight."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = weight = nn.Parameter(torch.rand(3, 4).to("lazy"))

        def call(x: torch.Tensor, y: torch.Tensor, scale: float, flag: bool, name: str) -> torch.Tensor:
            made = x * weight + y if flag else x - y
            y.mul_(2)  # seen through x, where both are on one memory
            made = made + x.sum() if name == "sum" else made * x.numel()
            if x.requires_grad:
                made = made.square()
            if getattr(x, "mark", 0):
                made = made + x.mark  # type: ignore[attr-defined]
            return made * scale if type(scale) is not bool else made.to(torch.float64) * 3

        self.plain, self.run = call, torchlazy.compile(call, audit=False)
        with torch.no_grad():
            for _ in range(5):
                self.run(*self.given())
            assert self.is_known(*self.given())

    def given(self, **others: Any) -> tuple[Any, ...]:
        """New tensors; of these names other arguments."""
        torch.manual_seed(1)
        usual = {"x": torch.rand(3, 4).to("lazy"), "y": torch.rand(3, 4).to("lazy")}
        return tuple((usual | {"scale": 2.0, "flag": True, "name": "sum"} | others).values())

    def is_known(self, *args: Any) -> bool:
        settings = self.run._ambience.known() or self.run._ambience.learn()
        return self.run._alike.known(args, {}, settings) is not None


def rand(*shape: int, **facts: Any) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.rand(*shape, **facts).to("lazy")


def marked(value: float) -> torch.Tensor:
    made = rand(3, 4)
    made.mark = value  # type: ignore[attr-defined]
    return made


OTHERS: dict[str, Callable[[Program], dict[str, Any]]] = {
    "shape": lambda p: {"x": rand(1, 4)},
    "dtype": lambda p: {"x": rand(3, 4).double()},
    "strides": lambda p: {"x": rand(4, 3).t()},
    "window": lambda p: {"x": rand(6, 4)[:3]},
    "later window": lambda p: {"x": rand(6, 4)[3:]},
    "requires a gradient": lambda p: {"x": rand(3, 4).requires_grad_()},
    "parameter": lambda p: {"x": nn.Parameter(rand(3, 4), requires_grad=False)},
    "on memory of the state": lambda p: {"y": p.weight.detach()},
    "attribute": lambda p: {"x": marked(4.0)},
    "int": lambda p: {"scale": 2},
    "bool for a number": lambda p: {"scale": True},
    "flag": lambda p: {"flag": False},
    "int for a flag": lambda p: {"flag": 0},
    "name": lambda p: {"name": "other"},
    "nothing": lambda p: {"name": None},
}


def both_tensors_one() -> dict[str, Any]:
    one = rand(3, 4)
    return {"x": one, "y": one}


def views_of_one() -> dict[str, Any]:
    one = rand(3, 4)
    return {"x": one, "y": one.view(3, 4)}


OTHERS |= {"one tensor twice": lambda p: both_tensors_one(), "one memory twice": lambda p: views_of_one()}


@pytest.mark.parametrize("name", OTHERS)
def test_another_call_is_not_taken_for_it(name: str) -> None:
    program = Program()
    with torch.no_grad():
        for _ in range(4):
            given = program.given(**OTHERS[name](program))
            assert not program.is_known(*given)
            kept = program.weight.detach().clone()
            ours = program.run(*given)
            after = program.weight.detach().clone()
            program.weight.data.copy_(kept)
            again = program.given(**OTHERS[name](program))
            torch.testing.assert_close(ours.cpu(), program.plain(*again).cpu())
            torch.testing.assert_close(after.cpu(), program.weight.detach().cpu())
            program.weight.data.copy_(kept)
        usual = program.given()
        torch.testing.assert_close(program.run(*usual).cpu(), program.plain(*program.given()).cpu())
        program.run(*program.given())
        assert program.run.report().alarm == ""


def test_a_call_by_name_and_other_numbers_of_arguments() -> None:
    def call(x: torch.Tensor, y: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        return (x if y is None else x - y) * scale

    run, x, y = torchlazy.compile(call, audit=False), rand(3), rand(3) + 1
    for _ in range(5):
        run(x)
    settings = run._ambience.known()
    assert run._alike.known((x,), {}, settings) and not run._alike.known((x,), {"scale": 2.0}, settings)
    assert not run._alike.known((x, None), {}, settings) and not run._alike.known((), {}, settings)
    assert not run._alike.known((x,), {}, None)
    for args, kwargs in (((x, y), {}), ((x,), {"y": y}), ((x,), {"scale": 3.0}), ((x, None), {}), ((x,), {})):
        torch.testing.assert_close(run(*args, **kwargs).cpu(), call(*args, **kwargs).cpu())


def test_a_number_that_varies_is_known_by_its_class() -> None:
    program = torchlazy.compile(lambda x, scale: x * scale, audit=False)
    x = rand(3)
    for number in range(12):
        torch.testing.assert_close(program(x, number + 0.5).cpu(), x.cpu() * (number + 0.5))
    settings = program._ambience.known()
    assert program._alike.known((x, 77.25), {}, settings)
    assert not program._alike.known((x, 77), {}, settings) and not program._alike.known((x, None), {}, settings)
    torch.testing.assert_close(program(x, 77).cpu(), x.cpu() * 77)


def test_numbers_that_are_equal_and_not_the_same() -> None:
    """-0.0 is equal to 0.0, 1 to True: neither is taken for the other."""
    program = torchlazy.compile(lambda x, number: torch.copysign(x, number + x * 0), audit=False)
    x = rand(3) + 1
    for number in (0.0, 0.0, 0.0, 0.0, -0.0, 0.0, True, 1, 1.0, -0.0):
        torch.testing.assert_close(program(x, number).cpu(), torch.copysign(x.cpu(), number + x.cpu() * 0))


def test_other_settings_are_other_calls() -> None:
    program = Program()
    with torch.no_grad():
        settings = program.run._ambience.known()
        assert program.run._alike.known(program.given(), {}, settings)
    assert program.run._ambience.known() is None  # gradients are recorded here
    ours, plain = (function(*program.given()) for function in (program.run, program.plain))
    torch.testing.assert_close(ours.cpu(), plain.cpu())
    assert ours.requires_grad


def test_what_gave_way_is_known_no_more() -> None:
    program = Program()
    program.run._signatures.clear()
    with torch.no_grad():
        next_args = program.given()
        torch.testing.assert_close(program.run(*next_args).cpu(), program.plain(*program.given()).cpu())
    program = Program()
    program.run._alike._alike.signature.begin_anew()
    program.run._alike._alike.signature.pause.left = 0
    with torch.no_grad():
        assert not program.is_known(*program.given())
        for _ in range(12):
            ours = program.run(*program.given())
            torch.testing.assert_close(ours.cpu(), program.plain(*program.given()).cpu())
        assert program.is_known(*program.given())


def test_kinds_of_calls_that_take_turns_are_not_remembered_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    remember = inline_cache._alike

    def remembered(*given: Any) -> Any:
        made.append(given)
        return remember(*given)

    monkeypatch.setattr(inline_cache, "_alike", remembered)
    run = torchlazy.compile(lambda x: x * 2, audit=False)
    calls = [rand(3), rand(3), rand(4), rand(4)]
    for number in range(200):
        x = calls[number % 4]
        torch.testing.assert_close(run(x).cpu(), x.cpu() * 2)
    assert 1 <= len(made) <= 8

"""Calls whose arguments are like those of the last one: no facts are told of them, and no other call is taken for one.

Invariant: after each other call the callable gives what the plain function gives, and the first kind of call is known.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.compiled import inline_cache
from torchlazy.runtime.native.recorder_library import LIBRARY

pytestmark = pytest.mark.skipif(LIBRARY.wait() is None, reason="needs the native library")

WHERE = {"device": "cpu", "is_native": False}


@pytest.fixture(params=["cpu", "lazy", "cpu, in C++", "lazy, in C++"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Ordinary and lazy tensors; programs that write, replayed in Python, and programs that do not, in C++."""
    device, _, rest = request.param.partition(",")
    WHERE.update(device=device, is_native=bool(rest))
    if not rest:
        request.getfixturevalue("operator_by_operator")
    yield request.param


def settle(call: Callable[[], Any]) -> None:
    """Call until its program is there, and its arguments are remembered."""
    for turn in range(24):
        call()
        if turn == 4:
            torchlazy.wait_for_compile()


def on(value: torch.Tensor) -> torch.Tensor:
    return value.to(WHERE["device"])


class Program:
    """A compiled function of two tensors, a number, a flag and a name, whose state is one weight."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = weight = nn.Parameter(on(torch.rand(3, 4)))
        writes = not WHERE["is_native"]

        def call(x: torch.Tensor, y: torch.Tensor, scale: float, flag: bool, name: str) -> torch.Tensor:
            made = x * weight + y if flag else x - y
            if writes:
                y.mul_(2)  # seen through x, where both are on one memory
            made = made + x.sum() if name == "sum" else made * x.numel()
            if x.requires_grad:
                made = made.square()
            if getattr(x, "mark", 0):
                made = made + x.mark  # type: ignore[attr-defined]
            return made * scale if type(scale) is not bool else made.to(torch.float64) * 3

        self.plain, self.run = call, torchlazy.compile(call, audit=False)
        with torch.no_grad():
            settle(lambda: self.run(*self.given()))
            self.remembered = self.run._alike.known(self.given(), {}, self._settings())
            assert self.remembered is not None
            assert (self.replayed(*self.given()) is not None) == WHERE["is_native"]

    def given(self, **others: Any) -> tuple[Any, ...]:
        """New tensors; of these names other arguments."""
        torch.manual_seed(1)
        usual = {"x": on(torch.rand(3, 4)), "y": on(torch.rand(3, 4))}
        return tuple((usual | {"scale": 2.0, "flag": True, "name": "sum"} | others).values())

    def _settings(self) -> Any:
        return self.run._ambience.known() or self.run._ambience.learn()

    def is_known(self, *args: Any) -> bool:
        """As the usual call; others are remembered by themselves."""
        found = self.run._alike.known(args, {}, self._settings())
        return found is not None and found.key == self.remembered.key

    def replayed(self, *args: Any) -> Any:
        """What C++ gives, in a tuple; None where it does nothing."""
        return self.run._alike.replayed(args, {}, self._settings())


def rand(*shape: int, **facts: Any) -> torch.Tensor:
    torch.manual_seed(2)
    return on(torch.rand(*shape, **facts))


def marked(value: float) -> torch.Tensor:
    made = rand(3, 4)
    made.mark = value  # type: ignore[attr-defined]
    return made


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    x.grad = torch.zeros_like(x)
    return x


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return rand(3, 4)


OTHERS: dict[str, Callable[[Program], dict[str, Any]]] = {
    "shape": lambda p: {"x": rand(1, 4)},
    "dtype": lambda p: {"x": rand(3, 4).double()},
    "strides": lambda p: {"x": rand(4, 3).t()},
    "window": lambda p: {"x": rand(6, 4)[:3]},
    "later window": lambda p: {"x": rand(6, 4)[3:]},
    "requires a gradient": lambda p: {"x": rand(3, 4).requires_grad_()},
    "has a gradient": lambda p: {"x": with_gradient(rand(3, 4))},
    "inference": lambda p: {"x": inferred()},
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
        for turn in range(8):
            given = program.given(**OTHERS[name](program))
            assert not program.is_known(*given)
            assert turn or program.replayed(*given) is None
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


def test_results_are_as_eager_s() -> None:
    """New memory each time, of ordinary tensors that may be written; nothing of them is kept."""
    program = Program()
    with torch.no_grad():
        first, second = program.run(*program.given()), program.run(*program.given())
        want = program.plain(*program.given())
        for made in (first, second):
            assert type(made) is type(want) and made.device == want.device
            assert (made.is_leaf, made._version, made.stride()) == (want.is_leaf, want._version, want.stride())
            torch.testing.assert_close(made.cpu(), want.cpu())
        first.zero_()
        torch.testing.assert_close(second.cpu(), want.cpu())
    (first * on(torch.ones(3, 4, requires_grad=True))).sum().backward()
    with torch.inference_mode():
        program.weight = nn.Parameter(program.weight.clone())
        settle(lambda: program.run(*program.given()))
        made = program.run(*program.given())
        assert made.is_inference()
        torch.testing.assert_close(made.cpu(), want.cpu())


def test_a_weight_that_was_written_or_moved_is_seen() -> None:
    program = Program()
    with torch.no_grad():
        for change in (
            lambda w: w.mul_(2),
            lambda w: setattr(w, "data", on(torch.rand(3, 4))),
            lambda w: w.data.add_(1),
        ):
            change(program.weight)
            for _ in range(3):
                torch.testing.assert_close(program.run(*program.given()).cpu(), program.plain(*program.given()).cpu())


@pytest.mark.parametrize("why", ["is_given_up", "needs_audit"])
def test_a_variant_that_may_not_serve_is_not_replayed(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a template for all sizes, once an audit of its family differs, or before the first one."""
    program = Program()
    remembered = program.run._alike._entries[0].call
    monkeypatch.setattr(type(remembered.variant), why, property(lambda variant: True))
    with torch.no_grad():
        assert program.replayed(*program.given()) is None


def test_what_is_deferred_is_computed_first() -> None:
    program = Program()
    with torch.no_grad(), torchlazy.lazy_mode():
        for turn in range(12):
            program.weight.mul_(0.5).add_(turn)
            x, y, *rest = program.given()
            ours = program.run(x * 2 + 1, y - turn, *rest)
            plain = program.plain(x * 2 + 1, y - turn, *rest)
            torch.testing.assert_close(ours.cpu(), plain.cpu())


def test_a_program_that_raises_does_so_in_each_call() -> None:
    """The error is the one of the replay in Python, and the next call goes on."""
    table = on(torch.rand(5, 2))
    run = torchlazy.compile(lambda at: torch.nn.functional.embedding(at, table) * 2, audit=False)
    inside, outside = on(torch.tensor([0, 4])), on(torch.tensor([0, 7]))
    settle(lambda: run(inside))
    for _ in range(2):
        with pytest.raises(IndexError):
            run(outside).cpu()
        torch.testing.assert_close(run(inside).cpu(), table.cpu()[[0, 4]] * 2)


def test_a_call_by_name_and_other_numbers_of_arguments() -> None:
    def call(x: torch.Tensor, y: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        return (x if y is None else x - y) * scale

    run, x, y = torchlazy.compile(call, audit=False), rand(3), rand(3) + 1
    settle(lambda: run(x))
    settings = run._ambience.known()
    assert run._alike.known((x,), {}, settings) and not run._alike.known((x,), {"scale": 2.0}, settings)
    assert not run._alike.known((x, None), {}, settings) and not run._alike.known((), {}, settings)
    assert not run._alike.known((x,), {}, None)
    for args, kwargs in (((x, y), {}), ((x,), {"y": y}), ((x,), {"scale": 3.0}), ((x, None), {}), ((x,), {})):
        torch.testing.assert_close(run(*args, **kwargs).cpu(), call(*args, **kwargs).cpu())


def test_a_number_that_varies_is_known_by_its_class() -> None:
    program = torchlazy.compile(lambda x, scale: x * scale, audit=False)
    x = rand(3)
    for number in range(24):
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
    signature = program.run._alike._entries[0].call.signature
    signature.begin_anew()
    signature.pause.left = 0
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


def test_several_calls_are_remembered() -> None:
    """Sizes of one template for all, training and evaluation: each is replayed in C++."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    run = torchlazy.compile(model.to(WHERE["device"]), audit=False)
    before = 0
    for turn in range(120):
        if turn in (40, 80):
            torchlazy.wait_for_compile()
        if turn == 108:
            before = run.report().native
        x = torch.full(((3, 5, 6, 7)[turn % 4], 4), turn / 48)
        model.train(turn // 4 % 2 == 0), plain.train(turn // 4 % 2 == 0)
        ours, theirs = run(on(x)), plain(x)
        torch.testing.assert_close(ours.cpu(), theirs)
        ours.square().sum().backward()
        theirs.square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-5)
    assert run.report().native - before == (12 if WHERE["is_native"] else 0), str(run.report())


def test_threads_replay_several_kinds_at_once() -> None:
    """Each moves its own call to the front."""
    weight = on(torch.rand(4, 4))
    run = torchlazy.compile(lambda x: (x @ weight).sin() * 2, audit=False)
    inputs = [on(torch.rand(n, 4)) for n in (2, 3, 5, 7)]
    with torch.no_grad():
        for x in inputs:
            settle(lambda x=x: run(x))  # type: ignore[misc]
    failures: list[BaseException] = []

    def work(x: torch.Tensor) -> None:
        try:
            want = (x.cpu() @ weight.cpu()).sin() * 2
            with torch.no_grad():
                for _ in range(300):
                    torch.testing.assert_close(run(x).cpu(), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures

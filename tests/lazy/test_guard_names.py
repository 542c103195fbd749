"""What guards look at in the user's objects: settings of any class, and those attributes of a trainer that code names.

Invariant: a case runs plain and compiled from one seed and gives the same values. Audits are off, so that nothing but a
guard can notice.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import dis
import inspect
import json
import operator
import types
import typing
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.compiled.guards.code import asks_for_any_global, attribute_names, global_names
from torchlazy.lazy.compiled.guards.discover import discover

pytestmark = pytest.mark.usefixtures("operator_by_operator")
STEPS = 24


class Trainer:
    """A trainer as people write them: what its step reads, and what it keeps beside that."""

    def __init__(self, device: str, compile: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.device, self.scale, self.history, self.table, self.best, self.seen = device, 1.0, [], {}, None, 0
        self.step = compile(self.one_step)

    def one_step(self, x):
        loss = self.loss_of(x)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def loss_of(self, x):
        return self.model(x.to(self.device)).square().mean() * self.scale

    def fit(self, change=lambda trainer, i: None):
        generator, values = torch.Generator().manual_seed(1), []
        for i in range(STEPS):
            change(self, i)
            loss = self.step(torch.randn(5, 4, generator=generator))
            self.history.append(loss.item())
            self.table[f"loss {i}"], self.best, self.seen = loss, loss, self.seen + len(self.history)
            values.append(loss)
        return [*values, *self.model.parameters()]


class LongHistory(Trainer):
    """Its loss reads the history, by a name in a string."""

    def loss_of(self, x):
        return super().loss_of(x) * len(getattr(self, "history", ()))


class AnyName(Trainer):
    def loss_of(self, x):
        return super().loss_of(x) + sum(len(getattr(self, name)) for name in ("tab" + "le",))


class ThroughAGetter(Trainer):
    def loss_of(self, x):
        return super().loss_of(x) + operator.attrgetter("seen")(self)


class ThroughAProperty(Trainer):
    @property
    def count(self):
        return len(self.history)

    def loss_of(self, x):
        return super().loss_of(x) + self.count


class ThroughAnotherClass(Trainer):
    class Weight:
        def __init__(self, trainer):
            self.value = len(trainer.history) + 1

    def loss_of(self, x):
        return super().loss_of(x) * self.Weight(self).value


def both(run: Any, device: str) -> list[Any]:
    """Runs plain on the CPU and compiled on the device, compares, and returns what was compiled."""
    made: list[Any] = []

    def compiled(function: Any) -> Any:
        made.append(torchlazy.compile(function, audit=False))
        return made[-1]

    wanted, found = run("cpu", lambda function: function), run(device, compiled)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-4, atol=1e-5)
    return made


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_what_no_code_of_the_step_names_may_change_at_each_call(device):
    (step,) = both(lambda device, compile: Trainer(device, compile).fit(), device)
    report = step.report()
    assert (report.captures, report.replays, report.verified) == (2, STEPS - 2, 0), report


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.filterwarnings("ignore:torchlazy.compile")
@pytest.mark.parametrize("kind", [LongHistory, AnyName, ThroughAGetter, ThroughAProperty, ThroughAnotherClass])
def test_what_some_code_may_read_is_guarded(kind, device):
    both(lambda device, compile: kind(device, compile).fit(), device)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_an_attribute_that_the_step_names_is_guarded(device):
    def change(trainer, i):
        trainer.scale = 2.0 if i > 7 else 1.0
        if i == 12:
            trainer.model = torch.nn.Linear(4, 3, bias=False).to(trainer.device)
            torch.nn.init.constant_(trainer.model.weight, 0.25)
        if i == 16:
            trainer.loss_of = lambda x: trainer.model(x.to(trainer.device)).sum()

    both(lambda device, compile: Trainer(device, compile).fit(change), device)


READ_BY_ANY_NAME = (
    lambda x, kind, name: x * getattr(kind, name),
    lambda x, kind, name: x * vars(kind)[name],
    lambda x, kind, name: x * kind.__dict__[name],
    lambda x, kind, name: x * sum(getattr(kind, other) for other in dir(kind) if other == name),
    lambda x, kind, name: x * inspect.getattr_static(kind, name),
    lambda x, kind, name: x * operator.attrgetter(name)(kind),
    lambda x, kind, name: x * getattr(kind, name + "_of")(2.0),
    lambda x, kind, name: x * getattr(kind, "table_of_" + name)[name],
    lambda x, kind, name: x * getattr(kind, "of_base_" + name),
)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("read", READ_BY_ANY_NAME)
@pytest.mark.parametrize("way", ["captured", "passed"])
def test_members_of_classes_by_names_that_are_made(read, device, way):
    def run(device, compile):
        base: Any = type("Base", (), {"of_base_scale": 2.0})
        kind: Any = type(
            "Kind", (base,), {"scale": 2.0, "table_of_scale": {"scale": 2.0}, "scale_of": staticmethod(lambda x: x)}
        )
        if way == "captured":
            step = compile(lambda x: read(x, kind, "".join(["sc", "ale"])))
        else:
            passed = compile(lambda x, kind: read(x, kind, "".join(["sc", "ale"])))
            step = lambda x: passed(x, kind)  # noqa: E731
        found = []
        for i in range(9):
            if i == 4:
                kind.scale = base.of_base_scale = kind.table_of_scale["scale"] = 3.0
                kind.scale_of = staticmethod(lambda x: x * 5)
            found.append(step(torch.ones(3).to(device)))
        return found

    both(run, device)


READ_GLOBALS = (
    lambda x, name: x * globals()[name],
    lambda x, name: x * globals().get(name, 1.0),
    lambda x, name: x * globals()["scale_of" + name.removeprefix("scale_of")],
    lambda x, name: x * eval(name),
    lambda x, name: x * sum(value for key, value in globals().items() if key == name),
)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("read", READ_GLOBALS)
def test_globals_by_names_that_are_made(read, device):
    def run(device, compile):
        space = {"scale_of_all": 2.0, "__name__": "a_program"}
        step = types.FunctionType(read.__code__, space)
        called, found = compile(lambda x: step(x, "_".join(["scale", "of", "all"]))), []
        for i in range(9):
            space["scale_of_all"] = 2.0 if i < 4 else 3.0
            found.append(called(torch.ones(3).to(device)))
        return found

    both(run, device)


GIVEN_GLOBALS = ('globals()["a"]', 'globals().get("a", 1.0)', '[globals()["a"], globals()["b"] + n]')
COMPUTED_GLOBALS = (
    "globals()[n]", 'globals()["a" + n]', "globals().get(n)", "globals()", "f(globals)", 'globals().get("a" + n, 1.0)',
    "eval(n)",
)  # fmt: skip


@pytest.mark.parametrize("text", [*GIVEN_GLOBALS, *COMPUTED_GLOBALS])
def test_whether_names_of_globals_stand_in_the_code(text: str) -> None:
    assert asks_for_any_global(compile(text, "text", "eval")) == (text in COMPUTED_GLOBALS)


SETTINGS = {
    "namespace": lambda **values: argparse.Namespace(**values),
    "simple namespace": lambda **values: types.SimpleNamespace(**values),
    "user dict": lambda **values: collections.UserDict(values),
    "within another": lambda **values: argparse.Namespace(inner=types.SimpleNamespace(**values)),
}
args = argparse.Namespace(scale=1.0)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_are_guarded(kind, device):
    def run(device, compile):
        settings, found = SETTINGS[kind](scale=1.0, double=False), []
        args.scale = 1.0

        def read(name):
            held = getattr(settings, "inner", settings)
            return held[name] if isinstance(held, collections.UserDict) else getattr(held, name)

        def write(name, value):
            held = getattr(settings, "inner", settings)
            held.__setitem__(name, value) if isinstance(held, collections.UserDict) else setattr(held, name, value)

        def scaled(x):
            y = x * read("scale") * args.scale
            return y * 2 if read("double") else y

        step = compile(scaled)
        for i in range(10):
            if i == 4:
                write("scale", 0.5)
            if i == 6:
                write("double", True)
            if i == 8:
                args.scale = 3.0
            found.append(step(torch.ones(3).to(device)))
        return found

    both(run, device)


history: list[float] = []


def test_a_global_called_as_an_attribute_is_another_thing():
    def step(x, holder):
        return x * holder.history

    run = torchlazy.compile(step)
    for i in range(6):
        run(torch.ones(2), types.SimpleNamespace(history=2.0))
        history.append(float(i))
    assert "(global of" not in str(run.report()), run.report()


def test_names_that_code_asks_for():
    def plain(trainer):
        return trainer.model, getattr(trainer, "scale", 1.0), [one.inner for one in trainer.parts]

    def computed(trainer, name):
        return getattr(trainer, name)

    assert {"model", "scale", "inner", "parts"} <= (attribute_names(plain.__code__) or set())
    assert "history" not in (attribute_names(plain.__code__) or set())
    assert attribute_names(computed.__code__) is None
    assert attribute_names((lambda trainer: vars(trainer)["model"]).__code__) is None
    found = discover(Trainer("cpu", lambda function: function).one_step, [])
    names = {name for place in found.places for name in place.names}
    assert {"Trainer.model", "Trainer.scale"} <= names and not {"Trainer.history", "Trainer.best"} & names


def _as_dis_tells(code: types.CodeType) -> set[str]:
    found = {one.argval for one in dis.get_instructions(code) if one.opname.endswith(("_GLOBAL", "_GLOBALS", "_NAME"))}
    return found.union(*(_as_dis_tells(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def test_names_of_globals_in_bytecode() -> None:
    """Of modules of the standard library, and of code with more names than fit in one byte."""
    texts = [inspect.getsource(module) for module in (argparse, dataclasses, inspect, json.decoder, typing)]
    texts.append("def call():\n" + "".join(f"    item{i}.part{i}(other{i})\n" for i in range(400)))
    for text in texts:
        code = compile(text, "text", "exec")
        assert global_names(code) == _as_dis_tells(code)
    assert "other399" in global_names(code) and "part399" not in global_names(code)


GIVEN = (
    'getattr(o, "a")', 'getattr(o, "a", None)', 'getattr(o, "a", 1.0 / n)', 'getattr(o.b, "a", f(x))',
    'setattr(o, "a", x + 1)', 'hasattr(o, "a") and getattr(o, "a")', 'setattr(o, "a", {"q": x * 2})',
    'getattr(o, "a")(x, y)', 'getattr(o, "a").b[1:2]', 'setattr(o, "a", getattr(o, "b") + 1)',
    'f(getattr(o, "a"), n + "x")', 'setattr(o, "a", x[1:n])',
)  # fmt: skip
COMPUTED = (
    "getattr(o, n)", 'getattr(o, f"a{n}")', 'getattr(o, "a" + n)', 'getattr(o, "a%d" % n)',
    'getattr(o, "a{}".format(n))',
    'getattr(o, d["k"])', 'getattr(d["k"], n)', "map(getattr, x)", 'getattr(o, "a" if n else "b")',
    'reduce(getattr, "a.b".split("."), o)', "getattr(*x)", 'setattr(o, n + "a", 1)', 'getattr(o, f"{n}a")',
    'getattr(o, f"a{n}b{m}", None)', 'getattr(o, "a" + n, None)', 'getattr(o, ("a", "b")[n])', 'getattr(o, f"a{n:>3}")',
    "g(getattr)", 'getattr(o, "a" * n)',
)  # fmt: skip


@pytest.mark.parametrize("text", [*GIVEN, *COMPUTED])
def test_whether_names_stand_in_the_code(text: str) -> None:
    """A string is a name only where it is one whole."""
    space: dict[str, Any] = {}
    exec(f"def call(o, n, x, y, m, d):\n    return {text}", space)
    assert (attribute_names(space["call"].__code__) is None) == (text in COMPUTED)

"""Guards as one native pass: what the guards notice by value, the native pass notices too, change by change.

Invariant: each change is made on a program whose guards hold, is noticed both ways, and is undone; the guards hold
again before the next one.
"""

from __future__ import annotations

import abc
import collections
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.compiled.guards import guards as guards_module
from torchlazy.lazy.compiled.guards.guards import Guards
from torchlazy.lazy.compiled.guards.reached import Reached
from torchlazy.runtime.native import identity_check, object_layout
from torchlazy.runtime.native.identity_check import is_available

needs_compiler = pytest.mark.skipif(not is_available(), reason="no C++ compiler here")
pytestmark = pytest.mark.usefixtures("operator_by_operator")
FACTOR = 2.0


class Settings:
    __slots__ = ("offset",)
    scale = 3.0

    def __init__(self) -> None:
        self.offset = 1.0


class Options:
    def __init__(self, bias: float) -> None:
        self.bias = bias


class Doubled:
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Tripled:
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class Scaled(Doubled):
    """Whose bases change."""


def shifted(x: torch.Tensor, by: float = 0.0, *, sign: float = 1.0) -> torch.Tensor:
    return x + by * sign


def shifted_twice(x: torch.Tensor, by: float = 0.0, *, sign: float = 1.0) -> torch.Tensor:
    return x + 2 * by * sign


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.sizes, self.flag, self.names, self.settings = [1, 2], True, {"a": 1.0, "b": 2.0}, Settings()
        self.shape: tuple[int, ...] = (4, 4)
        self.options, self.parts, self.scaled = Options(1.0), {1, 2, 3}, Scaled()
        self.by_name = collections.OrderedDict(a=1.0, b=2.0)
        self.shift = functools.partial(shifted, by=1.0)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor, extra: float = 0.0) -> torch.Tensor:
        y = self.norm(self.first(x)) * self.frozen + len(self.sizes) + self.names["a"] + self.settings.offset
        y = self.shift(self.scaled.scaled(y)) + self.options.bias + sum(self.parts) + next(iter(self.by_name.values()))
        return (y if self.flag else -y) * FACTOR * self.settings.scale + extra


class Program:
    """A training step, and its guards."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.model = Model().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.device = device
        cell = self.cell = [1.0]
        factor = 1.0

        def factor_is(value: float) -> None:
            nonlocal factor
            factor = value

        self.factor_is = factor_is

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean() * cell[0] * factor
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        self.run = torchlazy.compile(step, audit=False)
        self.x = torch.randn(3, 4).to(device)
        for calls in range(80):  # a native pass that looked at a dict which has grown since is made anew, later
            if calls >= 6 and self.guards._native is not None:
                break
            self.run(self.x)
        assert self.run.report().replays >= 3, self.run.report()
        assert self.guards._native is not None or not guards_module.is_ready(), self.run.report()

    @property
    def guards(self) -> Guards:
        (signature,) = self.run._signatures.values()
        found: Guards = signature.variants[0].guards
        return found


def replaced(table: Any, key: Any, value: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    old = table[key]
    return lambda: table.__setitem__(key, value), lambda: table.__setitem__(key, old)


def attribute(owner: Any, name: str, value: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    old = getattr(owner, name)
    return lambda: setattr(owner, name, value), lambda: setattr(owner, name, old)


def hooked(register: Callable[..., Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    handles: list[Any] = []
    return lambda: handles.append(register(lambda *_: None)), lambda: handles.pop().remove()


def changes_of(p: Program) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """(change, undo) of each kind, by name."""
    model, optimizer, first = p.model, p.optimizer, p.model.first
    states: Any = optimizer.state
    weight, state = first.weight, states[first.weight]
    memory = weight.data
    like = torch.ones(4, 4).to(p.device)

    def renamed() -> None:
        del model.flag
        model.__dict__["other"] = True

    def named_back() -> None:
        del model.other
        model.flag = True

    def one_for_another() -> None:
        model.parts.remove(1)
        model.parts.add(9)

    def back_again() -> None:
        model.parts.remove(9)
        model.parts.add(1)

    own, shift = model.options.__dict__, model.shift

    return {
        "flag": attribute(model, "flag", False),
        "training": (model.eval, model.train),
        "training of a part": (model.norm.eval, model.norm.train),
        "true in place of one": attribute(model.norm, "eps", True),
        "attribute renamed": (renamed, named_back),
        "attribute added": (lambda: setattr(model, "other", 1), lambda: delattr(model, "other")),
        "equal list": attribute(model, "sizes", [1, 2]),
        "list longer": (lambda: model.sizes.append(3), lambda: model.sizes.pop()),
        "list item": replaced(model.sizes, 0, 5),
        "dict value": replaced(model.names, "b", 3.0),
        "dict entry": (lambda: model.names.update(c=1), lambda: model.names.pop("c")),
        "dict of an object": attribute(model.options, "__dict__", {"bias": 2.0}),
        "dict of a module": attribute(model, "__dict__", {**model.__dict__, "flag": False}),
        "entry of an object's dict": replaced(own, "bias", 3.0),
        "attribute that was deleted": (lambda: own.pop("bias"), lambda: own.update(bias=1.0)),
        "item of a set": (one_for_another, back_again),
        "set longer": (lambda: model.parts.add(4), lambda: model.parts.remove(4)),
        "order of an ordered dict": (
            lambda: model.by_name.move_to_end("a"), lambda: model.by_name.move_to_end("a", last=False)
        ),
        "value of an ordered dict": replaced(model.by_name, "a", 5.0),
        "partial": attribute(model, "shift", functools.partial(shifted, by=2.0)),
        "keyword of a partial": replaced(shift.keywords, "by", 2.0),
        "code": attribute(shifted, "__code__", shifted_twice.__code__),
        "keyword defaults": attribute(shifted, "__kwdefaults__", {"sign": -1.0}),
        "class of an object": attribute(model.scaled, "__class__", Tripled),
        "variable of a closure": (lambda: p.factor_is(2.0), lambda: p.factor_is(1.0)),
        "global that hides a builtin": (lambda: globals().update(sum=len), lambda: globals().pop("sum")),
        "slot": attribute(model.settings, "offset", 2.0),
        "class attribute": attribute(Settings, "scale", 4.0),
        "method": attribute(Model, "forward", lambda self, x: x),
        "defaults": attribute(Model.forward, "__defaults__", (1.0,)),
        "global": replaced(globals(), "FACTOR", 3.0),
        "cell's list": replaced(p.cell, 0, "2.0"),
        "parameter": attribute(first, "weight", nn.Parameter(like)),
        "no bias": attribute(first, "bias", None),
        "buffer": attribute(model.norm, "running_mean", torch.zeros(4).to(p.device)),
        "submodule": attribute(model, "norm", nn.BatchNorm1d(4).to(p.device)),
        "data": (lambda: setattr(weight, "data", like), lambda: setattr(weight, "data", memory)),
        "data transposed": (lambda: setattr(weight, "data", memory.t()), lambda: setattr(weight, "data", memory)),
        "data reshaped": (lambda: setattr(weight, "data", memory.view(2, 8)), lambda: setattr(weight, "data", memory)),
        "frozen": (lambda: weight.requires_grad_(False), lambda: weight.requires_grad_(True)),
        "thawed": (lambda: model.frozen.requires_grad_(True), lambda: model.frozen.requires_grad_(False)),
        "gradient": (lambda: setattr(weight, "grad", like.clone()), lambda: setattr(weight, "grad", None)),
        "gradient of a frozen one": (
            lambda: setattr(model.frozen, "grad", like[0].clone()),
            lambda: setattr(model.frozen, "grad", None),
        ),
        "hook of a module": hooked(model.norm.register_forward_hook),
        "hook before a module": hooked(first.register_forward_pre_hook),
        "hook of backward": hooked(first.register_full_backward_hook),
        "hook of all modules": hooked(nn.modules.module.register_module_forward_hook),
        "hook of an optimizer": hooked(optimizer.register_step_post_hook),
        "betas": replaced(optimizer.param_groups[0], "betas", (0.8, 0.9)),
        "entry of a group": (
            lambda: optimizer.param_groups[0].update(other=1),
            lambda: optimizer.param_groups[0].pop("other"),
        ),
        "groups": attribute(optimizer, "param_groups", list(optimizer.param_groups)),
        "parameters of a group": (
            lambda: optimizer.param_groups[0]["params"].reverse(),
            lambda: optimizer.param_groups[0]["params"].reverse(),
        ),
        "moment": replaced(state, "exp_avg", torch.zeros_like(like)),
        "step count": replaced(state, "step", torch.tensor(1.0)),
        "step count with gradient": (
            lambda: state["step"].requires_grad_(True), lambda: state["step"].requires_grad_(False)
        ),
        "state of another": (lambda: states.update(x={}), lambda: states.pop("x")),
    }  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_each_change_is_noticed_natively_and_by_value(device: str) -> None:
    program = Program(device)
    guards = program.guards
    assert guards._native is not None and guards._native.holds()
    for name, (change, undo) in changes_of(program).items():
        change()
        try:
            assert not guards._native.holds(), name
            assert not guards._hold_by_value(), name
            assert guards.broken(), name
        finally:
            undo()
        assert guards.holds(), (name, guards.broken())
        if guards._native is None or not guards._native.holds():  # what was put back is equal, and not the same
            while guards._native is None or not guards._native.holds():
                assert guards.holds(), name
    replays = program.run.report().replays
    program.run(program.x)
    assert program.run.report().replays == replays + 1


@needs_compiler
@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_hooks_of_tensors_are_noticed_natively(device: str) -> None:
    """The tables of hooks stay when the hooks are removed, so each kind has a program of its own."""
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        program = Program(device)
        getattr(program.model.first.weight, register)(lambda found: None)
        assert not program.guards._native.holds() and not program.guards._hold_by_value()


@needs_compiler
def test_other_bases_are_noticed_natively() -> None:
    """Bases that are put back are another tuple, so this change has a program of its own."""
    program = Program("lazy")
    Scaled.__bases__ = (Tripled,)
    try:
        assert not program.guards._native.holds() and not program.guards._hold_by_value()
        assert any("bases" in name for name, _, _ in program.guards.broken())
    finally:
        Scaled.__bases__ = (Doubled,)


@needs_compiler
def test_what_libraries_keep_is_looked_at_natively() -> None:
    """Levels of loggers, results of caches, the order of an OrderedDict: none of them by Python."""

    class Registry(collections.OrderedDict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return super().__getitem__(key) * 2

    table = Registry(a=1.0, b=2.0)
    missing: Any = collections.defaultdict(lambda: 3.0)
    logger = logging.getLogger("torchlazy.tests.native")

    @functools.cache
    def rate(times: int) -> float:
        return sum(table.values()) * times

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x * table["a"] + next(iter(table.values())) + rate(2) + missing.get("a", 0.0)
        return y + 1 if logger.isEnabledFor(logging.INFO) else y

    def other_result() -> None:
        table.update(a=8.0)
        rate.cache_clear()

    run, x = torchlazy.compile(call, audit=False), torch.ones(2)
    changes: list[Callable[[], Any]] = [
        lambda: None, lambda: logger.setLevel(logging.INFO), lambda: logging.disable(), lambda: table.move_to_end("a"),
        other_result, lambda: logging.disable(logging.NOTSET), lambda: logger.setLevel(logging.ERROR),
    ]  # fmt: skip
    for number, change in enumerate(changes):
        change()
        for _ in range(5):
            torch.testing.assert_close(run(x), call(x), msg=f"change {number}")
        native = next(iter(run._signatures.values())).variants[0].guards._native
        assert native is not None and not len(native._live) and not len(native._single), native._single._names


def test_native_guards_without_versions_of_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Python 3.13 where all of its watchers are taken: every entry is looked at, at each call."""
    monkeypatch.setattr(identity_check, "watcher", lambda: None)
    without = dataclasses.replace(object_layout.layout(), dict_version=None)
    monkeypatch.setattr(identity_check, "layout", lambda: without)
    test_each_change_is_noticed_natively_and_by_value("cpu")


@needs_compiler
def test_equal_values_hold_and_become_what_is_compared() -> None:
    program = Program("lazy")
    guards, model = program.guards, program.model
    native = guards._native
    model.shape = tuple([4, 4])
    assert not native.holds() and guards.holds() and guards._native is None
    calls = 0
    while guards._native is None:
        calls += 1
        assert guards.holds()
    assert 1 <= calls <= 4 and guards._native.holds()
    model.shape = (4, 5)
    assert not guards.holds()


@needs_compiler
def test_values_that_are_made_anew_at_each_call_do_not_make_native_guards_each_time() -> None:
    program = Program("lazy")
    guards, made = program.guards, 0
    for number in range(200):
        program.model.shape = tuple([4, 4])
        before = guards._native
        assert guards.holds(), number
        made += guards._native is not None and guards._native is not before
    assert made <= 8


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_without_a_compiler_the_guards_hold_by_value(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards_module, "is_ready", lambda: False)
    program = Program(device)
    guards = program.guards
    assert guards._native is None and guards.holds()
    for name, (change, undo) in changes_of(program).items():
        change()
        try:
            assert not guards.holds(), name
        finally:
            undo()
        assert guards.holds(), (name, guards.broken())


@needs_compiler
@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_native_guards_without_a_way_to_read_tensors(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchlazy.lazy.compiled.guards.guards.tensor_readers", lambda: None)
    program = Program(device)
    weight = program.model.first.weight
    memory, native = weight.data, program.guards._native
    assert native is not None and native.holds()
    weight.data = memory.t()
    assert not native.holds() and not program.guards.holds()
    weight.data = memory
    assert program.guards.holds()


class Counting(torch.Tensor):
    """Of a user's class, whose code runs where torch is asked about it."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.parametrize("readers", [True, False])
def test_looking_at_tensors_runs_no_code_of_their_classes(readers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not readers:
        monkeypatch.setattr("torchlazy.lazy.compiled.guards.guards.tensor_readers", lambda: None)
    reached = Reached()
    for tensor in (torch.ones(2, 3), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)):
        own = tensor.as_subclass(Counting)  # type: ignore[no-untyped-call]
        reached.tensors[id(own)] = (own, "own")
        reached.keep.append(own)
    guards = Guards(reached)
    for _ in range(3):
        assert guards.holds()
    assert guards._native is not None
    Counting.asked = 0
    assert guards.holds() and guards._native.holds() and not Counting.asked


SWITCHED: contextvars.ContextVar[Any] = contextvars.ContextVar("SWITCHED", default=None)


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> float: ...


def by_settings(x: torch.Tensor) -> torch.Tensor:
    """Reads what the native pass asks functions in C for."""
    if SWITCHED.get() is not None:
        x = x + SWITCHED.get()
    with torch.autocast("lazy"):
        y = x @ x
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return y.float() + isinstance(1.5, Shape) * 10.0


@needs_compiler
def test_what_functions_in_c_tell() -> None:
    """Each change is seen by that one question alone: calls give what eager gives, and then are captured anew."""
    run, x = torchlazy.compile(by_settings, audit=False), torch.ones(2, 2, device="lazy")

    def values() -> list[float]:
        found = [run(x).sum().item() for _ in range(5)]
        assert len(set(found)) == 1 and found[0] == by_settings(x).sum().item()
        return found

    for _ in range(2):
        assert values()[0] == 8.0
        token = SWITCHED.set(1.0)
        assert values()[0] == 32.0
        SWITCHED.reset(token)
    assert values()[0] == 8.0
    before, captures = torch.get_autocast_dtype("lazy"), run.report().captures
    torch.set_autocast_dtype("lazy", torch.float16)
    try:
        assert values()[0] == 8.0 and run.report().captures > captures
    finally:
        torch.set_autocast_dtype("lazy", before)
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"), pytest.raises(RuntimeError, match="not now"):
        run(x)
    Shape.register(float)
    assert values()[0] == 48.0

"""What a call's Python can tell apart although its operators could not: calls that look alike and are not.

Invariant: a case is run as it is and compiled, on both kinds of tensors, with audits off, and everything that it yields
is equal, types of numbers and signs of zeros included.
"""

from __future__ import annotations

import cmath
import importlib
import math
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch.utils._pytree import tree_map

Compile = Callable[[Any], Any]
Case = Callable[[str, Compile], Iterator[Any]]
CASES: list[Case] = []
pytestmark = pytest.mark.usefixtures("operator_by_operator")


def case(function: Case) -> Case:
    CASES.append(function)
    return function


@case
def keys_of_one_value_and_several_types(device, compile):
    call = compile(lambda named: [x + key for key, x in named.items()])
    x = torch.arange(3, device=device)
    for key in (1, True, 1.0, 1, -0.0, 0.0, True):
        for _ in range(3):
            yield call({key: x})
            yield call([{"inner": {key: x}}][0]["inner"])


@case
def zeros_of_complex_numbers_have_signs(device, compile):
    call = compile(lambda x, number: x + cmath.phase(number))
    x = torch.ones(3, device=device)
    for number in (complex(-1, 0.0), complex(-1, -0.0), complex(-1, 0.0)):
        for _ in range(3):
            yield call(x, number)


def _clamps(x):
    x.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return (x * 5).sum()


def _triples_its_gradient(x):
    x.register_post_accumulate_grad_hook(_triples)
    return (x * 5).sum()


def _triples(x):
    x.grad.mul_(3)


def _hooks_for_itself(x):
    hook = x.register_hook(lambda gradient: gradient * 2)
    y = (x * 5).sum()
    hook.remove()
    return y


def _hooks_after_its_backward(x):
    (x * 5).sum().backward()
    x.register_hook(lambda gradient: gradient * 2)
    return x.sum()


def _hooks_the_node(x):
    x.view_as(x).grad_fn.next_functions[0][0].register_prehook(lambda gradients: (gradients[0] * 7,))
    return (x.view_as(x) * 5).sum()


def _names_it(x):
    x.note = "seen"
    return (x * 5).sum()


@case
def marks_that_the_call_leaves_on_an_argument(device, compile):
    leave = (_clamps, _triples_its_gradient, _hooks_after_its_backward, _hooks_the_node, _names_it)
    for function in (*leave, _hooks_for_itself):
        call = compile(function)
        for _ in range(5):
            x = torch.ones(3, device=device, requires_grad=True)
            node = torch.autograd.graph.get_gradient_edge(x)
            call(x).backward()
            yield x.grad, getattr(x, "note", None), bool(x._backward_hooks), node is not None
            (x * 2).sum().backward()
            yield x.grad
            base = torch.ones(6, device=device, requires_grad=True)
            call(base[2:5]).backward() if function in (_clamps, _names_it) else None
            yield base.grad


@case
def gradients_that_the_call_asks_an_argument_to_keep(device, compile):
    call, other = compile(lambda x: (x.retain_grad(), (x * 5).sum())[1]), compile(lambda x: x * 2)
    for _ in range(5):
        yield other(torch.ones(3, device=device))
        x = torch.ones(3, device=device, requires_grad=True) * 2
        call(x).backward()
        yield x.grad


@case
def numbers_that_are_none(device, compile):
    call = compile(lambda x, number: x * number)
    x = torch.arange(4, device=device)
    for number in (1, True, 1.0, 2.5, -0.0, 0.0, math.nan, math.nan, math.inf, math.inf, -math.inf, 2.5, math.nan):
        yield call(x, number)
        yield call(x, number)


@case
def globals_of_code_without_a_module(device, compile):
    space: dict[str, Any] = {"scale": 2.0, "more": [1, 2]}
    exec("class Box:\n    size = 1\ndef call(x):\n    return x * scale + sum(more) + Box.size + box.size", space)
    space["box"] = space["Box"]()
    call = compile(space["call"])
    x = torch.ones(3, device=device)
    for change in ("pass", "scale = 3.0", "more.append(4)", "more[0] = 7", "box.size = 5", "Box.size = 6"):
        exec(change, space)
        for _ in range(3):
            yield call(x)


@case
def code_exchanged_in_place(device, compile):
    def inner(x, factor=2.0):
        return x * factor

    def other(x, factor=2.0):
        return x - factor

    call = compile(lambda x: inner(x) + 1)
    x = torch.ones(3, device=device)
    for _ in range(4):
        yield call(x)
    inner.__code__ = other.__code__
    for _ in range(4):
        yield call(x)
    inner.__defaults__ = (7.0,)
    for _ in range(4):
        yield call(x)


@case
def one_tensor_or_two_alike(device, compile):
    own = torch.ones(3, device=device)
    call = compile(lambda a, b: a * (2 if a is b else 3) + (5 if a is own else 7))
    x, y = torch.ones(3, device=device), torch.ones(3, device=device)
    for a, b in ((x, y), (x, x), (own, x), (x, own), (own, own), (x.view(3), x), (own.view(3), own), (x, x)):
        for _ in range(3):
            yield call(a, b)


@case
def one_list_or_two_alike(device, compile):
    call = compile(lambda a, b: sum(b) * (2 if a is b else 3))
    x = torch.ones(2, device=device)
    one, other = [x], [x]
    for a, b in ((one, other), (one, one), (other, one), (other, other)):
        for _ in range(3):
            yield call(a, b)


@case
def what_users_write_on_tensors(device, compile):
    own = torch.ones(3, device=device)
    own.scale = 1.0
    call = compile(lambda x: x * own.scale + getattr(x, "more", 0.0))
    x = torch.ones(3, device=device)
    for tensor, name, value in ((own, "scale", 2.0), (x, "more", 5.0), (x, "more", 6.0), (own, "scale", 1.0)):
        for _ in range(3):
            yield call(x)
        setattr(tensor, name, value)


@case
def attributes_in_slots_that_were_empty(device, compile):
    class Slotted:
        __slots__ = ("more", "scale")

    own = Slotted()
    own.scale = 2.0
    call = compile(lambda x: x * own.scale + getattr(own, "more", 0.0))
    x = torch.ones(3, device=device)
    for name, value in (("scale", 3.0), ("more", 4.0), ("more", 5.0)):
        for _ in range(3):
            yield call(x)
        setattr(own, name, value)


@case
def zeros_left_behind_have_signs(device, compile):
    class State:
        zero = 0.0

    state = State()
    state.zero = 0.0

    def step(x):
        value = x * math.copysign(1.0, state.zero)
        state.zero = -state.zero
        return value

    call = compile(step)
    for _ in range(8):
        yield call(torch.ones(2, device=device)), state.zero


@case
def classes_exchanged(device, compile):
    class Plain:
        def apply(self, x):
            return x + 1

    class Other(Plain):
        def apply(self, x):
            return x - 1

    own, model = Plain(), torch.nn.Sequential(torch.nn.ReLU()).to(device)
    call = compile(lambda x: own.apply(model(x)))
    x = torch.tensor([-1.0, 2.0]).to(device)
    for _ in range(4):
        yield call(x)
    own.__class__ = Other
    for _ in range(4):
        yield call(x)
    model[0].__class__ = torch.nn.Tanh
    for _ in range(4):
        yield call(x)


@case
def keys_that_are_numbers_and_come_and_go(device, compile):
    kept: OrderedDict[int, float] = OrderedDict()

    def cached(x, key):
        if key in kept:
            kept.move_to_end(key)
        else:
            kept[key] = float(key)
        if len(kept) > 2:
            kept.popitem(last=False)
        return x * kept[key]

    call = compile(cached)
    for key in (1, 1, 1, 2, 2, 1, 3, 2, 1, 1, 3, 3, 3, 3):
        yield call(torch.ones(2, device=device), key), list(kept)


@case
def anomaly_mode(device, compile):
    call = compile(lambda x: x + (3 if torch.is_anomaly_enabled() else 4))
    x = torch.ones(3, device=device)
    for enabled in (False, True, False):
        with torch.autograd.set_detect_anomaly(enabled):
            for _ in range(3):
                yield call(x)


def everything(run: Case, device: str, compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for value in run(device, compile):
            found.append(tree_map(lambda x: x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x, value))
    return found


def assert_same(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs)
    if isinstance(mine, torch.Tensor):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
        assert torch.equal(torch.signbit(mine), torch.signbit(theirs))
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
    else:
        assert repr(mine) == repr(theirs)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_calls_that_look_alike(run: Case, device: str) -> None:
    made = []

    def compile(function: Any) -> Any:
        made.append(torchlazy.compile(function, audit=False))
        return made[-1]

    assert_same(everything(run, device, compile), everything(run, "cpu", lambda function: function))
    assert any(call.report().replays for call in made)


def test_files_named_as_the_standard_librarys(tmp_path, monkeypatch) -> None:
    (tmp_path / "sndhdr.py").write_text("scale = 2.0\n\n\ndef call(x):\n    return x * scale\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sndhdr", raising=False)
    module = importlib.import_module("sndhdr")
    try:
        call = torchlazy.compile(module.call, audit=False)
        x = torch.ones(2)
        for scale in (2.0, 3.0, 2.0):
            module.scale = scale
            for _ in range(3):
                assert call(x).tolist() == [scale, scale]
    finally:
        del sys.modules["sndhdr"]

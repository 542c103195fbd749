"""Arguments that are one tensor: passed twice, or reached by the call's code as well.

Invariant: each program runs plain and compiled, audits off; gradients of each call are those of the plain one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tests.lazy.kept_compiles import KeptCompiles

pytestmark = pytest.mark.usefixtures("operator_by_operator")


class Sizes(NamedTuple):
    """A shape in a container of the user's."""

    shape: torch.Size
    rows: int


Program = Callable[[str, Callable[[Any], Any]], Iterator[Any]]


def _new(device: str, seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def a_leaf_passed_twice(device: str, compile: Callable[[Any], Any]) -> Iterator[Any]:
    function = compile(lambda x, y, z=None: (x * y).sum() + (0 if z is None else (z**3).sum()))
    for seed in range(4):
        x = _new(device, seed, 4).requires_grad_()
        function(x, x).backward()
        function(x, x, x).backward()
        yield x.grad


def a_result_passed_twice(device: str, compile: Callable[[Any], Any]) -> Iterator[Any]:
    function = compile(lambda x, y: (x * y).sum())
    for seed in range(4):
        x = _new(device, seed, 8, 4).requires_grad_()
        for passed in (x * 2, x[2:6]):
            function(passed, passed).backward()
        yield x.grad


def a_parameter_that_the_code_names_too(device: str, compile: Callable[[Any], Any]) -> Iterator[Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    function = compile(lambda x, weight: model(x) * weight + weight)
    for seed in range(4):
        function(_new(device, seed, 4, 4), model.weight).sum().backward()
        yield [parameter.grad for parameter in model.parameters()]


def the_same_in_a_container(device: str, compile: Callable[[Any], Any]) -> Iterator[Any]:
    function = compile(lambda found: sum((x * x).sum() for x in found["all"]) * found["one"].sum())
    for seed in range(4):
        x = _new(device, seed, 4).requires_grad_()
        function({"all": [x, x], "one": x}).backward()
        yield x.grad


def gradients_of_gradients(device: str, compile: Callable[[Any], Any]) -> Iterator[Any]:
    function = compile(lambda x, y: (x * y * x).sum())
    for seed in range(4):
        x = _new(device, seed, 4).requires_grad_()
        (found,) = torch.autograd.grad(function(x, x), x, create_graph=True)
        found.square().sum().backward()
        yield found, x.grad


PROGRAMS: tuple[Program, ...] = (
    a_leaf_passed_twice, a_result_passed_twice, a_parameter_that_the_code_names_too, the_same_in_a_container,
    gradients_of_gradients,
)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_of_a_tensor_that_is_passed_twice(program: Program, device: str) -> None:
    compile = KeptCompiles()
    plain = program("cpu", lambda function: function)
    for have, want in zip(program(device, compile), plain, strict=True):
        torch.testing.assert_close(have, want, check_device=False)
    assert compile.first_report().replays >= 2


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_shape_that_a_call_gives_is_a_shape(device: str) -> None:
    run = torchlazy.compile(lambda x, shape: (x * 2, x.shape, shape, [Sizes(x.size(), 1)]), audit=False)
    kept = torchlazy.compile(lambda x: (x.shape, {1}), audit=False)  # a set: it runs its Python
    for rows in (2, 2, 2, 3, 3, 3, 4, 5):
        x = torch.ones(rows, 3).to(device)
        doubled, own, given, (pair,) = run(x, torch.Size([7, 30]))
        assert (own, given, pair) == ((rows, 3), (7, 30), ((rows, 3), 1)) and doubled.shape == (rows, 3)
        for shape in (own, given, pair.shape, kept(x)[0]):
            assert type(shape) is torch.Size and shape.numel() % 3 == 0
    assert run.report().replays >= 2


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_an_argument_that_is_a_leaf_at_some_calls(device):
    """Whether a leaf's or a result's gradient is asked for, the call is one: audits find nothing else."""

    class Weighted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(3) * 0.5)

        def forward(self, x):
            return x @ (self.weight * 2)

    model = Weighted().to(device)
    run = torchlazy.compile(model)
    for turn in range(10):
        leaf = torch.ones(2, 3).to(device).requires_grad_()
        run(leaf if turn % 2 else leaf * 2).sum().backward()
        assert leaf.grad.tolist() == [[1.0 if turn % 2 else 2.0] * 3] * 2
        model.weight.grad = None
    report = run.report()
    assert not report.alarm and not report.verified and report.replays, report.reasons


IDENTITY = id
KEYED = {
    "a dictionary": (lambda k, n: (k, 10.0 * n), lambda x, k, held: x + held[k]),
    "tuples": (lambda k, n: ((k, 1), 10.0 * n), lambda x, k, held: x + held[k, 1]),
    "identity": (lambda k, n: (k, 10.0 * n), lambda x, k, held: x + sum(n for key, n in held.items() if key is k)),
    "what id() gives": (lambda k, n: (id(k), n), lambda x, k, held: x + held[id(k)]),
    "what hash() gives": (lambda k, n: (hash(k), n), lambda x, k, held: x + held[hash(k)]),
    "its hash": (lambda k, n: (hash(k), n), lambda x, k, held: x + held[k.__hash__()]),
    "id under another name": (lambda k, n: (id(k), n), lambda x, k, held: x + held[IDENTITY(k)]),
    "id of several": (lambda k, n: (id(k), n), lambda x, k, held: x + sum(held[one] for one in map(id, [k]))),
    "a tuple in a tuple": (lambda k, n: (((k,), 1), 10.0 * n), lambda x, k, held: x + held[(k,), 1]),
    "a frozen set": (lambda k, n: (frozenset({k}), n), lambda x, k, held: x + held[frozenset({k})]),
    "a weak reference": (lambda k, n: (weakref.ref(k), n), lambda x, k, held: x + held[weakref.ref(k)]),
    "an address": (lambda k, n: (k.data_ptr(), n), lambda x, k, held: x + held[k.data_ptr()]),
    "a storage's address": (
        lambda k, n: (k.untyped_storage().data_ptr(), n),
        lambda x, k, held: x + held[k.untyped_storage().data_ptr()],
    ),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize(("entry", "look"), KEYED.values(), ids=KEYED)
def test_arguments_are_looked_up_by_identity(entry, look, device):
    rows = torch.ones(4, 2).to(device)
    keys = [torch.ones(2).to(device), torch.ones(2).to(device), rows[0], rows[1]]
    held = dict(entry(key, number) for number, key in enumerate(keys))
    run = torchlazy.compile(lambda x, k: look(x, k, held))
    x = torch.ones(2).to(device)
    for number in (0, 0, 0, 0, 1, 0, 1, 1, 2, 3, 2, 2, 3, 3, 3, 0):
        assert run(x, keys[number]).tolist() == look(x, keys[number], held).tolist(), number
    assert not run.report().alarm


KEPT = {"itself": lambda k: k, "a tuple": lambda k: (k, 1), "a frozen set": lambda k: frozenset({k})}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("key", KEPT.values(), ids=KEPT)
def test_tensors_that_are_keys_take_turns(key, device):
    a, b = torch.zeros(2).to(device), torch.ones(2).to(device)
    held = {key(a): 10.0}
    run = torchlazy.compile(lambda x, k: x + held.get(key(k), 1.0), audit=False)
    x = torch.ones(2).to(device)
    for turn in range(4):
        for k in (a, a, b, a, b, b):
            assert run(x, k).tolist() == (x + held.get(key(k), 1.0)).tolist(), turn
        held.clear()
        held[key((a, b)[(turn + 1) % 2])] = 10.0
    assert run.report().replays >= 8, run.report()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("key", KEPT.values(), ids=KEPT)
def test_a_call_that_changes_the_tensors_that_are_keys(key, device):
    a, b = torch.zeros(2).to(device), torch.ones(2).to(device)
    held = {}

    def step(x, k):
        held.clear()
        held[key(k)] = x * 3
        return x + 1

    run = torchlazy.compile(step, audit=False)
    for number, k in enumerate((a, a, a, a, b, b, b, a, b, a, a, a, b)):
        run(torch.full((2,), float(number)).to(device), k)
        assert list(held) == [key(k)] and held[key(k)].tolist() == [3.0 * number] * 2, number


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("table", [WeakIdKeyDictionary, None])
def test_arguments_that_a_library_keeps_as_keys(table, device):
    a, b = torch.zeros(2).to(device), torch.ones(2).to(device)
    held = functools.lru_cache(lambda k: float(k.sum()) + 3) if table is None else table({a: 3.0, b: 5.0})
    look = held if table is None else held.__getitem__
    look(a), look(b)
    run = torchlazy.compile(lambda x, k: x + (held(k) if table is None else held[k]), audit=False)
    x = torch.ones(2).to(device)
    for k in (a, a, a, b, b, a, b):
        assert run(x, k).tolist() == (x + look(k)).tolist()


def test_identities_of_the_state_are_replayed():
    model = torch.nn.Linear(2, 2)
    order = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    run = torchlazy.compile(lambda x: model(x) * sum(order[id(one)] + 1 for one in model.parameters()), audit=False)
    for _ in range(6):
        x = torch.ones(2)
        torch.testing.assert_close(run(x), model(x) * 3)
    assert run.report().replays >= 4, run.report()

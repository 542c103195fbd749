"""Compiled calls that take, change and give objects: caches, records, namespaces, containers of the caller's."""

from __future__ import annotations

import argparse
import collections
import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torchlazy
from torch import Tensor

pytestmark = pytest.mark.usefixtures("compiled")
DEVICES = ["lazy", "cpu"]


class Layer:
    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.count = 0

    def update(self, new: Tensor) -> Tensor:
        self.keys = new if self.keys is None else torch.cat([self.keys, new], -1)
        self.count += 1
        return self.keys


class Cache:
    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.makes = Layer
        self.device = torch.device("cpu")

    def update(self, number: int, new: Tensor) -> Tensor:
        while len(self.layers) <= number:
            self.layers.append(self.makes())
        return self.layers[number].update(new)


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class Record:
    loss: Tensor
    parts: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def seen(value: Any, known: dict[int, int] | None = None) -> Any:
    """The value in a form that compares: classes, plain values, tensors as lists, and who is the same object."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        number = known.setdefault(id(value), len(known))
        return (number, type(value).__name__ == "Parameter", value.dtype, value.requires_grad, value.tolist())
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device, type, type(...))):
        return value
    if id(value) in known:
        return ("again", known[id(value)])
    known[id(value)] = len(known)
    if isinstance(value, dict):
        return (type(value), [(key, seen(item, known)) for key, item in value.items()])
    if isinstance(value, (list, tuple, collections.deque)):
        return (type(value), [seen(item, known) for item in value])
    return (type(value), [(name, seen(item, known)) for name, item in vars(value).items()])


# ---- calls: (arguments of one call, the function)

weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))


def makes_a_cache(x: Tensor) -> Any:
    cache = Cache()
    cache.update(0, x * 2)
    return {"sum": cache.update(1, x + 1).sum(), "cache": cache}


def same_object_twice(x: Tensor) -> Any:
    layer = Layer()
    layer.update(x * 2)
    return [layer, (layer, x), {"a": layer}]


def object_in_a_circle(x: Tensor) -> Any:
    one, other = Layer(), types.SimpleNamespace(value=x * 3)
    one.other = other  # type: ignore[attr-defined]
    other.back = one
    return one


def nested_record(x: Tensor) -> Any:
    return Record(x.sum(), {"list": [x * 2, None, "text", 3], "pair": Pair(x + 1, {"deep": (x - 1,)})}, "note")


def odd_containers(x: Tensor) -> Any:
    return collections.OrderedDict(a=x * 2, b=collections.deque([x, 1], maxlen=3)), collections.defaultdict(list, k=[x])


def nothing_at_all(x: Tensor) -> Any:
    x * 2
    return None, (), [], {}, ...


def argument_and_views(x: Tensor) -> Any:
    return x, x[0:1], x.view(-1), x.t() if x.dim() == 2 else x, x


def same_tensor_twice(x: Tensor) -> Any:
    y = x * 2
    return y, {"again": y, "view": y[1:]}, y


def gives_parameters(x: Tensor) -> Any:
    return weight, weight * x.sum(), [weight]


def a_class_and_a_function(x: Tensor) -> Any:
    return types.SimpleNamespace(kind=Cache, value=x * 2, dtype=x.dtype)


def subclass_of_a_record(x: Tensor) -> Any:
    found = Extended(x.mean())
    found.extra = x * 2
    return found


class Extended(Record):
    extra: Tensor


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "function",
    [makes_a_cache, same_object_twice, object_in_a_circle, nested_record, odd_containers, nothing_at_all,
     argument_and_views, same_tensor_twice, gives_parameters, a_class_and_a_function, subclass_of_a_record],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_what_a_call_gives(function: Callable[[Tensor], Any], device: str) -> None:
    if function is gives_parameters and device == "lazy":
        pytest.skip("the parameter lies on the CPU")
    run = torchlazy.compile(function)
    for step in range(6):
        x = torch.tensor([1.0 + step, 2.0])
        assert seen(run(x.to(device))) == seen(function(x)), step
    assert run.report().replays >= 2, run.report()


@pytest.mark.parametrize("device", DEVICES)
def test_objects_are_new_at_each_call(device: str) -> None:
    run = torchlazy.compile(makes_a_cache)
    x = torch.ones(2).to(device)
    given = [run(x)["cache"] for _ in range(6)]
    assert len({id(cache.layers[0]) for cache in given}) == 6
    given[0].layers[0].count = 99
    assert run(x)["cache"].layers[0].count == 1


def test_an_object_that_somebody_holds_is_no_result_of_a_replay() -> None:
    held: list[Any] = []

    class Holder:
        def keep(self, value: Any) -> Any:
            held.append(value)
            return value

    keep = functools_cached(Holder().keep)

    @torchlazy.compile
    def run(x: Tensor) -> Any:
        made = types.SimpleNamespace(value=x * 2)
        keep(made)
        return made

    for _ in range(5):
        found = run(torch.ones(2))
        assert found is held[-1] and torch.equal(found.value, torch.full((2,), 2.0))
    assert run.report().replays == 0


def functools_cached(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Behind an object of a library, where guards do not look."""
    import functools

    return functools.partial(functools.partial(function))


# ---- arguments that the call changes


def grows_a_cache(x: Tensor, cache: Any) -> Any:
    return cache.update(0, x).sum() + cache.update(1, x * 2).sum(), cache


def appends(x: Tensor, losses: Any) -> Any:
    losses.append(x.sum())
    return losses


def writes_keys(x: Tensor, out: Any) -> None:
    out["y"] = x * 2
    out["n"] = out.get("n", 0) + 1
    out.pop("gone", None)


def writes_nested(x: Tensor, state: Any) -> Any:
    state["inner"]["h"] = x + state["inner"]["h"]
    state["list"][0] = state["inner"]["h"] * 2
    return state["inner"]


def writes_a_record(x: Tensor, record: Any) -> Tensor:
    record.loss = record.loss * 0.5 + x.sum()
    record.parts["last"] = record.loss
    record.note = "seen"
    return record.loss * 2


def writes_a_namespace(x: Tensor, space: Any) -> Any:
    space.x = x * space.scale
    del space.old
    return space


CHANGING: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "grows_a_cache": (grows_a_cache, Cache),
    "appends": (appends, list),
    "writes_keys": (writes_keys, lambda: {"gone": 1}),
    "writes_nested": (writes_nested, lambda: {"inner": {"h": torch.ones(2)}, "list": [None, 2]}),
    "writes_a_record": (writes_a_record, lambda: Record(torch.tensor(1.0))),
    "writes_a_namespace": (writes_a_namespace, lambda: types.SimpleNamespace(scale=2.0, old=1)),
    "writes_parsed_arguments": (writes_a_namespace, lambda: argparse.Namespace(scale=2.0, old=1)),
}


def moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [moved(item, device) for item in value]
    if isinstance(value, Record):
        return Record(moved(value.loss, device), value.parts, value.note)
    return value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHANGING)
def test_what_a_call_does_to_its_arguments(name: str, device: str) -> None:
    function, start = CHANGING[name]
    run = torchlazy.compile(function)
    for step in range(9):
        plain, mine = start(), moved(start(), device)
        before = mine
        x = torch.tensor([1.0 + step, 2.0])
        want, got = function(x, plain), run(x.to(device), mine)
        assert mine is before
        assert seen((got, mine)) == seen((want, plain)), step
        if device == "cpu":
            assert all(type(leaf) is Tensor for leaf in _tensors(mine))
    assert run.report().replays >= 3, run.report()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    if items is None:
        items = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    return [leaf for item in items for leaf in _tensors(item)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_that_grows_is_captured_once_for_each_length(device: str) -> None:
    run = torchlazy.compile(grows_a_cache)
    for turn in range(6):
        plain, mine = Cache(), Cache()
        for step in range(5):
            x = torch.tensor([[1.0 + step, turn]])
            want, got = grows_a_cache(x, plain), run(x.to(device), mine)
            assert got[1] is mine and seen((got, mine)) == seen((want, plain)), (turn, step)
    report = run.report()
    assert report.captures <= 16 and report.replays >= 4, report
    before = report.captures
    for _ in range(2):
        mine = Cache()
        for _ in range(5):
            run(torch.ones(1, 2).to(device), mine)
    assert run.report().captures == before


def test_an_argument_that_the_state_holds_too() -> None:
    """What a call was captured with as two objects is another call where they are one."""

    class Model:
        def __init__(self) -> None:
            self.log: list[Tensor] = []

        def __call__(self, x: Tensor, log: list[Tensor]) -> Any:
            log.append(x * 2)
            return len(self.log), x + len(self.log)

    mine, plain = Model(), Model()
    run = torchlazy.compile(Model.__call__)
    for step in range(8):
        x = torch.tensor([float(step)])
        if step < 4:
            assert seen(run(mine, x, [])) == seen(plain(x, [])), step
        else:
            assert seen(run(mine, x, mine.log)) == seen(plain(x, plain.log)), step
            assert seen(mine.log) == seen(plain.log)


def test_objects_that_stay_are_looked_at_where_they_are() -> None:
    """A configuration and a state that are the same objects at each call: their attributes are guarded."""

    class Config:
        def __init__(self) -> None:
            self.scale, self.name = 2.0, "a"

    class State:
        def __init__(self) -> None:
            self.hidden, self.steps = torch.zeros(2), 0

    def function(config: Any, state: Any, x: Tensor) -> Tensor:
        state.hidden = state.hidden * 0.5 + x * config.scale
        state.steps += 1
        return state.hidden + (1 if config.name == "a" else 2)

    run = torchlazy.compile(function)
    mine, plain = (Config(), State()), (Config(), State())
    for step in range(20):
        if step == 5:
            mine[0].scale = plain[0].scale = 3.0
        if step == 12:
            mine[0].name = plain[0].name = "b"
        x = torch.tensor([1.0, float(step)])
        torch.testing.assert_close(run(*mine, x), function(*plain, x))
        assert mine[1].steps == plain[1].steps
    assert run.report().replays >= 3, run.report()


def test_what_a_deep_copy_of_a_result_holds() -> None:
    run = torchlazy.compile(makes_a_cache)
    for _ in range(4):
        found = run(torch.ones(2))
    again = copy.deepcopy(found)
    assert seen(again) == seen(found) and again["cache"].layers[0] is not found["cache"].layers[0]


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_tensors_made_of_data(needs_gradient: bool) -> None:
    """Constants of a call on ordinary tensors: each replay has them anew."""
    linear = torch.nn.Linear(3, 3)

    def function(x: Tensor) -> Any:
        steps = torch.tensor([1.0, 2.0, 3.0])
        empty = torch.tensor([], dtype=x.dtype)
        y = linear(x) * steps
        last = torch.tensor([1.0, 2.0])
        last += x[:, 0]
        return torch.cat([empty, y.flatten()]), y[:, [-1, 0]], x[[1, 0]], last.sum()

    run = torchlazy.compile(function)
    with torch.set_grad_enabled(needs_gradient):
        for _ in range(5):
            x = torch.randn(2, 3)
            for mine, theirs in zip(run(x), function(x), strict=True):
                torch.testing.assert_close(mine, theirs)
    assert run.report().replays >= 1, run.report()


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.filterwarnings("ignore:torchlazy.compile")
def test_a_parameter_that_a_call_makes_is_one(device: str, needs: bool) -> None:
    call = torchlazy.compile(lambda x: [torch.nn.Parameter(x * 2, requires_grad=needs), x + 1], audit=False)
    for _ in range(4):
        made, other = call(torch.ones(3).to(device))
        assert isinstance(made, torch.nn.Parameter) and made.requires_grad == needs and made.is_leaf
        assert not isinstance(other, torch.nn.Parameter) and made.tolist() == [2, 2, 2]

"""What code reads beside modules and plain objects: classes, context variables, thread locals, read-only views, weak
references, memory of bytes, names that libraries answer for, names that nobody has set yet, settings of torch.

Invariant: a case calls its function three times, changes one thing, and calls it again, plain and compiled: the values
are the same. Audits are off, so that nothing but a guard can notice.
"""

from __future__ import annotations

import abc
import array
import collections
import collections.abc
import configparser
import contextvars
import ctypes
import dataclasses
import enum
import functools
import itertools
import logging
import math
import operator
import os
import queue
import random
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchlazy
from _pytest.assertion import rewrite
from torch import Tensor, nn

from tests.lazy.kept_compiles import KeptCompiles

pytestmark = pytest.mark.usefixtures("operator_by_operator")
Changes = list[Callable[[], Any]]
Case = Callable[[], tuple[Callable[[Tensor], Any], Changes]]


class Settings:
    """Settings as members of a class."""

    rate = 2.0
    layers = (1.0,)

    class Inner:
        rate = 3.0

    @classmethod
    def scaled(cls, x):
        return x * cls.rate


class Holder:
    """An object for anything."""


ACTIVATION: Any = torch.relu
PART = functools.partial(torch.add, alpha=2.0)
ROWS = slice(0, 2)
NUMBERS = {1, 2}
LAYER: Any = nn.ReLU
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=2.0)
TABLE = {f"name {i}": 1.0 for i in range(400)}
FACTOR = 2.0
_GLOBALS = {
    "FACTOR": FACTOR,
    "ACTIVATION": torch.relu,
    "PART": PART,
    "ROWS": ROWS,
    "LAYER": nn.ReLU,
    "NUMBERS": NUMBERS,
}


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _global(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


def members_of_a_class():
    changes = [_set(Settings, "rate", 5.0), _set(Settings.Inner, "rate", 7.0), _set(Settings, "rate", 2.0)]
    return lambda x: x * Settings.rate + Settings.Inner.rate, [*changes, _set(Settings.Inner, "rate", 3.0)]


def a_class_method():
    return lambda x: Settings.scaled(x), [_set(Settings, "rate", 5.0), _set(Settings, "rate", 2.0)]


def a_class_as_argument():
    kind = type("Kind", (), {"rate": 2.0})
    call = lambda x, kind: x * kind.rate  # noqa: E731
    return lambda x: call(x, kind), [_set(kind, "rate", 5.0)]


def a_class_gets_what_its_base_had():
    base = type("Base", (), {"rate": 2.0})
    derived: Any = type("Derived", (base,), {})
    found = derived()
    return lambda x: x * found.rate, [_set(derived, "rate", 5.0), lambda: delattr(derived, "rate")]


def a_class_gets_a_member():
    kind: Any = type("Kind", (), {})
    found = kind()
    return lambda x: x * getattr(found, "rate", 1.0), [_set(kind, "rate", 5.0), lambda: delattr(kind, "rate")]


def a_class_of_the_library_gets_a_member():
    layer = nn.Linear(4, 4)
    call = lambda x: x * getattr(layer, "rate", 1.0)  # noqa: E731
    return call, [_set(nn.Linear, "rate", 5.0), lambda: delattr(nn.Linear, "rate")]


def other_bases():
    first = type("First", (), {"scaled": lambda self, x: x * 2})
    second = type("Second", (), {"scaled": lambda self, x: x * 3})
    derived: Any = type("Derived", (first,), {})
    found = derived()
    return lambda x: found.scaled(x), [_set(derived, "__bases__", (second,))]


def a_property_of_a_metaclass():
    meta = type("Meta", (type,), {"rate": property(lambda kind: kind.held)})
    kind: Any = meta("Kind", (), {"held": 2.0})
    return lambda x: x * kind.rate, [_set(kind, "held", 5.0), _set(meta, "rate", property(lambda kind: 9.0))]


def a_member_of_an_enum():
    kind: Any = enum.Enum("kind", "A B")
    kind.A.rate = 2.0
    held = Holder()
    held.kind = kind.A  # type: ignore[attr-defined]
    return lambda x: x * held.kind.rate, [_set(kind.A, "rate", 5.0)]  # type: ignore[attr-defined]


def a_cached_property():
    class Cached:
        held = 2.0

        @functools.cached_property
        def rate(self):
            return self.held * 2

    found = Cached()

    def again():
        found.held = 5.0
        del found.rate

    return lambda x: x * found.rate, [again]


def attributes_of_a_function():
    def call(x):
        return x * call.rate

    call.rate = 2.0  # type: ignore[attr-defined]
    return call, [_set(call, "rate", 5.0)]


def a_dispatched_function():
    rate = functools.singledispatch(lambda found: 2.0)
    found = Holder()
    return lambda x: x * rate(found), [lambda: rate.register(Holder, lambda found: 5.0)]


def containers_of_users_own_classes():
    class Numbers(list):
        rate = 2.0

    class Table(dict):
        rate = 2.0

    numbers, table = Numbers([1.0]), Table(a=1.0)
    changes = [_set(Numbers, "rate", 3.0), _set(numbers, "rate", 4.0), _set(Table, "rate", 5.0)]
    return lambda x: x * numbers.rate + table.rate, [*changes, _set(table, "rate", 6.0)]


def a_context_variable():
    return lambda x: x * VARIABLE.get(), [lambda: VARIABLE.set(5.0), lambda: VARIABLE.set(2.0)]


def a_thread_local():
    held = threading.local()
    held.rate = 2.0
    return lambda x: x * held.rate, [_set(held, "rate", 5.0)]


def the_environment():
    def call(x):
        return x * float(os.environ.get("TORCHLAZY_SIGHT", "1")) + float(os.getenv("TORCHLAZY_SIGHT", "1"))

    put = lambda: os.environ.update(TORCHLAZY_SIGHT="5")  # noqa: E731
    return call, [put, lambda: os.environ.pop("TORCHLAZY_SIGHT")]


def views_of_dicts():
    table = {"rate": 2.0}
    view, chain = types.MappingProxyType(table), collections.ChainMap({}, table)
    return lambda x: x * view["rate"] + chain["rate"], [lambda: table.update(rate=5.0)]


def a_weak_reference():
    held = Holder()
    held.rate = 2.0  # type: ignore[attr-defined]
    weak, proxy, table = weakref.ref(held), weakref.proxy(held), weakref.WeakValueDictionary({"a": held})
    call = lambda x, _=held: x * weak().rate + proxy.rate + table["a"].rate  # type: ignore[union-attr]  # noqa: E731
    return call, [_set(held, "rate", 5.0)]


def names_of_classes():
    class Named:
        pass

    return lambda x: x * len(Named.__name__), [_set(Named, "__name__", "A longer name")]


def libraries_in_closures():
    import gc as collector

    read, enabled = os.getenv, collector.isenabled
    os.environ["TORCHLAZY_SIGHT"] = "2"
    call = lambda x: x * float(read("TORCHLAZY_SIGHT")) + collector.isenabled() + 2 * enabled()  # noqa: E731
    return call, [lambda: os.environ.update(TORCHLAZY_SIGHT="5"), collector.disable, collector.enable]


def a_parser_of_settings():
    parser = configparser.ConfigParser()
    parser["model"] = {"rate": "2"}
    change = lambda: parser["model"].update(rate="5")  # noqa: E731
    return lambda x: x * parser.getfloat("model", "rate"), [change]


def memory_of_bytes():
    held, typed, number = bytearray(b"\x02"), array.array("d", [2.0]), ctypes.c_double(2.0)
    view = memoryview(held)
    call = lambda x: x * held[0] + typed[0] + number.value + view[0]  # noqa: E731
    changes = [lambda: held.__setitem__(0, 3), lambda: typed.__setitem__(0, 4.0), _set(number, "value", 5.0)]
    return call, changes


def a_getter_of_attributes():
    held, get = types.SimpleNamespace(inner=Holder()), operator.attrgetter("inner.rate")
    held.inner.rate = 2.0
    return lambda x: x * get(held), [_set(held.inner, "rate", 5.0)]


def globals_of_any_kind():
    def call(x):
        return LAYER()(PART(ACTIVATION(x), x))[ROWS] * sum(NUMBERS)

    return call, [
        _global("ACTIVATION", torch.tanh), _global("LAYER", nn.Tanh), _global("ROWS", slice(1, 3)),
        _global("PART", functools.partial(torch.add, alpha=3.0)), _global("NUMBERS", {1, 2, 3}), lambda: NUMBERS.add(4),
        _global("ACTIVATION", torch.relu), _global("LAYER", nn.ReLU), _global("ROWS", slice(0, 2)),
    ]  # fmt: skip


def an_item_of_a_large_table():
    return lambda x: x * TABLE["name 300"], [lambda: TABLE.update({"name 300": 5.0})]


def a_global_that_comes_and_goes():
    space: dict[str, Any] = {}
    exec(
        "def call(x):\n    try:\n        return x * RATE\n    except NameError:\n        return max(x, x, key=len)",
        space,
    )
    changes = [lambda: space.update(RATE=5.0), lambda: space.pop("RATE")]
    return space["call"], [*changes, lambda: space.update(max=lambda a, b, key: a * 7)]


def a_variable_that_gets_a_value():
    if False:
        rate = 0.0

    def call(x):
        try:
            return x * rate
        except NameError:
            return x

    def put():
        nonlocal rate
        rate = 5.0

    return call, [put]


def functions_of_libraries():
    def call(x):
        return F.relu(x) * math.sqrt(4.0) + x.sigmoid()

    old = F.relu, math.sqrt
    return call, [
        _set(F, "relu", lambda x: x * 3), _set(math, "sqrt", lambda number: 9.0), _set(F, "relu", old[0]),
        _set(math, "sqrt", old[1]), _set(torch.Tensor, "sigmoid", lambda self: self * 2),
        lambda: delattr(torch.Tensor, "sigmoid"),
    ]  # fmt: skip


def methods_of_library_classes():
    layer, old = nn.Sequential(nn.ReLU()), nn.ReLU.forward
    return lambda x: layer(x), [_set(nn.ReLU, "forward", lambda self, x: x * 3), _set(nn.ReLU, "forward", old)]


def settings_of_torch():
    def call(x):
        faster = torch.get_float32_matmul_precision() != "highest"
        return x * (2 if faster else 3) + torch.get_num_threads() + torch.backends.cudnn.benchmark

    threads = torch.get_num_threads()
    return call, [
        lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest"),
        lambda: torch.set_num_threads(threads + 1), lambda: torch.set_num_threads(threads),
        lambda: torch._C._set_cudnn_benchmark(True), lambda: torch._C._set_cudnn_benchmark(False),
    ]  # fmt: skip


def a_method_put_on_an_optimizer():
    weights: dict[str, nn.Parameter] = {}
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)

    def call(x):
        if not weights:
            weights["one"] = nn.Parameter(torch.ones(4).to(x.device))
            optimizer.add_param_group({"params": weights["one"]})
        optimizer.zero_grad()
        (weights["one"] * x.detach()).sum().backward()
        optimizer.step()
        return weights["one"].detach().clone()

    return call, [_set(optimizer, "step", lambda: None), lambda: delattr(optimizer, "step")]


def what_gives_something_else_each_time():
    numbers, waiting = itertools.count(1), queue.SimpleQueue()  # type: ignore[var-annotated]
    for number in range(20):
        waiting.put(number)
    own, of_numpy = random.Random(0), np.random.default_rng(0)
    return lambda x: x * next(numbers) + waiting.get() + own.random() + of_numpy.random(), []


def random_numbers_of_python():
    random.seed(0)
    np.random.seed(0)
    return lambda x: x * random.random() + np.random.rand(), []


def settings_that_the_call_changes():
    def call(x):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(not before)
        return x * (2 if before else 3)

    return call, []


def caches_of_functions() -> tuple[Callable[[Tensor], Any], Changes]:
    """Results that a cache has are used until somebody clears it, whatever they were made from."""
    settings, elsewhere = {"rate": 1.0}, [1.0]

    class Reader:
        def __call__(self) -> float:
            return elsewhere.copy().pop()

    read = operator.methodcaller("__call__")  # a way on which guards see nothing

    @functools.cache
    def unlimited(times: int) -> float:
        return settings["rate"] * times

    @functools.lru_cache(maxsize=4)
    def limited(times: int) -> float:
        return settings["rate"] * times

    @functools.lru_cache(maxsize=2)
    def hidden() -> str:
        return f"{read(Reader())}"

    def call(x):
        return x * unlimited(2) + limited(3) + float(hidden())

    def rate(value: float) -> Callable[[], Any]:
        return lambda: settings.update(rate=value)

    def clear() -> None:
        for function in (unlimited, limited, hidden):
            function.cache_clear()

    def fill_again() -> None:
        clear()
        unlimited(2), limited(3)

    def change_and_clear() -> None:
        elsewhere[0] = 5.0
        clear()

    return call, [
        rate(2.0), clear, rate(4.0), clear, rate(6.0), fill_again, lambda: [limited(i) for i in range(10, 20)],
        change_and_clear,
    ]  # fmt: skip


@pytest.mark.parametrize("most", [None, 4])
def test_a_cached_result_that_varies_is_a_plain_number_afterwards(most: int | None) -> None:
    settings = {"rate": 1.0}

    @functools.lru_cache(maxsize=most)
    def rate(times: int) -> float:
        return settings["rate"] * times

    @torchlazy.compile
    def call(x: Tensor) -> Tensor:
        return x * 2 + rate(3)

    for value in (1.0, 2.0, 3.0):
        settings["rate"] = value
        rate.cache_clear()
        for _ in range(3):
            assert call(torch.ones(2)).tolist() == [2 + 3 * value] * 2
        assert (torch.ones(2) + rate(3)).tolist() == [1 + 3 * value] * 2
        assert type(rate(3)) is float


def registered_classes() -> tuple[Callable[[Tensor], Any], Changes]:
    class Shape(abc.ABC):  # noqa: B024
        pass

    class Round(Shape):
        pass

    class Square:
        pass

    class Small(Square):
        pass

    small, kinds = Small(), (Round, int)

    def call(x):
        y = x * 2 if isinstance(small, Shape) else x
        y = y + 5 if isinstance(small, collections.abc.Sequence) else y
        y = y - 7 if isinstance(small, kinds) else y
        return y + 100 if issubclass(Square, typing.Sized) else y

    return call, [
        lambda: Round.register(Small), lambda: Shape.register(Square),
        lambda: collections.abc.Sequence.register(Small), lambda: collections.abc.Sized.register(Square),
    ]  # fmt: skip


def numbers_of_frozen_objects() -> tuple[Callable[[Tensor], Any], Changes]:
    """Their classes refuse to set attributes; what varies is followed all the same."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Slots:
        rate: float = 1.0

    @dataclasses.dataclass(frozen=True)
    class Plain:
        rate: float = 1.0

    slots, plain = Slots(), Plain()

    def changed(value: float) -> Callable[[], Any]:
        def change() -> None:
            object.__setattr__(slots, "rate", value)
            object.__setattr__(plain, "rate", value + 1)

        return change

    return (lambda x: x * slots.rate + plain.rate), [changed(2.0), changed(3.0), changed(4.0)]


def settings_deep_in_others() -> tuple[Callable[[Tensor], Any], Changes]:
    innermost = types.SimpleNamespace(rate=1.0)
    settings = innermost
    for _ in range(12):
        settings = types.SimpleNamespace(inner=settings)

    def call(x):
        at = settings
        while hasattr(at, "inner"):
            at = at.inner
        return x * at.rate

    return call, [lambda: setattr(innermost, "rate", 2.0)]


def names_in_strings() -> tuple[Callable[[Tensor], Any], Changes]:
    """Globals and attributes of modules that are asked for by strings."""
    settings: Any = types.ModuleType("settings_of_the_test")
    settings.rate, names, here = 1.0, ["rate"], globals()

    def call(x):
        y = x * globals()["FACTOR"] + globals().get("LATE", 0.0)
        y = y * getattr(settings, "rate") + getattr(settings, "late", 0.0)  # noqa: B009
        return y + vars(settings)["rate"] + eval("FACTOR")

    def computed(x):
        return call(x) * getattr(settings, names[0])

    return computed, [
        lambda: here.update(FACTOR=3.0), lambda: here.update(LATE=5.0), lambda: here.pop("LATE"),
        lambda: setattr(settings, "rate", 2.0), lambda: setattr(settings, "late", 7.0),
        lambda: setattr(settings, "other", 9.0), lambda: names.__setitem__(0, "other"),
        lambda: setattr(settings, "other", 11.0),
    ]  # fmt: skip


def names_that_are_made() -> tuple[Callable[[Tensor], Any], Changes]:
    """Parts of names stand in the code where names do."""
    holder, number = Holder(), [1]
    holder.rate_1, holder.rate_2, holder.rates = 1.0, 2.0, 3.0  # type: ignore[attr-defined]

    def call(x):
        y = x * getattr(holder, f"rate_{number[0]}")
        return y * getattr(holder, "rate" + "s"[: number[0]]) + getattr(holder, "late_" + str(number[0]), 0.0)

    return call, [
        lambda: number.__setitem__(0, 2), lambda: setattr(holder, "rate_2", 4.0), lambda: setattr(holder, "rates", 5.0),
        lambda: setattr(holder, "late_2", 6.0), lambda: setattr(holder, "late_2", 7.0),
    ]  # fmt: skip


def modules_imported_in_the_call() -> tuple[Callable[[Tensor], Any], Changes]:
    made: Any = types.ModuleType("imported_in_a_call")
    made.rate, made.inner = 2.0, types.ModuleType("imported_in_a_call.inner")
    made.inner.rate = 3.0
    sys.modules.update({"imported_in_a_call": made, "imported_in_a_call.inner": made.inner})
    sys.modules.pop("another_one_in_a_call", None)
    another: Any = types.ModuleType("another_one_in_a_call")
    another.rate = 10.0

    def call(x):
        import imported_in_a_call  # type: ignore[import-not-found]
        from imported_in_a_call.inner import rate  # type: ignore[import-not-found]

        try:
            from another_one_in_a_call import rate as other  # type: ignore[import-not-found]
        except ImportError:
            other = 0.0
        return x * imported_in_a_call.rate * sys.modules["imported_in_a_call"].rate + rate + other

    return call, [
        lambda: setattr(made, "rate", 5.0), lambda: setattr(made.inner, "rate", 6.0),
        lambda: sys.modules.update(another_one_in_a_call=another), lambda: setattr(another, "rate", 11.0),
        lambda: sys.modules.pop("another_one_in_a_call"),
    ]  # fmt: skip


def events_and_loggers() -> tuple[Callable[[Tensor], Any], Changes]:
    event, logger = threading.Event(), logging.getLogger("torchlazy.tests.sights")
    logger.setLevel(logging.WARNING)

    def call(x):
        y = x * 2 if event.is_set() else x
        return y + 1 if logger.isEnabledFor(logging.INFO) else y

    return call, [event.set, lambda: logger.setLevel(logging.INFO), event.clear, lambda: logger.setLevel(logging.ERROR)]


CASES: tuple[Case, ...] = (
    members_of_a_class, a_class_method, a_class_as_argument, a_class_gets_what_its_base_had, a_class_gets_a_member,
    a_class_of_the_library_gets_a_member, other_bases, a_property_of_a_metaclass, a_member_of_an_enum,
    a_cached_property, attributes_of_a_function, a_dispatched_function, containers_of_users_own_classes,
    a_context_variable, a_thread_local, the_environment, views_of_dicts, a_weak_reference, memory_of_bytes,
    a_getter_of_attributes, globals_of_any_kind, an_item_of_a_large_table, a_global_that_comes_and_goes,
    a_variable_that_gets_a_value, functions_of_libraries, methods_of_library_classes, settings_of_torch,
    caches_of_functions, registered_classes, numbers_of_frozen_objects, settings_deep_in_others,
    names_in_strings, names_that_are_made, modules_imported_in_the_call, events_and_loggers,
    names_of_classes, libraries_in_closures, a_parser_of_settings, a_method_put_on_an_optimizer,
    what_gives_something_else_each_time, random_numbers_of_python,
    settings_that_the_call_changes,
)  # fmt: skip


def _played(case: Case, device: str, compile: Callable[[Any], Any]) -> Iterator[Any]:
    function, changes = case()
    call = compile(function)
    x = torch.arange(16.0).view(4, 4).sub(7).to(device)
    try:
        for change in (lambda: None, *changes):
            change()
            for _ in range(3):
                yield call(x), torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
        VARIABLE.set(2.0)
        TABLE["name 300"] = 1.0
        globals().update(_GLOBALS)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_changed_is_noticed(case: Case, device: str) -> None:
    compile = KeptCompiles()
    want = list(_played(case, "cpu", lambda function: function))
    for number, (have, theirs) in enumerate(zip(_played(case, device, compile), want, strict=True)):
        torch.testing.assert_close(have, theirs, check_device=False, msg=lambda text, n=number: f"call {n}: {text}")
    report = compile.first_report()
    assert case in CASES[-3:] or report.replays >= 2, report
    assert case not in CASES[-3:] or report.replays == 0, report


def test_a_compiled_class_method() -> None:
    class Scaled:
        rate = 2.0

        @classmethod
        @torchlazy.compile(audit=False)
        def scaled(cls, x):
            return x * cls.rate

    class Derived(Scaled):
        rate = 3.0

    x = torch.ones(3)
    for _ in range(3):
        assert Scaled.scaled(x)[0] == 2 and Derived.scaled(x)[0] == 3 and Derived().scaled(x)[0] == 3
    Scaled.rate = 4.0
    assert Scaled.scaled(x)[0] == 4 and Derived.scaled(x)[0] == 3


def test_hooks_of_saved_tensors_are_noticed() -> None:
    model = nn.Linear(4, 4)

    @torchlazy.compile(audit=False)
    def step(x):
        model.zero_grad()
        model(x).square().sum().backward()
        return model.weight.grad.clone()

    x = torch.ones(2, 4)
    plain = [step(x) for _ in range(4)][-1]
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 2):
        doubled = step(x)
    assert not torch.allclose(plain, doubled)
    torch.testing.assert_close(step(x), plain)


class _Level(enum.Enum):
    LOW = 1


@dataclasses.dataclass
class _Settings:
    scale: float = 1.0


def _told():
    """Text."""


def _hidden():
    """What holds a number that no name in the code leads to: (a function that reads it, one that changes it)."""
    table, error, lock, generator = {"a": 1.0}, ValueError(1.0), threading.Lock(), torch.Generator()
    values, items, count = table.values(), table.items(), threading.Semaphore(5)
    renamed, field = globals, _Settings.__dataclass_fields__["scale"]
    return {
        "values of a dict": (lambda: sum(values), lambda k: table.update(a=k)),
        "items of a dict": (lambda: dict(items)["a"], lambda k: table.update(a=k)),
        "args of an exception": (lambda: error.args[0], lambda k: setattr(error, "args", (k,))),
        "a name": (lambda: len(_told.__name__), lambda k: setattr(_told, "__name__", "a" * int(k))),
        "a docstring": (lambda: len(_told.__doc__), lambda k: setattr(_told, "__doc__", "a" * int(k))),
        "annotations": (lambda: _told.__annotations__.get("k", 0), lambda k: _told.__annotations__.update(k=k)),
        "the environment": (
            lambda: len(os.path.expandvars("$TORCHLAZY_K")), lambda k: os.environ.update(TORCHLAZY_K="a" * int(k)),
        ),
        "a lock": (lambda: float(lock.locked()), lambda k: lock.release() if lock.locked() else lock.acquire()),
        "a semaphore": (lambda: count._value, lambda k: count.acquire()),
        "a seed": (lambda: generator.initial_seed(), lambda k: generator.manual_seed(int(k))),
        "a field": (lambda: dataclasses.fields(_Settings)[0].default, lambda k: setattr(field, "default", k)),
        "a member": (lambda: getattr(_Level(1), "weight", 0.0), lambda k: setattr(_Level.LOW, "weight", k)),
        "other globals": (lambda: renamed()["_SCALE"], lambda k: globals().update(_SCALE=k)),
    }  # fmt: skip


_SCALE = 1.0


@pytest.mark.filterwarnings("ignore:torchlazy.compile:RuntimeWarning")
@pytest.mark.parametrize("case", list(_hidden()))
def test_what_names_do_not_show_is_seen(case):
    read, change = _hidden()[case]
    run = torchlazy.compile(lambda x: x * read(), audit=False)
    x = torch.ones(2)
    for k in range(8):
        if k % 3 == 2:
            change(float(k))
        torch.testing.assert_close(run(x), x * read())


def test_what_words_a_failing_assert_is_nothing_that_a_call_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest rewrites asserts; their messages lead to all of pytest's state, and here to `eval`."""
    monkeypatch.setattr(rewrite, "_saferepr", lambda value: eval("str")(value))

    def call(x: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 1
        return x * 2 + 1

    run = torchlazy.compile(call, audit=False)
    for turn in range(4):
        assert run(torch.full((3,), float(turn))).tolist() == [2.0 * turn + 1] * 3
    assert run.report().replays >= 2 and not run.report().reasons, run.report()


class _Table(dict[str, float]):
    """Its own methods are not what it holds, as those of tables that load modules when they are asked."""

    def _refuse(self, *args: Any) -> Any:
        raise AssertionError("discovery runs the user's code")

    values = items = keys = get = __len__ = __iter__ = __contains__ = _refuse  # type: ignore[assignment]


class _Ordered(collections.OrderedDict[str, float]):
    values = items = keys = get = __len__ = __iter__ = __contains__ = _Table._refuse  # type: ignore[assignment]


class _Row(list[float]):
    __len__ = __iter__ = __contains__ = _Table._refuse  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [_Table, _Ordered, _Row])
def test_methods_of_the_users_containers_are_not_run(kind: Any) -> None:
    place: Any = 1 if kind is _Row else "b"
    held = kind([1.0, 2.0] if kind is _Row else {"a": 1.0, "b": 2.0})
    call = torchlazy.compile(lambda x: x * held[place], audit=False)
    x = torch.ones(2)
    for _ in range(4):
        assert call(x).tolist() == [2, 2]
    held[place] = 5.0
    assert call(x).tolist() == [5, 5]
    assert call.report().replays >= 1, call.report()


def test_what_is_held_by_weak_references_alone_may_die() -> None:
    held = [Holder()]
    weak, table, proxy = weakref.ref(held[0]), weakref.WeakSet(held), weakref.proxy(held[0])
    calls = (
        lambda x: x * (2 if weak() is None else 3),
        lambda x: x * (2 + len(table)),
        lambda x: x * (2 if hasattr(proxy, "held") else 3),
    )
    compiled = [torchlazy.compile(call, audit=False) for call in calls]
    x = torch.ones(2)
    for _ in range(4):
        assert [call(x).tolist() for call in compiled] == [[3, 3], [3, 3], [3, 3]]
    held.clear()
    assert weak() is None
    assert [call(x).tolist() for call in compiled[:2]] == [[2, 2], [2, 2]]
    with pytest.raises(ReferenceError):
        compiled[2](x)


def test_a_proxy_of_what_is_gone_raises_where_the_program_asks_it() -> None:
    held = [Holder()]
    proxy = weakref.proxy(held[0])

    def call(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * (2 if hasattr(proxy, "held") else 3)
        except ReferenceError:
            return x * 5

    compiled = torchlazy.compile(call, audit=False)
    assert [compiled(torch.ones(1)).item() for _ in range(4)] == [3, 3, 3, 3]
    held.clear()
    assert [compiled(torch.ones(1)).item() for _ in range(4)] == [5, 5, 5, 5]

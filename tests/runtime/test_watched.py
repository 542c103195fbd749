"""Watched dicts and functions: what is told, to whom, and what is looked at then.

Invariant: where the interpreter tells of changes, each change here is noticed by a check that holds again once it is
undone. How changes are counted is tried on any interpreter, with a watcher whom the test tells.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torchlazy.runtime.native import identity_check, watched
from torchlazy.runtime.native.identity_check import IdentityCheck, is_available
from torchlazy.runtime.native.object_layout import word_at
from torchlazy.runtime.native.watched import WatchedObjects, Watcher

from tests.runtime.undone_changes import Steps, seen

pytestmark = pytest.mark.skipif(not is_available(), reason="no C++ compiler here")
needs_watcher = pytest.mark.skipif(
    not is_available() or identity_check.watcher() is None, reason="this interpreter tells nobody of changes"
)


class Told:
    """A watcher whom nobody but the test tells."""

    def __init__(self) -> None:
        place = identity_check._native() + 8 * identity_check._METHOD_WORDS
        words = [word_at(place + 8 * number) for number in range(watched._FUNCTIONS)]
        self.now: set[int] = set()
        self.watcher: Watcher = watched.watcher_with(
            words,
            lambda value: self.now.add(id(value)),
            lambda value: self.now.remove(id(value)),
            of_functions=False,
        )

    def tell(self, value: Any) -> None:
        self.watcher.dict_changes(0, id(value), 0, 0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    found = Told()
    monkeypatch.setattr(identity_check, "watcher", lambda: found.watcher)
    yield found
    gc.collect()
    assert not found.now


def test_a_watched_dict_is_looked_at_when_its_change_was_told(told: Told) -> None:
    tables: list[dict[str, Any]] = [{"a": object()} for _ in range(3)]
    check = IdentityCheck()
    for table in tables:
        check.values(table, list(table.values()))
        check.size(table, 1)
    assert check.holds() and told.now == set(map(id, tables))
    tables[1]["b"] = 1
    assert check.holds()  # nobody told
    told.tell(tables[2])
    assert check.holds()  # and only the one of which it was told is looked at
    told.tell(tables[1])
    for _ in range(3):
        assert not check.holds()
    del tables[1]["b"]
    assert check.holds()  # the version was not kept, and is looked at until it holds
    tables[1]["b"] = 1
    assert check.holds()


def test_each_check_is_told(told: Told) -> None:
    """Also those that share a group, and those whose like was let go."""
    shared: dict[str, int] = {"a": 1}
    checks = []
    for number in range(150):
        own = {"n": number}
        check = IdentityCheck()
        check.size(shared, 1)
        check.size(own, 1)
        assert check.holds()
        checks.append((check, own))
    del checks[::3]
    gc.collect()
    told.tell(shared)
    shared["b"] = 2
    assert not any(check.holds() for check, _ in checks)
    del shared["b"]
    assert all(check.holds() for check, _ in checks)
    check, own = checks[7]
    own["m"] = 1
    told.tell(own)
    assert [check.holds() for check, _ in checks] == [number != 7 for number in range(len(checks))]


def test_what_changes_often_is_looked_at_by_its_version(told: Told) -> None:
    """It makes nobody look at all the others, and its changes are noticed as ever."""
    often: dict[str, Any] = {"kept": 1, "count": 0}
    seldom: dict[str, Any] = {"kept": 1}
    check, other = IdentityCheck(), IdentityCheck()
    for made in (check, other):
        made.entries(often, {"kept": often["kept"]})
    check.entries(seldom, {"kept": seldom["kept"]})
    assert check.holds() and other.holds()
    for number in range(200):
        told.tell(often)
        often["count"] = number
        assert check.holds(), number
    assert other.holds()
    seldom["kept"] = 2  # nobody tells of it
    for change in (2, 3):
        told.tell(often)
        often["kept"] = change
        assert not check.holds() and not other.holds()
        assert not check.holds() and not other.holds()
        told.tell(often)
        often["kept"] = 1
        assert check.holds() and other.holds()
    late = IdentityCheck()
    late.size(often, 2)
    assert late.holds()
    told.tell(often)
    often["new"] = 1
    assert not late.holds() and check.holds()
    told.tell(seldom)
    assert not check.holds()


def test_thousands_of_objects_that_come_and_go(told: Told) -> None:
    """Each record is found by its object's address, whichever others came and went before it."""
    choose = random.Random(0)
    objects = [{"n": number} for number in range(3000)]
    live: dict[int, tuple[WatchedObjects, dict[str, int]]] = {}
    for _ in range(6000):
        number = choose.randrange(len(objects))
        if number in live:
            live.pop(number)[0].end()
        else:
            live[number] = WatchedObjects(told.watcher, [objects[number]]), objects[number]
    assert len(live) > 1000 and len(told.now) == len(live)
    for number, table in enumerate(objects):
        before = {key: word_at(found.versions[0]) for key, (found, _) in itertools.islice(live.items(), 20)}
        own = word_at(live[number][0].versions[0]) if number in live else 0
        told.tell(table)
        if number in live:
            assert word_at(live[number][0].versions[0]) == own + 1
        others = {key: word for key, word in before.items() if key != number}
        assert {key: word_at(live[key][0].versions[0]) for key in others} == others
    for found, _ in live.values():
        found.end()


def test_after_its_end_nothing_holds(told: Told) -> None:
    table = {"a": 1}
    check = IdentityCheck()
    check.size(table, 1)
    holds = check.complete()
    assert holds()
    watching = next(found for found in gc.get_objects() if type(found) is WatchedObjects and found._objects == [table])
    watching.end()
    assert not holds() and not told.now
    watching.end()


def test_where_no_watcher_is_free() -> None:
    class Full:
        def __call__(self, function: int) -> int:
            raise RuntimeError("no more dict watcher IDs available")

    assert watched._registered(Full(), 0) is None


def test_a_watcher_that_misses_a_change_is_not_used(told: Told) -> None:
    assert not watched._reports_each_change(told.watcher)


class Thing:
    def __init__(self) -> None:
        self.first, self.second = 1, 2


class Derived(Thing):
    """Whose objects have more attributes than fit beside them."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(60):
            setattr(self, f"attribute_{number}", number)


def attribute(owner: Any, name: str, now: Any) -> Steps:
    then = getattr(owner, name)
    return lambda: setattr(owner, name, now), lambda: setattr(owner, name, then)


@needs_watcher
@pytest.mark.parametrize("kind", [Thing, Derived])
@pytest.mark.parametrize("by", ["attribute", "dict", "vars", "object"])
def test_stores_to_attributes_are_told(kind: type, by: str) -> None:
    """Also those that the interpreter has found shorter ways for, and whichever object of the class was used before."""
    store: dict[str, Callable[[Any, Any], None]] = {
        "attribute": lambda thing, value: setattr(thing, "first", value),
        "dict": lambda thing, value: thing.__dict__.__setitem__("first", value),
        "vars": lambda thing, value: vars(thing).update(first=value),
        "object": lambda thing, value: object.__setattr__(thing, "first", value),
    }

    def directly(thing: Any, value: Any) -> None:
        thing.first = value

    use = directly if by == "attribute" else store[by]
    for _ in range(100):  # nobody has asked for the dicts of these
        use(kind(), 5)
    thing: Any = kind()
    check = IdentityCheck()
    value = thing.first
    check.entries(thing.__dict__, {"first": value})
    for number in range(150):
        assert check.holds()
        use(thing, object())
        assert not check.holds(), number
        use(thing, value)
    del thing.first
    assert not check.holds()


@needs_watcher
def test_each_way_of_changing_a_dict_is_told() -> None:
    value = object()
    plain: dict[str, Any] = {"a": value}
    ordered: OrderedDict[str, Any] = OrderedDict(a=value)
    missing: defaultdict[str, Any] = defaultdict(list, a=value)
    module, thing, kind = types.ModuleType("probe"), Thing(), type("Probe", (), {"name": value})
    exec("", module.__dict__)  # gives it builtins
    module.a = value  # type: ignore[attr-defined]
    of_class = next(found for found in gc.get_referents(kind) if type(found) is dict)
    empty: dict[str, Any] = {}
    check = IdentityCheck()
    for table in (plain, ordered, missing, module.__dict__):
        check.entries(table, {"a": table["a"]})
        check.size(table, len(table))
    check.entries(of_class, {"name": value})
    check.size(empty, 0)
    check.values(thing.__dict__, list(thing.__dict__.values()))
    code = compile("global a\na = 1", "probe", "exec")

    def emptied() -> Steps:
        kept = dict(plain)
        return plain.clear, lambda: plain.update(kept)

    def merged() -> None:
        empty.__ior__({"a": 1, "b": 2})

    seen(
        check,
        [
            (lambda: plain.update(a=1), lambda: plain.update(a=value)),
            (lambda: plain.setdefault("b", 1), lambda: plain.pop("b")),
            (lambda: plain.popitem(), lambda: plain.setdefault("a", value)),
            (lambda: plain.__delitem__("a"), lambda: plain.__setitem__("a", value)),
            emptied(),
            (lambda: plain.__init__(b=1), lambda: plain.pop("b")),  # type: ignore[misc]
            (lambda: ordered.__setitem__("b", 1), lambda: ordered.popitem()),
            (lambda: ordered.pop("a"), lambda: ordered.setdefault("a", value)),
            (ordered.clear, lambda: ordered.update(a=value)),
            (lambda: missing["new"], lambda: missing.pop("new")),
            (lambda: exec(code, module.__dict__), lambda: setattr(module, "a", value)),
            (lambda: delattr(module, "a"), lambda: setattr(module, "a", value)),
            attribute(kind, "name", 1),
            (lambda: delattr(kind, "name"), lambda: setattr(kind, "name", value)),
            (merged, empty.clear),
            (lambda: empty.update(plain), empty.clear),
            (lambda: setattr(thing, "late", 1), lambda: delattr(thing, "late")),
        ],
    )


@needs_watcher
def test_parts_of_functions_are_told() -> None:
    def function(first: Any = (1,), *, second: Any = None) -> Any:
        return first, second

    def other(first: Any = (1,), *, second: Any = None) -> Any:
        return second, first

    check = IdentityCheck()
    check.function(function)
    seen(
        check,
        [
            attribute(function, "__code__", other.__code__),
            attribute(function, "__defaults__", ([1],)),
            attribute(function, "__defaults__", None),
            attribute(function, "__kwdefaults__", {"second": 1}),
        ],
    )


@needs_watcher
def test_a_dict_that_outlives_its_object_is_still_told() -> None:
    """An object that dies leaves its attributes to the dict, which may have shared them until then."""
    thing = Thing()
    own = thing.__dict__
    value = own["first"]
    check = IdentityCheck()
    check.entries(own, {"first": value})
    assert check.holds()
    del thing
    gc.collect()
    assert check.holds()
    own["first"] = object()
    assert not check.holds()
    own["first"] = value
    assert check.holds()


@needs_watcher
def test_a_change_by_code_that_runs_while_a_value_dies_is_told() -> None:
    """What a value that was replaced does on its way out is seen as well."""
    table: dict[str, Any] = {"a": 1, "b": 2}

    class Last:
        def __del__(self) -> None:
            table["b"] = 3

    check = IdentityCheck()
    check.entries(table, {"b": 2})
    table["a"] = Last()
    assert check.holds()
    table["a"] = 1
    assert table["b"] == 3 and not check.holds()


@needs_watcher
def test_changes_of_several_threads_are_told() -> None:
    tables: list[dict[str, Any]] = [{"kept": number, "count": 0} for number in range(4)]
    check = IdentityCheck()
    for table in tables:
        check.entries(table, {"kept": table["kept"]})

    def work(table: dict[str, Any]) -> None:
        for number in range(2000):
            table["count"] = number

    threads = [threading.Thread(target=work, args=(table,)) for table in tables]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert check.holds()
    for table in tables:
        before = table["kept"]
        other = threading.Thread(target=table.update, kwargs={"kept": "another"})
        other.start()
        other.join()
        assert not check.holds()
        table["kept"] = before
        assert check.holds()


@needs_watcher
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not copied here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_copied_process_is_told_of_its_own_changes() -> None:
    table: dict[str, Any] = {"a": 1}
    check = IdentityCheck()
    check.entries(table, {"a": table["a"]})
    assert check.holds()
    child = os.fork()
    if not child:
        table["a"] = 2
        os._exit(0 if not check.holds() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert check.holds()

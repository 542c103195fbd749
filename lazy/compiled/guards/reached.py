"""What discovery reached, as data: places and their values, tensors, containers, and slots that calls replace.

A slot is a place of the state whose value calls replace (`self.hidden = h`, a cache in a dict, a list of last losses).
A captured call treats it like an argument: its facts matter, not its identity, and a replay reads the current value and
stores the next one. The base class of discovery has what is still to be visited, and records places with names.

Invariant: a slot holds tensors and plain values only, in torch's own containers; anything else is visited and guarded
as usual. A place always reads the current values; nothing in here is a copy of the user's state. Each object is visited
once, by the first path that leads to it.
"""

from __future__ import annotations

import abc
import copy
import functools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchlazy.lazy.compiled.guards.bare_containers import BareItems, base_of
from torchlazy.lazy.compiled.guards.code import NamesAskedFor
from torchlazy.lazy.numbers.questions import plain_size
from torchlazy.lazy.numbers.tracked import node_of, plain_number
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import flatten_tree, unflatten_tree

_TENSORS = frozenset({torch.Tensor, LazyTensor})  # in a slot none may be a leaf that needs a gradient
PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
_LEAVES = _TENSORS | PLAIN
_REFILLED = (list, deque, dict)
_LEAF = flatten_tree(0)[1]
_UNREADABLE = (LookupError, AttributeError, ValueError, TypeError, RuntimeError)


@dataclass(frozen=True, eq=False)
class StateSlot:
    """A named place and how its value is read and replaced. `write` is None where it can only be read. `holder`: a
    container that stays the same object, where the slot is its contents."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None] | None
    holder: Any = None

    def held(self) -> Any:
        """The value; a copy where it is the contents of a container."""
        return self.read() if self.holder is None else copy.copy(self.holder)

    def can_refill(self) -> bool:
        """Whether it is a place that holds a container, which may stay the same object."""
        return self.holder is None and self.write is not None and isinstance(self.read(), _REFILLED)

    def refill(self, value: Any) -> None:
        """Let the current container hold what `value` holds."""
        refill(self.read(), value)


def is_simple(value: Any) -> bool:
    """Whether a slot may hold it."""
    if type(value) in _LEAVES:
        return _is_simple_leaf(value)
    return has_plain_keys(value) and all(map(_is_simple_leaf, flatten_tree(value)[0]))


def _is_simple_leaf(leaf: Any) -> bool:
    if type(leaf) in _TENSORS:
        return not leaf.requires_grad or leaf.grad_fn is not None
    return type(plain_size(leaf)) in PLAIN or node_of(leaf) is not None


def has_plain_keys(value: Any) -> bool:
    """Whether no dict in the value has keys (tensors, modules) that are not plain values."""
    if isinstance(value, dict):
        return all(map(is_plain_key, BareItems(value))) and all(map(has_plain_keys, base_of(value).values(value)))
    return not isinstance(value, (list, tuple, deque)) or all(map(has_plain_keys, BareItems(value)))


def is_plain_key(key: Any) -> bool:
    """Whether it is a plain value, whose text runs no code of the user's and reads no tensor."""
    return type(key) in PLAIN or (type(key) in (tuple, frozenset) and all(map(is_plain_key, key)))


def is_replaceable(then: Any, now: Any) -> bool:
    """Whether a place that held `then` and now holds `now` looks like one whose value calls replace."""
    if type(now) in _TENSORS:
        return (type(then) in _TENSORS or then is None) and is_simple(now)
    if not isinstance(now, (tuple, list, dict, deque)) or not isinstance(then, (tuple, list, dict, deque)):
        return False
    return is_simple(now) and is_simple(then)


def content_slot(container: Any, name: str) -> StateSlot:
    """A slot for the contents of a list, deque or dict, which stays the same object."""
    return StateSlot(name, lambda: container, lambda value: refill(container, value), holder=container)


def refill(container: Any, value: Any) -> None:
    """Let the container hold what `value`, one of its kind, holds."""
    if value is container:
        return
    container.clear()
    if isinstance(container, dict):
        container.update(value)
    else:
        container.extend(value)


def copy_of(container: Any) -> Any:
    """The current contents of a container, to compare with later."""
    return list(base_of(container).items(container) if isinstance(container, dict) else BareItems(container))


class StateSlots:
    """The slots of one captured call, with what they held when it began."""

    def __init__(self, slots: Sequence[StateSlot]) -> None:
        self.slots = tuple(slots)
        flat = [_flat(slot.read()) for slot in slots]
        self.leaves: tuple[Any, ...] = tuple(leaf for leaves, _ in flat for leaf in leaves)
        self.names: tuple[str, ...] = tuple(
            f"{slot.name} #{number}" for slot, (leaves, _) in zip(slots, flat, strict=True)
            for number in range(len(leaves))
        )  # fmt: skip
        self._specs = [spec for _, spec in flat]
        self._forms = [(len(leaves), spec) for leaves, spec in flat]
        self._readers = [slot.read for slot in slots]

    def now(self) -> list[Any] | None:
        """What the slots hold now, flat; None where it has another structure."""
        found: list[Any] = []
        for read, spec in zip(self._readers, self._specs, strict=True):
            try:
                value = read()
            except _UNREADABLE:
                return None
            if type(value) in _LEAVES:
                if spec is not _LEAF:
                    return None
                found.append(value)
                continue
            leaves, structure = flatten_tree(value)
            if structure != spec:
                return None
            found += leaves
        return found

    def give_back(self, filled: Sequence[Any]) -> None:
        """Store plain numbers where the slots still hold just the leaves that they were filled with. What a call put
        elsewhere stays a tracked number, and what a changed slot holds beside it."""
        rest = list(zip(filled, self.leaves, strict=True))
        for slot, (count, spec) in zip(self.slots, self._forms, strict=True):
            own, rest = rest[:count], rest[count:]
            if all(traced is number for traced, number in own):
                continue
            now, structure = _flat(slot.read())
            if structure == spec and all(a is b for a, (b, _) in zip(now, own, strict=True)):
                _write(slot, unflatten_tree([number for _, number in own], spec))

    def fill(self, leaves: Sequence[Any]) -> None:
        """Store these leaves, flat, in slots of the structure that they had when the call began."""
        rest = list(leaves)
        for slot, spec in zip(self.slots, self._specs, strict=True):
            then = _flat(slot.read())[0]
            fresh, rest = rest[: len(then)], rest[len(then) :]
            if any(a is not b for a, b in zip(then, fresh, strict=True)):
                _write(slot, unflatten_tree(fresh, spec))

    def stored(self, filled: Sequence[Any]) -> set[str]:
        """The names of the slots that hold something else than the varying numbers that they were filled with."""
        found: set[str] = set()
        rest = list(zip(filled, self.leaves, strict=True))
        for slot, (count, spec) in zip(self.slots, self._forms, strict=True):
            own, rest = rest[:count], rest[count:]
            if all(traced is number for traced, number in own):
                continue
            now, structure = _flat(slot.read())
            if structure != spec or any(a is not b for a, (b, number) in zip(now, own, strict=True) if b is not number):
                found.add(slot.name)
        return found

    def forget(self) -> None:
        """Release what the slots held when the call began."""
        self.leaves = ()


def _write(slot: StateSlot, fresh: Any) -> None:
    if slot.write is None:
        return
    value = slot.read()
    if isinstance(value, _REFILLED):  # the container may be referenced elsewhere
        refill(value, fresh)
    else:
        slot.write(fresh)


def _flat(value: Any) -> tuple[list[Any], Any]:
    return ([value], _LEAF) if type(value) in _LEAVES else flatten_tree(value)


def without_traced(value: Any) -> Any:
    """The value with plain numbers in place of tracked ones."""
    if node_of(value) is not None:
        return plain_number(value)
    if type(value) in (list, tuple, dict, deque, OrderedDict, defaultdict):
        leaves, spec = flatten_tree(value)
        if any(node_of(leaf) is not None for leaf in leaves):
            return unflatten_tree([plain_number(leaf) for leaf in leaves], spec)
    return value


@dataclass(frozen=True, eq=False)
class GuardedPlace:
    """Where some values are: `read()` gives the current ones, `names` are their names in messages.

    For fast reads: `live` is an iterable over the current values (a list, a dictionary's view); else they are entries
    of the dict `of` under `keys`, `attributes` of the object `of`, or the contents of `cells`.
    """

    owner: Any
    read: Callable[[], Iterable[Any]]
    names: tuple[str, ...]
    store: Callable[[int, Any], None] | None = None
    live: Iterable[Any] | None = None
    of: Any = None
    keys: tuple[Any, ...] = ()
    attributes: tuple[str, ...] = ()
    cells: tuple[types.CellType, ...] = ()
    absent: tuple[dict[str, Any], tuple[str, ...]] | None = None  # the one value: that the dict has none of the names

    def values(self) -> list[Any]:
        """The current values, one for each name. Raises NotYet where there are more or fewer of them now."""
        found = list(self.read())
        if len(found) != len(self.names):
            raise NotYet(f"something else changes {self.names[0].rpartition('[')[0] or self.names[0]} meanwhile")
        return found

    def read_one(self, position: int) -> Any:
        """The current value at a position; raises LookupError, AttributeError or ValueError where there is none."""
        if self.keys:
            return self.of[self.keys[position]]
        if self.attributes:
            return getattr(self.of, self.attributes[position])
        return list(self.read())[position]


@dataclass(eq=False)
class Reached:
    """What discovery found. `tensors` and `optimizers` are listed once each, with the first path to them."""

    places: list[GuardedPlace] = field(default_factory=list)
    fixtures: list[GuardedPlace] = field(default_factory=list)  # places that calls do not change: a library's functions
    classes: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # classes with instances
    views: list[tuple[Any, tuple[str, ...]]] = field(default_factory=list)
    tensors: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    optimizers: list[tuple[torch.optim.Optimizer, str]] = field(default_factory=list)
    slots: list[StateSlot] = field(default_factory=list)
    containers: list[tuple[Any, str]] = field(default_factory=list)  # lists, deques and dicts
    attributes: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # of modules and plain objects
    instances: list[tuple[Any, str]] = field(default_factory=list)  # modules and plain objects, for their classes
    codes: list[types.CodeType] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)  # whose code these are
    arrays: list[tuple[Any, str]] = field(default_factory=list)  # NumPy arrays and other memory of plain bytes
    unrepeatable: list[str] = field(default_factory=list)  # why a call that reads something must run its Python
    generators: list[tuple[Callable[[], Any], str]] = field(default_factory=list)  # random generators, not torch's
    sized: list[tuple[Any, str]] = field(default_factory=list)
    appended: list[tuple[list[Any], str]] = field(default_factory=list)  # lists that calls only append to
    caches: list[tuple[Any, str]] = field(default_factory=list)  # functions that keep their results
    empty_hooks: list[Any] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)  # keeps objects alive whose identities are used
    assumed: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())  # slots, and lists only appended to


def stored_in(places: Iterable[GuardedPlace], name: str) -> tuple[GuardedPlace, int] | None:
    """The place and position of a named value."""
    for place in places:
        if name in place.names:
            return place, place.names.index(name)
    return None


_MAX_PLACES = 50_000


class TooMuch(Exception):
    """More state than guards can check in reasonable time."""


class NotYet(TooMuch):
    """The first call reaches something that is not made yet; the next one may be captured."""


class _Gone:
    def __repr__(self) -> str:
        return "nothing (it was deleted)"


GONE = _Gone()


class DiscoveryBase:
    """Base class of discovery: what was found so far, and what is still to be visited."""

    def __init__(self, slots: frozenset[str], appended: frozenset[str]) -> None:
        self.reached = Reached()
        self.slots, self.appended = slots, appended
        self.seen: set[int] = set()
        self.pending: list[tuple[Any, str, int, bool]] = []
        self.count = 0
        self.names = NamesAskedFor()
        self.abstract: dict[type, None] = {}  # classes that others may be registered with

    def visit(self, value: Any, path: str, depth: int, *, rooted: bool, runs: bool = True) -> None:
        """`rooted`: found from the callable, its closure or its arguments; else by a global name, and visited less
        deeply. `runs`: if it is code, the call may run it."""
        if value is None or type(value) in _ATOMS:
            return
        if runs and isinstance(value, (types.FunctionType, type)):
            self.names.runs(value)
        if isinstance(value, abc.ABCMeta):
            self.abstract[value] = None
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        self.reached.keep.append(value)
        self.pending.append((value, path, depth, rooted))

    def place(
        self,
        owner: Any,
        read: Callable[[], Iterable[Any]],
        names: Iterable[str],
        depth: int,
        rooted: bool,
        store: Callable[[int, Any], None] | None = None,
        *,
        live: Iterable[Any] | None = None,
        of: Any = None,
        keys: Iterable[Any] = (),
        attributes: Iterable[str] = (),
        cells: Iterable[types.CellType] = (),
        runs: bool = True,
    ) -> None:
        """A place that the call may read, and change where `store` is given. Raises TooMuch."""
        names = tuple(names)
        self._count(names)
        found = GuardedPlace(owner, read, names, store, live, of, tuple(keys), tuple(attributes), tuple(cells))
        self.reached.places.append(found)
        for position, (name, value) in enumerate(zip(names, found.values(), strict=True)):
            if name in self.slots and not name.startswith("key ") and is_simple(value):
                self.reached.slots.append(_slot(found, position))
            else:
                self.visit(value, name, depth, rooted=rooted, runs=runs)

    def fixture(self, space: dict[str, Any], names: Iterable[tuple[str, str]]) -> None:
        """Entries of a dict that the call may read and is not expected to change, each with its name in messages. Only
        their identity is guarded, not their contents."""
        found = list(names)
        if found:
            self._count([name for _, name in found])
            keys = [key for key, _ in found]
            told = tuple(name for _, name in found)
            self.reached.fixtures.append(GuardedPlace(space, getter(space, keys), told, of=space, keys=tuple(keys)))

    def _count(self, names: Iterable[str]) -> None:
        names = list(names)
        self.count += len(names)
        if self.count > _MAX_PLACES:
            raise TooMuch(f"more than {_MAX_PLACES} values to guard, the last ones at {names[0]}")


def _slot(place: GuardedPlace, position: int) -> StateSlot:
    """The slot that one of the place's values is in."""
    store = place.store
    read = functools.partial(place.read_one, position)
    write = None if store is None else lambda value: store(position, value)
    return StateSlot(place.names[position], read, write)


_ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, slice, types.CodeType}
)


def getter(space: Any, names: list[str]) -> Callable[[], Iterable[Any]]:
    """Reads the named entries of a mapping as they are now; GONE where there is none."""
    if type(space) not in (dict, OrderedDict) and isinstance(space, dict):
        read_one = base_of(space).get  # a subclass may have a `get` of its own
        return lambda: tuple(read_one(space, name, GONE) for name in names)
    if len(names) == 1:
        (name,) = names
        return lambda: (space.get(name, GONE),)
    get = operator.itemgetter(*names)

    def read() -> Iterable[Any]:
        try:
            found: tuple[Any, ...] = get(space)
        except KeyError:
            return tuple(space.get(name, GONE) for name in names)
        return found

    return read

"""Paths: known traces from cut to cut, with the steps learned on them, which the recorder follows.

A match reuses the entry, the slot and the geometry of last time: nothing is inferred, hashed or made but the new
tensor. The first operator that differs leaves the path, for another known one with the same beginning or for none: what
was followed so far stays recorded, because its entries are the very objects of the path. A cut at the end of a path is
compared with the last one by a few comparisons of lists.

Invariant: while a path is followed, the running trace's entries and geometries are a prefix of the path's, object by
object. A `KnownCut` matches only where a new `CutTrace` would be equal to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torchlazy.lazy.trace.geometry import Geometry, base_of
from torchlazy.lazy.trace.op_schema import OpPlan
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import Complex, CutTrace, Entry, Float, ScalarSlot, Slot, slots_in


class KnownCut:
    """A trace as it was cut, decomposed into lists."""

    __slots__ = ("_bases", "_given", "_given_bases", "_given_slots", "_slots", "_taken_over", "trace")

    def __init__(self, trace: CutTrace) -> None:
        self.trace = trace
        self._slots = [slot for slot, _ in trace.outputs]
        self._bases = [base for _, base in trace.outputs]
        self._given_slots = [slot for slot, _ in trace.inputs]
        self._given_bases = [base for _, base in trace.inputs]
        self._given = _items([position for _, position in trace.donations])
        self._taken_over = _items([output for output, _ in trace.donations])

    def matches(
        self,
        live: Sequence[LazyStorage],
        inputs: Sequence[tuple[Slot, LazyStorage]],
        scalars: Sequence[Any],
        values: int,
    ) -> bool:
        """Whether a cut of the same entries, with so many values, gives this trace again."""
        trace = self.trace
        given = [storage for _, storage in inputs]
        return (
            values == len(trace.geometries)
            and tuple(map(type, scalars)) == trace.scalar_kinds
            and [storage.slot for storage in live] == self._slots
            and [slot for slot, _ in inputs] == self._given_slots
            and [storage.base for storage in live] == self._bases
            and [storage.base for storage in given] == self._given_bases
            # As many inputs are written, and so among the live storages, as before.
            and [storage.dirty for storage in given].count(True) == len(trace.donations)
            and self._taken_over(live) == self._given(given)
        )


def _items(places: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """A function that gives the items at these places of a sequence, for comparison."""
    return itemgetter(*places) if places else lambda _: ()


_KEPT_PATHS = 32


# What a step makes: a tensor, several, a view of the first argument, several; or what it writes: that one, a list.
NEW, NEW_MANY, VIEW, VIEW_MANY, WRITE, WRITE_LIST = range(6)


class Unread:
    """Stands in a step for a tensor whose value the call does not read; `geometry` is what it must have, None: any."""

    __slots__ = ("geometry",)

    def __init__(self, geometry: Geometry | None) -> None:
        self.geometry = geometry


class CallScalar(NamedTuple):
    """A number that is an input of the program: a seed drawn for the call, or `value`, shared by its `place`."""

    slot: ScalarSlot
    place: tuple[Any, str] | None  # None: a seed
    value: float


class ArgumentWrite(NamedTuple):
    """A tensor that a call writes to: the argument at `position`, or (not -1) that `item` of this list.

    Its slot is then `value`, that of its memory `whole`. For a view, `window` is its geometry, `base` that of its
    memory, and `before` its memory's slot before; else they are None, and `value` is `whole`. `alike`: the positions of
    other arguments that are the same view (`x[1] += y` copies it to itself).
    """

    position: int
    item: int
    value: Slot
    whole: Slot
    window: Geometry | None = None
    base: Geometry | None = None
    before: Slot | None = None
    alike: tuple[int, ...] = ()

    def target(self, args: Sequence[Any]) -> Any:
        """The tensor, among the arguments of a call."""
        given = args[self.position]
        return given if self.item < 0 else given[self.item]


class ViewRead(NamedTuple):
    """A view that the trace had not read yet: the argument at `position`, or (not -1) that `item` of this list.

    `value` is read from its memory, whose slot is `whole`, and which becomes an input of the trace here if it `enters`.
    """

    position: int
    item: int
    value: Slot
    whole: Slot
    window: Geometry
    base: Geometry
    enters: bool


class PathPlace:
    """A place on a path. `record` is what the native step from here compares with (record/follow/native.py).

    `idle` are such records of calls seen here that record nothing: views that are equal to their source.
    """

    __slots__ = ("idle", "record")

    record: tuple[Any, ...] | None
    idle: tuple[tuple[Any, ...], ...] | None


class PathStep(PathPlace):
    """One call of a path with all that following needs there: what to expect, and its results and effects.

    `op` is the operator as the program calls it, where the entry has the functional form. `results` has the structure
    of `outputs`; `source` is the geometry that the first argument must have where the step depends on its memory.
    After the step the trace is at `position` of its path, with `end` values. `following` is what torch calls for the
    next operator while the trace is here: the compiled step to the next place, or the general way. `compute` is the
    device behind "lazy" where an argument names that.

    A composite call has several `entries`, writes to several arguments or to views, or has further results
    (record/follow/learn.py, record/follow/learn_writes.py): `args` and `named` are its arguments, `numbers` the scalars
    that it needs, `writes` the slots of its arguments afterwards, in the order of the arguments, `reads` the views that
    are read from their memory first (which only native steps follow).
    """

    __slots__ = (
        "args", "base", "compute", "end", "entries", "entry", "flat", "following", "is_whole", "kind", "making",
        "named", "number", "numbers", "op", "outputs", "plan", "position", "reads", "results", "source", "writes",
    )  # fmt: skip

    def __init__(
        self, kind: int, plan: OpPlan, entry: Entry, results: Any, flat: list[Geometry], source: Geometry | None,
        position: int, following: Any,
    ) -> None:  # fmt: skip
        self.position, self.following, self.record, self.idle = position, following, None, None
        self.kind, self.op, self.plan, self.entry, self.entries = kind, plan.op, plan, entry, [entry]
        self.args, self.outputs = entry.args, entry.outputs
        self.results, self.flat, self.source = results, flat, source
        self.base = base_of(results) if kind == NEW else None
        self.making: tuple[Any, ...] = ()  # the arguments that the tensor is made with
        self.number = slots_in(entry.outputs)[0].number
        self.end = self.number + len(flat)
        self.is_whole = False
        self.numbers: tuple[CallScalar, ...] = ()
        self.writes: tuple[ArgumentWrite, ...] = ()
        self.reads: tuple[ViewRead, ...] = ()
        # Entries name the compute device instead of the one that a call names and its results claim.
        has_device = any(type(value) is torch.device for _, value in entry.kwargs)
        self.compute = flat[0].compute if has_device else None
        self.named = entry.kwargs
        if has_device:
            claimed = flat[0].device
            self.named = tuple([(n, claimed if type(v) is torch.device else v) for n, v in entry.kwargs])


class PathStart(PathPlace):
    """The place before a path's first step, or on no path."""

    __slots__ = ("end", "following", "position")

    def __init__(self, following: Any) -> None:
        self.position, self.end, self.following, self.record, self.idle = -1, 0, following, None, None


class Path:
    """A trace from cut to cut as it was recorded once. `successor` is the path that came after it last time.

    `steps` is filled while the path is followed for the first time (record/follow/follower.py), by the position of
    each step's first entry; None after the last. `places` are the same steps by the position of their last. `cut` is
    the trace as it was cut last time, with its inputs and outputs.
    """

    __slots__ = ("cut", "entries", "geometries", "places", "reads", "start", "steps", "successor")

    def __init__(self, entries: list[Entry], geometries: list[Geometry]) -> None:
        self.entries = entries
        self.geometries = geometries
        self.steps: list[PathStep | None] = [None] * (len(entries) + 1)
        self.places: list[PathStep | None] = [None] * len(entries)
        self.start: PathStart | None = None  # where compiled steps begin, once the first step is known
        self.successor: Path | None = None
        self.cut: KnownCut | None = None
        self.reads: dict[int, Any] = {}  # by slot: the slices of numbers that were read (record/sliced_read.py)


class Paths:
    """The known paths, the last used first, and a guess which one comes next."""

    def __init__(self) -> None:
        self._known: list[Path] = []
        self._last: Path | None = None

    def __iter__(self) -> Iterator[Path]:
        return iter(self._known)

    def begin(self) -> Path | None:
        """The path to follow from the start of a new trace."""
        return None if self._last is None else self._last.successor or self._last

    def finish(self, followed: Path | None, entries: list[Entry], geometries: list[Geometry]) -> None:
        """A trace was cut: remember it, and that it came after the one before."""
        path = followed
        if path is None or len(path.entries) != len(entries):
            path = next((k for k in self._known if k.geometries == geometries and k.entries == entries), None)
            path = path if path is not None else Path(self._shared(entries, geometries), geometries)
        if path in self._known:
            self._known.remove(path)
        self._known.insert(0, path)
        del self._known[_KEPT_PATHS:]
        if self._last is not None:
            self._last.successor = path
        self._last = path

    def with_geometry(self, entries: list[Entry], geometries: list[Geometry]) -> Path | None:
        """A known path that begins with `entries`, the very objects, over values of these geometries."""
        length, values = len(entries), len(geometries)
        for path in self._known:
            if len(path.entries) < length or path.geometries[:values] != geometries:
                continue
            if length == 0 or path.entries[length - 1] is entries[-1]:
                return path
        return None

    def _shared(self, entries: list[Entry], geometries: list[Geometry]) -> list[Entry]:
        """The entries, those of the longest common beginning with a known path being that path's own objects.

        Equal entries are the same only where their results are: 1 and True are equal, and add to two dtypes.
        """
        best: list[Entry] = []
        for path in self._known:
            length = 0
            for mine, theirs in zip(entries, path.entries, strict=False):
                if mine is not theirs and mine != theirs:
                    break
                if any(path.geometries[s.number] is not geometries[s.number] for s in slots_in(mine.outputs)):
                    break
                length += 1
            if length > len(best):
                best = path.entries[:length]
        return [*best, *entries[len(best) :]]

    def alternatives(self, followed: Path, entries: list[Entry], op: object) -> Iterator[Path]:
        """The followed path, then others that begin with `entries`, the very objects; all continue with `op`."""
        length = len(entries)
        for path in (followed, *self._known):
            if len(path.entries) <= length or path.entries[length].op is not op:
                continue
            if path is followed or length == 0 or path.entries[length - 1] is entries[-1]:
                yield path


def same_constants(given: Any, expected: Any) -> bool:
    """Whether an argument without tensors is the constant that the entry holds."""
    if given is expected:
        return True
    kind = type(expected)
    if kind is tuple:
        return isinstance(given, (list, tuple)) and _plain(given) and tuple(given) == expected
    if kind is Float:
        return type(given) is float and given.hex() == expected.bits
    if kind is Complex:
        return type(given) is complex and Complex(given) == expected
    return type(given) is kind and kind is not Slot and given == expected


def are_distinct(args: Sequence[Any]) -> bool:
    """Whether each value of the first argument, a list, occurs there once, and elsewhere at its own position only."""
    if type(args[0]) is not tuple:
        return False
    place = {value: i for i, value in enumerate(args[0])}
    return len(place) == len(args[0]) and all(
        place.get(value, i) == i
        for argument in args[1:]
        for i, value in (enumerate(argument) if type(argument) is tuple else ((-1, argument),))
    )


def _plain(values: Any) -> bool:
    return all(type(value) is int for value in values)

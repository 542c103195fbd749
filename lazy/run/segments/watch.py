"""Detects which cuts belong together, by watching storages: a forward whose values a later cut's backward reads.

Invariant: watching changes nothing and keeps nothing alive. A pair is reported once its forward was followed twice by
the same backward, reading the same values from the same places.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import CutTrace, Entry, Slot, operands, slots_in

if TYPE_CHECKING:
    from torchlazy.lazy.plan.join_traces import Joined

_joining = DeferredModule("torchlazy.lazy.plan.join_traces")  # a first step loads no compiler
LEAST_BYTES = 8 << 20
"""The least total size that must cross for two more programs to be compiled."""
_SOON = 16
_ones_like = torch.ops.aten.ones_like.default
_MOST_WATCHED = 32  # cuts whose backward may still come: one a step in a loop that queries an environment
_MOST_SIGHTINGS = 32
_aten = torch.ops.aten
# Outputs of an operator that do not depend on all of its operands, which the forward itself overwrites: a batch norm in
# training replaces its running statistics (arguments 3 and 4, results 3 and 4) and normalises by others.
_BATCH_NORM = _aten._native_batch_norm_legit_functional.default


class StoragePlaces:
    """Where the memory behind storages stood in a cut: which of its outputs it is, or which of its inputs it was."""

    def __init__(self, given: Sequence[LazyStorage], live: Sequence[LazyStorage]) -> None:
        self._known: dict[int, tuple[weakref.ref[LazyStorage], int, int | None, int | None]] = {}
        for number, storage in enumerate(given):
            self._known[id(storage)] = weakref.ref(storage), storage.version, None, number
        for number, storage in enumerate(live):
            self._known[id(storage)] = weakref.ref(storage), storage.version, number, None

    def of(self, storages: Sequence[LazyStorage], versions: Sequence[int]) -> tuple[Wiring, Wiring]:
        """For each storage that a later trace reads, with its version then, the output and the input that it is; None
        where it is neither, or was written to since."""
        made: list[int | None] = []
        same: list[int | None] = []
        for storage, version in zip(storages, versions, strict=True):
            known = self._known.get(id(storage))
            is_it = known is not None and known[0]() is storage and known[1] == version
            made.append(known[2] if known is not None and is_it else None)
            same.append(known[3] if known is not None and is_it else None)
        return tuple(made), tuple(same)


Wiring = tuple["int | None", ...]


@dataclass(frozen=True, eq=False)
class WatchedCut:
    """A cut that may be a forward. `outputs`: its new storages, by number; `held`: those of ordinary tensors among its
    inputs, which nothing else holds between two cuts; `before`: how many others were waiting for their backward."""

    trace: CutTrace
    places: StoragePlaces
    outputs: dict[int, weakref.ref[LazyStorage]]
    held: tuple[LazyStorage, ...]
    before: int

    @property
    def is_over(self) -> bool:
        """Whether nothing refers to its outputs any more."""
        return all(ref() is None for ref in self.outputs.values())


def watched(trace: CutTrace, given: Sequence[LazyStorage], live: Sequence[LazyStorage], before: int) -> WatchedCut:
    """The record by which a cut is watched."""
    new = {number: weakref.ref(storage) for number, storage in enumerate(live) if is_new(storage)}
    return WatchedCut(
        trace, StoragePlaces(given, live), new, tuple(storage for storage in given if storage.pinned), before
    )


@dataclass(frozen=True)
class Following:
    """A trace that reads what a watched cut made; where its inputs come from."""

    watched: WatchedCut
    made: Wiring
    given: Wiring


@dataclass(frozen=True, eq=False)
class FoundPair:
    """A forward and its backward. `hidden`: outputs that only the backward reads, if anything; `cone`: the inputs
    of the first trace that it takes to compute them, `sources` those of them whose values they depend on; `made`,
    `given`: for each input of the second trace the first one's output, or the input with the same memory."""

    first: CutTrace
    second: CutTrace
    made: Wiring
    given: Wiring
    hidden: frozenset[int]
    cone: frozenset[int]
    sources: frozenset[int]
    joined: Joined


@dataclass(eq=False)
class _Sighting:
    first: CutTrace
    second: CutTrace
    made: Wiring
    given: Wiring
    hidden: frozenset[int]
    is_reported: bool = field(default=False)


class CutWatch:
    """The last cuts, and the pairs seen among them."""

    def __init__(self) -> None:
        self._watched: deque[WatchedCut] = deque(maxlen=_MOST_WATCHED)
        self._sightings: deque[_Sighting] = deque(maxlen=_MOST_SIGHTINGS)

    def may_be_a_forward(
        self, trace: CutTrace, given: Sequence[LazyStorage], live: Sequence[LazyStorage], before: int
    ) -> WatchedCut | None:
        """The cut, if it makes enough new memory and has no backward in it. Call it before the cut is run."""
        if trace.has_backward or trace.output_bytes < LEAST_BYTES or not are_ours(given):
            return None
        if sum(storage.base.nbytes for storage in live if is_new(storage)) < LEAST_BYTES:
            return None
        return watched(trace, given, live, before)

    def watch(self, cut: WatchedCut) -> None:
        """Later cuts may read what this one made."""
        self._watched.append(cut)

    def waiting(self) -> Sequence[WatchedCut]:
        """The cuts that are watched, the last one at the end; drops those that are over."""
        over = [cut for cut in self._watched if cut.is_over]
        for cut in over:
            self._watched.remove(cut)
        return self._watched

    def forget_held(self) -> None:
        """Cuts that ordinary tensors went into are watched no more."""
        for cut in [cut for cut in self._watched if cut.held]:
            self._watched.remove(cut)

    def follows(
        self, trace: CutTrace, given: Sequence[LazyStorage], versions: Sequence[int], continues: bool,
        others: Sequence[WatchedCut] = (),
    ) -> Following | None:  # fmt: skip
        """Whether the trace begins with the backward of a cut that is watched, or of one of the others. `continues`:
        it is a later part of one."""
        if not (self._watched or others) or not (continues or starts_with_backward(trace)):
            return None
        for watched in (*others, *reversed(self._watched)):
            made, same = watched.places.of(given, versions)
            read = {output for output in made if output in watched.outputs}
            if sum(watched.trace.outputs[output][1].nbytes for output in read) >= LEAST_BYTES:
                return Following(watched, made, same)
        return None

    def has_followed(self, found: Following, second: CutTrace) -> FoundPair | None:
        """Call it after the second trace has run and released what it read. The pair, if this is the second time."""
        watched = found.watched
        first = watched.trace
        gone = {output for output, ref in watched.outputs.items() if ref() is None}
        # A single number may be read, and takes no memory.
        hidden = frozenset(output for output in computable(first, gone) if first.outputs[output][1].numel > 1)
        if watched in self._watched:
            self._watched.remove(watched)
        for sighting in self._sightings:
            wiring = sighting.made, sighting.given
            is_alike = wiring == (found.made, found.given) and same_trace(sighting.first, first)
            if is_alike and same_trace(sighting.second, second):
                break
        else:
            self._sightings.append(_Sighting(first, second, found.made, found.given, hidden))
            return None
        sighting.hidden &= hidden
        if sighting.is_reported:
            return None
        pair = pair_of(first, second, found.made, found.given, sighting.hidden)
        sighting.is_reported = pair is not None
        return pair


def pair_of(first: CutTrace, second: CutTrace, made: Wiring, given: Wiring, hidden: frozenset[int]) -> FoundPair | None:
    """The pair with these outputs hidden; None where they are too small, or the traces cannot be joined."""
    if not hidden or sum(first.outputs[output][1].nbytes for output in hidden) < LEAST_BYTES:
        return None
    visible = frozenset(range(len(first.outputs))) - hidden
    joined = _joining.join(first, second, made=made, given=given, visible=visible)
    if joined is None:
        return None
    cone, sources = inputs_of(first, hidden, operands), inputs_of(first, hidden, _read)
    return FoundPair(first, second, made, given, hidden, cone, sources, joined)


def starts_with_backward(trace: CutTrace) -> bool:
    """Whether autograd's engine soon begins: with ones in the shape of the loss, possibly after the loss was assembled
    from many."""
    soon = max(_SOON, len(trace.entries) // _SOON)
    return any(entry.op is _ones_like for entry in trace.entries[:soon])


def is_new(storage: LazyStorage) -> bool:
    """Whether a pending storage, on the lazy device or inside `lazy_mode`, gets its first memory by the next cut."""
    if type(storage) is not LazyStorage or storage.pinned or storage.real is not None:
        return False
    return storage.base.device == LAZY or LazyTensor.recorder.mode_depth > 0


def are_ours(storages: Sequence[LazyStorage]) -> bool:
    """Whether no write to this memory goes unseen: inside `lazy_mode` ordinary tensors are watched, but not memory that
    is also held by something else than tensors."""
    recorder = LazyTensor.recorder
    pinned = [storage for storage in storages if storage.pinned]
    if not pinned:
        return True
    if not recorder.mode_depth or any(storage.base.device == LAZY for storage in pinned):
        return False
    return not recorder.shared or not any(storage in recorder.shared for storage in pinned)


def same_trace(one: CutTrace, other: CutTrace) -> bool:
    """Whether two traces are the same but for the user's lines. Traces of one path share their entries."""
    return one is other or (
        len(one.entries) == len(other.entries)
        and one.inputs == other.inputs
        and one.outputs == other.outputs
        and one.donations == other.donations
        and one.scalar_kinds == other.scalar_kinds
        and one.entries == other.entries
        and one.geometries == other.geometries
    )


def computable(trace: CutTrace, outputs: Iterable[int]) -> set[int]:
    """Those of the outputs that can be computed again after the trace has overwritten what it overwrites."""
    tainted = {trace.inputs[given][0].number for _, given in trace.donations}
    for entry in trace.entries:
        if any(found.number in tainted for found in _read(entry)):
            made = slots_in(entry.outputs)
            tainted |= {found.number for found in made}
        elif entry.op is _BATCH_NORM:
            tainted |= {found.number for found in slots_in(entry.outputs[3:])}
    return {output for output in outputs if trace.outputs[output][0].number not in tainted}


def inputs_of(
    trace: CutTrace, outputs: Iterable[int], read: Callable[[Entry], list[Slot]] = operands
) -> frozenset[int]:
    """The inputs that entries on the way to these outputs read, by number."""
    wanted = {trace.outputs[output][0].number for output in outputs}
    for entry in reversed(trace.entries):
        if any(found.number in wanted for found in slots_in(entry.outputs)):
            wanted |= {found.number for found in read(entry)}
    return frozenset(number for number, (found, _) in enumerate(trace.inputs) if found.number in wanted)


def _read(entry: Entry) -> list[Slot]:
    """The operands that an entry's results depend on, except results listed as independent of some."""
    if entry.op is _BATCH_NORM and entry.args[5] is True:
        return [found for argument in entry.args[:3] for found in slots_in(argument)]
    return operands(entry)

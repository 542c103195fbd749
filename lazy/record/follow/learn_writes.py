"""Calls that write to views, or to more than one list, learned as one step.

A write to a view is two entries: the new value of the view, and that of the memory behind it. So is a write of the
value of a view that the trace has not read: one of them reads it from its memory.

Invariant: a step is learned only where the written tensors are on as many storages, which no other argument refers to,
and where everything that was recorded for the call is in its entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.record.follow.follower import MARGIN
from torchlazy.lazy.record.follow.path import WRITE, WRITE_LIST, ArgumentWrite, PathStep, ViewRead
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.trace.op_schema import OpPlan
from torchlazy.lazy.trace.trace import Entry, Slot, slots_in

if TYPE_CHECKING:
    from torchlazy.lazy.record.recorder import Recorder

_READ = torch.ops.aten.as_strided.default


def written_call(
    rec: Recorder, plan: OpPlan, targets: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> WrittenCall | None:
    """The call before it is recorded; None where no path is followed, or where a step of one entry that writes to its
    first argument describes all of it."""
    if rec.path is None or rec.capture is not None or rec.learning_composite:
        return None
    first = targets[0]
    written = first if type(first) is list else [first]
    call = WrittenCall(rec, plan, args, kwargs)
    is_whole = all(item is None or item._geometry is item._storage_.base for item in written)
    return None if plan.written == (0,) and is_whole and not call.stale else call


class WrittenCall:
    """A call, with the trace and the written tensors as they were before it."""

    def __init__(self, rec: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.rec, self.plan, self.args, self.kwargs, self.epoch = rec, plan, args, kwargs, rec.epoch
        self.entries, self.values, self.inputs = len(rec._entries), len(rec._geometries), len(rec.inputs)
        self.targets: list[tuple[int, int, Any]] = []  # by position, and by item where it is one of a list
        for position in plan.written:
            given = args[position] if position < len(args) else None
            for item, tensor in enumerate(given) if type(given) is list else ((-1, given),):
                self.targets.append((position, item, tensor))
        self.before = [
            (tensor._storage_.version, tensor._storage_.slot if tensor._storage_.epoch == rec.epoch else None)
            for _, _, tensor in self.targets
            if type(tensor) is LazyTensor
        ]
        # Other views whose values the trace does not have, with the slot of their memory if it has that.
        self.stale: list[tuple[int, int, LazyTensor, Slot | None]] = []
        for position, given in enumerate(args):
            if position in plan.written:
                continue
            for item, tensor in enumerate(given) if type(given) is list else ((-1, given),):
                if type(tensor) is LazyTensor and _is_stale(tensor, rec.epoch):
                    storage = tensor._storage_
                    self.stale.append((position, item, tensor, storage.slot if storage.epoch == rec.epoch else None))

    def learn(self, returned: Any) -> None:
        """Leave a step on the followed path, if a step can describe the call."""
        rec, path, position = self.rec, self.rec.path, len(self.rec._entries) - 1
        if path is None or rec.epoch != self.epoch or position >= config.max_trace_length - MARGIN:
            return
        entries = rec._entries[self.entries :]
        if any(mine is not theirs for mine, theirs in zip(entries, path.entries[self.entries :], strict=False)):
            return
        reads, own = self._reads(entries), entries[len(self.stale) :]
        if reads is None or not own or own[0].op is not self.plan.functional:
            return  # a written tensor was read from its memory first
        if returned is not None and (returned is not self.args[0] or type(returned) is not LazyTensor):
            return
        made = [slot.number for entry in own for slot in slots_in(entry.outputs)]
        if not made or made != list(range(made[0], len(rec._geometries))):
            return
        entered = [slot.number for slot, _ in rec.inputs[self.inputs :]]
        before = sorted([*entered, *(read.value.number for read in reads)])
        if entered != sorted(entered) or before != list(range(self.values, made[0])):
            return  # an input was added after a value was made
        writes = self._writes(made[0])
        if writes is None or any(geom.device != LAZY for geom in rec._geometries[made[0] :]):
            return
        kind = WRITE_LIST if returned is None else WRITE
        number = self.values if reads else made[0]
        flat = rec._geometries[number:]
        step = PathStep(kind, self.plan, own[0], (), flat, None, position, rec.general)
        step.is_whole, step.entries, step.outputs, step.writes, step.reads = True, entries, (), writes, reads
        step.number, step.end = number, len(rec._geometries)
        rec.enter_step(path, step)

    def _reads(self, entries: Sequence[Entry]) -> tuple[ViewRead, ...] | None:
        """The views that were read from their memory, each by one of the first entries; None where no step can
        describe that."""
        found = []
        for (position, item, tensor, before), entry in zip(self.stale, entries, strict=False):
            storage = tensor._storage_
            whole = storage.slot if before is None else before
            if entry.op is not _READ or entry.outputs is not tensor._slot or _is_stale(tensor, self.epoch):
                return None
            if whole is None or entry.args[0] is not whole:
                return None
            found.append(ViewRead(position, item, tensor._slot, whole, tensor._geometry, storage.base, before is None))
        return tuple(found) if len(found) == len(self.stale) else None

    def _writes(self, first: int) -> tuple[ArgumentWrite, ...] | None:
        """The tensors' values now; None where no step can describe them. `first`: the first value of the call."""
        rec = self.rec
        alike: tuple[int, ...] = ()
        if len(self.targets) == 1:
            target = self.targets[0][2]
            alike = tuple([i for i, given in enumerate(self.args) if i and _is_same_window(given, target)])
        if len(self.before) != len(self.targets) or len(self.targets) != self._on_their_memory() - len(alike):
            return None
        found, held = [], set()
        for (position, item, tensor), (version, before) in zip(self.targets, self.before, strict=True):
            storage, geom = tensor._storage_, tensor._geometry
            value, whole = tensor._slot, storage.slot
            if storage.version != version + 1 or tensor._seen != storage.version or value.number < first:
                return None
            if before is None:  # its memory became an input here
                before = next((slot for slot, entered in rec.inputs[self.inputs :] if entered is storage), None)
            if before is None or before in held:
                return None
            held.add(before)
            if geom is not storage.base:
                found.append(ArgumentWrite(position, item, value, whole, geom, storage.base, before, alike))
            elif value is whole and not alike:
                found.append(ArgumentWrite(position, item, value, whole))
            else:
                return None
        return tuple(found)

    def _on_their_memory(self) -> int:
        """How many arguments refer to the written memory."""
        written = {id(tensor._storage_) for _, _, tensor in self.targets}
        values: Any = chain(self.args, self.kwargs.values())
        flat = chain.from_iterable(v if isinstance(v, (list, tuple)) else (v,) for v in values)
        return sum(isinstance(item, LazyTensor) and id(item._storage_) in written for item in flat)


def _is_stale(tensor: LazyTensor, epoch: int) -> bool:
    """Whether the trace has no current value of a view."""
    storage = tensor._storage_
    return tensor._geometry is not storage.base and (tensor._epoch != epoch or tensor._seen != storage.version)


def _is_same_window(given: Any, target: Any) -> bool:
    return (
        type(given) is LazyTensor
        and given is not target
        and given._storage_ is target._storage_
        and given._geometry is target._geometry
    )

"""Composite calls: those recorded as several entries, or that write beside their results, learned as one step.

A dropout is seven entries, with a seed; a batch norm writes its running statistics. What such a call does depends on
its arguments alone, except for the seed: a call of its handler is followed as one step, once its effects were seen.

Invariant: a step is learned only where it has everything that the call did: its entries and inputs, which are
contiguous, new tensors over memory of their own that it returns, and writes to arguments over whole storages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.record.follow.follower import MARGIN
from torchlazy.lazy.record.follow.path import NEW, NEW_MANY, WRITE, ArgumentWrite, CallScalar, PathStep, Unread
from torchlazy.lazy.record.recorder import Handler, Recorder
from torchlazy.lazy.record.running_trace import flat_geometries
from torchlazy.lazy.record.tensor import LazyTensor, making
from torchlazy.lazy.trace.op_schema import OpPlan
from torchlazy.lazy.trace.trace import Float, ScalarSlot, Slot, slots_in

_CONSTANTS = frozenset({int, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format})


class _CannotLearn(Exception):
    """The call did more than a step can describe."""


def as_composite(handler: Handler) -> Handler:
    """The handler, whose calls are learned as steps where a known path is followed."""

    def record(rec: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if rec.path is None or rec.capture is not None or rec.learning_composite:
            return handler(rec, plan, args, kwargs)
        call = _CompositeCall(rec, plan, args, kwargs)
        rec.learning_composite = True
        try:
            result = handler(rec, plan, args, kwargs)
        finally:
            rec.learning_composite = False
        if result is not NotImplemented and rec.path is not None and rec.epoch == call.epoch:
            with contextlib.suppress(_CannotLearn):
                call.learn(result)
        return result

    return record


class _CompositeCall:
    """A call, with the trace and the call's tensors as they were before it."""

    def __init__(self, rec: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.rec, self.plan, self.args, self.kwargs, self.epoch = rec, plan, args, kwargs, rec.epoch
        self.first, self.values, self.inputs = len(rec._entries), len(rec._geometries), len(rec.inputs)
        self.scalars = len(rec.scalars)
        self.tensors = [(value, self._known(value), value._storage_.version) for value in self._given()]

    def _given(self) -> list[LazyTensor]:
        return [value for value in (*self.args, *self.kwargs.values()) if type(value) is LazyTensor]

    def _known(self, tensor: LazyTensor) -> Slot | None:
        """The slot of a tensor's value, where the trace has one."""
        storage = tensor._storage_
        if storage.epoch == self.epoch and tensor._geometry is storage.base:
            return storage.slot
        return tensor._slot if tensor._epoch == self.epoch and tensor._seen == storage.version else None

    def learn(self, result: Any) -> None:
        """Leave a step on the followed path. Raises `_CannotLearn` where no step can describe the call."""
        rec, path, position = self.rec, self.rec.path, len(self.rec._entries) - 1
        entries = rec._entries[self.first :]
        if path is None or not entries or position >= config.max_trace_length - MARGIN:
            return
        if any(mine is not theirs for mine, theirs in zip(entries, path.entries[self.first :], strict=False)):
            return
        made = [slot.number for entry in entries for slot in slots_in(entry.outputs)]
        entered = rec.inputs[self.inputs :]
        first = self.values + len(entered)
        if [slot.number for slot, _ in entered] != list(range(self.values, first)):
            return  # an input was added after a value was made
        if made != list(range(first, len(rec._geometries))):
            return
        args = tuple([self._wanted(value, entered) for value in self.args])
        named = tuple([(name, self._wanted(self.kwargs[name], entered)) for name in sorted(self.kwargs)])
        if {slot for slot, _ in entered} - {*args, *(value for _, value in named)}:
            return
        writes = self._writes(first)
        kind, outputs, results = self._made(result, first)
        flat = flat_geometries(results)
        if any(geom.device != flat[0].device for geom in flat):
            return
        step = PathStep(kind, self.plan, entries[-1], results, flat, None, position, rec.general)
        step.is_whole, step.args, step.named, step.outputs = True, args, named, outputs
        step.entries, step.number, step.end = entries, first, len(rec._geometries)
        step.flat = rec._geometries[first:]
        step.writes, step.numbers = writes, self._numbers(entries)
        if any(type(value) is torch.device for _, value in named):
            step.compute = flat[0].compute
        if kind == NEW:
            assert step.base is not None
            step.making = making(step.base)
        rec.enter_step(path, step)

    def _wanted(self, value: Any, entered: Sequence[tuple[Slot, Any]]) -> Any:
        """What the argument must be the next time."""
        kind = type(value)
        if kind is LazyTensor:
            known = next(slot for tensor, slot, _ in self.tensors if tensor is value)
            if known is not None:
                return known
            found = next((slot for slot, storage in entered if storage is value._storage_), None)
            if found is not None and value._geometry is not value._storage_.base:
                raise _CannotLearn
            return Unread(value._geometry) if found is None else found
        if kind is float and value == value:
            return Float(value)
        if kind in _CONSTANTS or (kind is torch.device and value.type == "lazy"):
            return value
        if kind is list and all(type(item) is int for item in value):
            return tuple(value)
        raise _CannotLearn

    def _writes(self, first: int) -> tuple[ArgumentWrite, ...]:
        """The written arguments, by position, with their values now."""
        written = []
        for tensor, _, version in self.tensors:
            storage = tensor._storage_
            if storage.version == version:
                continue
            alike = [i for i, value in enumerate(self.args) if getattr(value, "_storage_", None) is storage]
            slot = storage.slot
            if len(alike) != 1 or tensor._geometry is not storage.base or storage.version != version + 1:
                raise _CannotLearn
            if slot is None or slot.number < first or self.rec._geometries[slot.number] is not storage.base:
                raise _CannotLearn
            written.append(ArgumentWrite(alike[0], -1, slot, slot))
        return tuple(sorted(written, key=lambda one: one.position))

    def _made(self, result: Any, first: int) -> tuple[int, Any, Any]:
        """The kind of the step, and the slots and geometries of its results."""
        if self.args and result is self.args[0] and type(result) is LazyTensor:
            slot = result._storage_.slot
            if slot is None or slot.number < first:
                raise _CannotLearn
            return WRITE, slot, result._geometry
        if type(result) is tuple and result:
            found = [self._new(each, first) for each in result]
            if len({slot for slot, _ in found}) != len(found):
                raise _CannotLearn
            return NEW_MANY, tuple([slot for slot, _ in found]), tuple([geom for _, geom in found])
        return (NEW, *self._new(result, first))

    def _new(self, result: Any, first: int) -> tuple[Slot, Any]:
        if type(result) is not LazyTensor:
            raise _CannotLearn
        storage = result._storage_
        slot, base = storage.slot, storage.base
        if storage.epoch != self.epoch or slot is None or slot.number < first or result._geometry is not base:
            raise _CannotLearn
        if any(tensor._storage_ is storage for tensor, _, _ in self.tensors):
            raise _CannotLearn
        if base.offset or self.rec._geometries[slot.number] is not base:
            raise _CannotLearn
        return slot, base

    def _numbers(self, entries: Sequence[Any]) -> tuple[CallScalar, ...]:
        """The scalars that the entries read, in the order in which the trace got them."""
        rec, found = self.rec, dict[int, CallScalar]()
        for entry in entries:
            for value in (*entry.args, *(value for _, value in entry.kwargs)):
                if type(value) is tuple and any(type(item) is ScalarSlot for item in value):
                    raise _CannotLearn
                if type(value) is not ScalarSlot:
                    continue
                given = rec.scalars[value.number]
                place = None if value.kind is int else (rec.plan(entry.op), given.hex())
                if place is None and value.number < self.scalars:
                    raise _CannotLearn
                if place is not None and rec._scalar_numbers.get(place) != value.number:
                    raise _CannotLearn
                found[value.number] = CallScalar(value, place, 0.0 if place is None else given)
        if any(number not in found for number in range(self.scalars, len(rec.scalars))):
            raise _CannotLearn
        return tuple([found[number] for number in sorted(found)])

"""Rematerialized values: outputs of a cut trace that are not kept in memory, but computed on demand.

A forward that was cut before its backward keeps what the joint plan of both chose (run/segments/device.py). The other
values that autograd holds are rematerialized: their storages know how to compute them, and most are freed unread.

Here is also how the outputs of a cut are assigned to the storages that waited for them, and the test which storages of
a list are referenced elsewhere, by CPython's reference counts.

Invariant: a rematerialized storage has the value that the cut would have given it, whenever it is read and whatever was
written to other memory since. Its first read, or a write to what it is computed from, makes it an ordinary one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torchlazy.lazy.torch_private.dispatch import address_of, below_autograd
from torchlazy.lazy.trace.storage import LazyStorage

if TYPE_CHECKING:
    from torchlazy.lazy.record.recorder import Recorder


class ValueSource(Protocol):
    """Computes the rematerialized values of one trace."""

    def rematerialize_all(self, read: int | None = None) -> None:
        """Compute every value that is still referenced; `read`: the output that is being read, if one is."""

    def is_computed_from(self, memory: Sequence[Any]) -> bool:
        """Whether these values are computed from some of this memory."""


class RematerializedValue:
    """Stands for the memory of output number `output` of the source's trace."""

    __slots__ = ("output", "source")

    def __init__(self, source: Any, output: int) -> None:
        self.source = source
        self.output = output


class RematerializedStorage(LazyStorage):
    """A storage whose value is computed at its first read. An ordinary storage becomes one, and ordinary again."""

    promise: RematerializedValue

    @property  # type: ignore[override]
    def real(self) -> torch.Tensor | None:
        promise = self.__dict__.get("promise")
        if promise is not None:
            promise.source.rematerialize_all(promise.output)
            if self.poison is not None:
                raise self.poison
        return self.__dict__.get("real")

    @real.setter
    def real(self, value: torch.Tensor | None) -> None:
        make_ordinary(self, value)


def make_rematerialized(storage: LazyStorage, promise: RematerializedValue) -> weakref.ref[LazyStorage]:
    """Make this a storage with a rematerialized value."""
    storage.promise = promise  # type: ignore[attr-defined]
    storage.__class__ = RematerializedStorage
    return weakref.ref(storage)


def make_ordinary(storage: LazyStorage, value: torch.Tensor | None, error: BaseException | None = None) -> None:
    """Make it an ordinary storage again, which holds `value`, or the error that computing it raised."""
    storage.__class__ = LazyStorage
    storage.__dict__.pop("promise", None)
    storage.real = value
    if error is not None:
        storage.poison = error


def memory_or_value(storage: LazyStorage) -> Any:
    """The storage's memory, or its rematerialized value; None where it has neither."""
    return storage.promise if type(storage) is RematerializedStorage else storage.real


def held_elsewhere(storages: Sequence[LazyStorage]) -> list[LazyStorage]:
    """The storages that are referenced elsewhere than in the list."""
    return [storage for storage in storages if sys.getrefcount(storage) > _IN_LIST_ONLY]


_IN_LIST_ONLY = 0
while held_elsewhere([LazyStorage()]):  # how many references Python itself holds depends on its version
    _IN_LIST_ONLY += 1


def assign_values(recorder: Recorder, live: Sequence[LazyStorage], values: Sequence[Any]) -> BaseException | None:
    """Give each storage its value, its rematerialized value, or its error; returns the first error."""
    error: BaseException | None = None
    is_on_lazy = not recorder.has_mode_tensors
    for storage, value in zip(live, values, strict=True):
        storage.dirty = False
        storage.slot = None
        if type(value) is torch.Tensor and is_on_lazy and not storage.pinned:  # mostly
            if storage.poison is not None:
                storage.poison = None
            storage.real = value
            continue
        if isinstance(value, BaseException):
            error = error or value
            if storage.real is None:
                storage.poison = value  # else the write never happened: the old value stays, as in eager
            continue
        storage.poison = None
        if type(value) is RematerializedValue:
            value.source.promised[value.output] = make_rematerialized(storage, value)
            continue
        if storage.pinned and storage.real is not None:
            if address_of(value) != address_of(storage.real):
                with below_autograd():
                    storage.real.copy_(value)
        else:
            storage.real = value
            recorder.register_memory(storage)
    return error

"""Values of a trace that was cut which are not in memory: whoever asks for one has it computed then.

Which storages of a list somebody else holds, too: told by CPython's counts of references.

What a cut computed goes to the storages that waited for it.

A forward that was cut before its backward holds what the joint plan of both chose (run/segments/device.py). What
autograd holds beside that is promised: the storages say how their values come about, and most of them are let go of
unread.

Invariant: a promised storage has the value that the cut would have given it, whenever it is read and whatever was
written to other memory since. Its first reader, or a write to what it is computed from, makes it an ordinary one.
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


class Source(Protocol):
    """What has promised values of one trace."""

    def keep_all(self, read: int | None = None) -> None:
        """Compute every value that somebody still waits for; `read`: the output that is looked at, if it is one."""

    def is_computed_from(self, memory: Sequence[Any]) -> bool:
        """Whether promises are computed from some of this memory."""


class Promise:
    """Stands for the memory of output number `output` of the source's trace."""

    __slots__ = ("output", "source")

    def __init__(self, source: Any, output: int) -> None:
        self.source = source
        self.output = output


class PromisedStorage(LazyStorage):
    """A storage whose memory is made when somebody asks for it. Ordinary storages become this, and ordinary again."""

    promise: Promise

    @property  # type: ignore[override]
    def real(self) -> torch.Tensor | None:
        promise = self.__dict__.get("promise")
        if promise is not None:
            promise.source.keep_all(promise.output)
            if self.poison is not None:
                raise self.poison
        return self.__dict__.get("real")

    @real.setter
    def real(self, value: torch.Tensor | None) -> None:
        fulfil(self, value)


def promise_to(storage: LazyStorage, promise: Promise) -> weakref.ref[LazyStorage]:
    """The storage's memory is what was promised."""
    storage.promise = promise  # type: ignore[attr-defined]
    storage.__class__ = PromisedStorage
    return weakref.ref(storage)


def fulfil(storage: LazyStorage, value: torch.Tensor | None, error: BaseException | None = None) -> None:
    """From now on it is an ordinary storage that holds `value`, or the error that computing it raised."""
    storage.__class__ = LazyStorage
    storage.__dict__.pop("promise", None)
    storage.real = value
    if error is not None:
        storage.poison = error


def memory_or_promise(storage: LazyStorage) -> Any:
    """The storage's memory, or what stands for it; None where it has neither."""
    return storage.promise if type(storage) is PromisedStorage else storage.real


def held_elsewhere(storages: Sequence[LazyStorage]) -> list[LazyStorage]:
    """Those that somebody holds beside the list."""
    return [storage for storage in storages if sys.getrefcount(storage) > _IN_LIST_ONLY]


_IN_LIST_ONLY = 0
while held_elsewhere([LazyStorage()]):  # what Python itself holds meanwhile differs from version to version
    _IN_LIST_ONLY += 1


def take_values(recorder: Recorder, live: Sequence[LazyStorage], values: Sequence[Any]) -> BaseException | None:
    """Each storage has its value, a promise of it, or the error that stands for it; returns the first error."""
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
                storage.poison = value  # else the write never happened: the old value stands, as in eager
            continue
        storage.poison = None
        if type(value) is Promise:
            value.source.promised[value.output] = promise_to(storage, value)
            continue
        if storage.pinned and storage.real is not None:
            if address_of(value) != address_of(storage.real):
                with below_autograd():
                    storage.real.copy_(value)
        else:
            storage.real = value
            recorder.found_at(storage)
    return error

"""Values of a trace that was cut which are not in memory: whoever asks for one has it computed then.

A forward that was cut before its backward holds what the joint plan of both chose (lazy/cut_halves.py). What autograd
holds beside that is promised: the storages say how their values come about, and most of them are let go of unread.

Invariant: a promised storage has the value that the cut would have given it, whenever it is read and whatever was
written to other memory since. Its first reader, or a write to what it is computed from, makes it an ordinary one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torchlazy.lazy.storage import LazyStorage


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

"""Collectives of a replay that turned out to be the wrong one: what runs in its stead takes their results from here.

Every process of a group counts the collectives that run. A replay that is given up behind some of them, as a number is
another one than it was, is followed by another replay or by the call's Python, which come to the same collectives: they
must not run twice, or the processes talk past each other.

Invariant: results are taken in the order in which the collectives ran, within the call that ran them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.running_compiled import runs_compiled


@dataclass(frozen=True, eq=False)
class Communicated:
    """One collective that ran, and what it wrote."""

    op: torch._ops.OpOverload
    results: tuple[torch.Tensor, ...]


class CommunicatedOnce(threading.local):
    """A block is a call: at its end nothing may be left."""

    def __init__(self) -> None:
        self._found: list[Communicated] = []

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *error: Any) -> None:
        if not self._found or runs_compiled():
            return
        left, self._found = self._found, []
        if kind is None:
            raise RuntimeError(
                f"{left[0].op.name()}: a replay of this call ran it, and its Python did not: {_OUT_OF_STEP}"
            )

    def keep(self, found: Sequence[Communicated]) -> None:
        """The replay that ran these is given up; where it took results from here itself, these are among them."""
        self._found = [*found, *self._found]

    def take(self, op: torch._ops.OpOverload, written: Sequence[torch.Tensor]) -> bool:
        """Whether the collective ran already in this call; what it wrote is in `written` then."""
        if not self._found:
            return False
        first = self._found.pop(0)
        shapes = [(result.shape, result.dtype) for result in first.results]
        if first.op is not op or shapes != [(tensor.shape, tensor.dtype) for tensor in written]:
            raise RuntimeError(
                f"{op.name()}: a replay of this call ran {first.op.name()} for tensors of "
                f"{[tuple(shape) for shape, _ in shapes]} in its place: {_OUT_OF_STEP}"
            )
        for tensor, result in zip(written, first.results, strict=True):
            tensor.copy_(result)
        return True


COMMUNICATED = CommunicatedOnce()
_OUT_OF_STEP = (
    "the processes of its group are no longer in step. Does the call depend on what no guard sees (time, files, "
    "Python's random)?"
)


def copies_of(written: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """What a collective wrote, for later."""
    return tuple(tensor.clone() for tensor in written)


__all__ = ["COMMUNICATED", "Communicated", "copies_of"]

"""Collectives of a replay that turned out to be the wrong one: what runs in its stead takes their results from here.

Every process of a group counts the collectives that run. A replay that is given up behind some of them, as a number is
another one than it was, is followed by another replay or by the call's Python, which come to the same collectives: they
must not run twice, or the processes talk past each other.

Invariant: results are taken in the order in which the collectives ran, within the call that ran them.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.record.compiled_scope import runs_compiled
from torchlazy.lazy.torch_private.distributed import in_backward


@dataclass(frozen=True, eq=False)
class Communicated:
    """One collective that ran, and what it wrote."""

    op: torch._ops.OpOverload
    results: tuple[torch.Tensor, ...]


class CommunicatedOnce:
    """A block is a call: at its end nothing may be left. Calls of several threads know nothing of each other."""

    def __init__(self) -> None:
        self._found: dict[int, list[Communicated]] = {}  # by the thread of the call

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *error: Any) -> None:
        if get_ident() not in self._found or runs_compiled():
            return
        left = self._found.pop(get_ident())
        if kind is None and left:
            raise RuntimeError(
                f"{left[0].op.name()}: a replay of this call ran it, and its Python did not: {_OUT_OF_STEP}"
            )

    def keep(self, found: Sequence[Communicated]) -> None:
        """The replay that ran these is given up; where it took results from here itself, these are among them."""
        self._found.setdefault(get_ident(), [])[:0] = found

    def _left(self) -> list[Communicated]:
        """What this thread's call has left. Torch runs a backward on a GPU in a thread of its own, and with it
        collectives of the call; where several calls have something left, nobody knows for which of them."""
        mine = self._found.get(get_ident())
        if mine or not in_backward():
            return mine or []
        left = [found for found in self._found.values() if found]
        if len(left) > 1:
            raise RuntimeError(f"compiled calls in {len(left)} threads are behind collectives at once: {_OUT_OF_STEP}")
        return left[0] if left else []

    def take(self, op: torch._ops.OpOverload, written: Sequence[torch.Tensor]) -> bool:
        """Whether the collective ran already in this call; what it wrote is in `written` then."""
        found = self._left()
        if not found:
            return False
        first = found.pop(0)
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

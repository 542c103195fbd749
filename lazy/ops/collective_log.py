"""Collectives run by a replay that is then given up: the call that runs instead takes their results from here.

Every process of a group counts the collectives that run. A replay may be given up after some of them, as a number
differs from the captured one. Another replay or the call's Python then runs and comes to the same collectives: they
must not run twice, or the processes get out of step.

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
class FinishedCollective:
    """One collective that ran, and its results."""

    op: torch._ops.OpOverload
    results: tuple[torch.Tensor, ...]


class CollectiveLog:
    """Results that are still to be taken, by thread. A block is a call: at its end nothing may be left."""

    def __init__(self) -> None:
        self._found: dict[int, list[FinishedCollective]] = {}  # by the thread of the call

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *error: Any) -> None:
        if get_ident() not in self._found or runs_compiled():
            return
        left = self._found.pop(get_ident())
        if kind is None and left:
            raise RuntimeError(
                f"{left[0].op.name()}: a replay of this call ran it, and its Python did not: {_OUT_OF_STEP}"
            )

    def keep(self, found: Sequence[FinishedCollective]) -> None:
        """Keep the collectives of a replay that is given up; those that it took from here itself are among them."""
        self._found.setdefault(get_ident(), [])[:0] = found

    def _left(self) -> list[FinishedCollective]:
        """The results left for this thread's call. Torch runs a backward on a GPU in a thread of its own, and with it
        collectives of the call; where several calls have results left, it is not known which call that is."""
        mine = self._found.get(get_ident())
        if mine or not in_backward():
            return mine or []
        left = [found for found in self._found.values() if found]
        if len(left) > 1:
            raise RuntimeError(f"compiled calls in {len(left)} threads are behind collectives at once: {_OUT_OF_STEP}")
        return left[0] if left else []

    def take(self, op: torch._ops.OpOverload, written: Sequence[torch.Tensor]) -> bool:
        """Whether the collective ran already in this call; its results are in `written` then."""
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


COLLECTIVE_LOG = CollectiveLog()
_OUT_OF_STEP = (
    "the processes of its group are no longer in step. Does the call depend on what no guard sees (time, files, "
    "Python's random)?"
)


def copies_of(written: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Copies of a collective's results, for later."""
    return tuple(tensor.clone() for tensor in written)


__all__ = ["COLLECTIVE_LOG", "FinishedCollective", "copies_of"]

"""A cut of a path that was followed whole, against the one before: told by a few comparisons of lists.

Invariant: a `KnownCut` matches where a `CutTrace` made anew would be equal to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.trace import CutTrace, Slot


class KnownCut:
    """A trace as it was cut, taken apart into lists."""

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
        """Whether a cut of the same entries, over so many values, is this trace again."""
        trace = self.trace
        given = [storage for _, storage in inputs]
        return (
            values == len(trace.geometries)
            and tuple(map(type, scalars)) == trace.scalar_kinds
            and [storage.slot for storage in live] == self._slots
            and [slot for slot, _ in inputs] == self._given_slots
            and [storage.base for storage in live] == self._bases
            and [storage.base for storage in given] == self._given_bases
            # An input is written to, and so among what is live, or it is not.
            and [storage.dirty for storage in given].count(True) == len(trace.donations)
            and self._taken_over(live) == self._given(given)
        )


def _items(places: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """The items at these places of a sequence, to be compared with others."""
    return itemgetter(*places) if places else lambda _: ()

"""What has followed each forward, in order: whether the backward that comes next is likely one that is known.

One forward may have several backwards: of accumulated gradients the first round's, those in between, and the last one
with the optimizer's step. A forward that promises values is computed twice where a backward comes that is none of its
pairs, so that it waits until all that come round are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torchlazy.lazy.cut_watch import same_trace
from torchlazy.lazy.trace import CutTrace

_MOST_FORWARDS = 16
_MOST_SEEN = 64
_RARE = 8  # one unknown backward in so many is borne
_MANY = 16


class _Family:
    def __init__(self, first: CutTrace) -> None:
        self.first = first
        self.seen: deque[tuple[int, CutTrace]] = deque(maxlen=_MOST_SEEN)  # with the number of each, counted on
        self.count = 0
        self.longest = 0  # how many came, at most, until one of them came again
        self.last: dict[int, CutTrace] = {}  # by how many forwards were waiting before this one

    def note(self, second: CutTrace, before: int) -> None:
        self.count += 1
        for number, known in reversed(self.seen):
            if same_trace(known, second):
                self.longest = max(self.longest, self.count - number)
                second = known
                break
        self.seen.append((self.count, second))
        self.last[before] = second


class CutFollowers:
    """The last forwards, with the backwards that followed them."""

    def __init__(self) -> None:
        self._families: deque[_Family] = deque(maxlen=_MOST_FORWARDS)

    def saw(self, first: CutTrace, second: CutTrace, before: int) -> None:
        """This backward has followed the forward, which was run while so many others waited for theirs."""
        family = self._of(first)
        if family is None:
            family = _Family(first)
            self._families.append(family)
        family.note(second, before)

    def likely(self, first: CutTrace, before: int) -> CutTrace | None:
        """The backward that followed last time: of a loop the first forward's is another one than the last one's."""
        family = self._of(first)
        return None if family is None else family.last.get(before)

    def are_known(self, first: CutTrace, seconds: Sequence[CutTrace]) -> bool:
        """Whether one of these will likely follow the forward: each other one has been away for longer than it took any
        to come again, or such are rare."""
        family = self._of(first)
        if family is None:
            return True
        known: dict[int, bool] = {}
        for _, second in family.seen:
            if id(second) not in known:
                known[id(second)] = any(same_trace(second, found) for found in seconds)
        unknown = [number for number, second in family.seen if not known[id(second)]]
        if not unknown or family.count - unknown[-1] > family.longest:
            return True
        return len(family.seen) >= _MANY and len(unknown) * _RARE <= len(family.seen)

    def _of(self, first: CutTrace) -> _Family | None:
        return next((family for family in self._families if same_trace(family.first, first)), None)

"""Whether replays of a call are faster than its Python: both run in turns, and the time from call to call is compared.

That time has all that follows from how the call ran: a backward, the loop around it. Turns are a few calls long; the
first of each warms up, and does not count.

Invariant: what the call does and gives is the same in both. It is one that draws no random numbers, so that what comes
of a seed does not depend on the clock.
"""

from __future__ import annotations

import statistics
from time import perf_counter

BEGINS = 64  # calls before the first turn
_TURN = 4  # calls
_TURNS = 24
_FIRST_LOOK = 4  # turns, after which replays may have won
_WINS = 0.95
_LOSES = 1.02  # times as slow, by medians and by the least


class Race:
    """Asked at each call of one kind. `lost`: replays are slower, so Python runs from now on."""

    __slots__ = ("_begun", "_calls", "_seconds", "is_over", "lost")

    def __init__(self) -> None:
        self._calls = -BEGINS
        self._begun = 0.0
        self._seconds: tuple[list[float], list[float]] = ([], [])  # of replays, of Python
        self.is_over = self.lost = False

    def is_pythons_turn(self) -> bool:
        """Whether this call is to run its Python."""
        if self.is_over:
            return self.lost
        self._calls += 1
        if self._calls <= 0:
            return False
        now, (before, place) = perf_counter(), divmod(self._calls - 2, _TURN)
        if self._calls > 1 and place:
            self._seconds[before % 2].append(now - self._begun)
        self._begun = now
        turn = (self._calls - 1) // _TURN
        if turn in (_FIRST_LOOK, _TURNS) and (self._calls - 1) % _TURN == 0:
            self._decide(is_last=turn == _TURNS)
        return self.lost if self.is_over else turn % 2 == 1

    def _decide(self, is_last: bool) -> None:
        replayed, in_python = self._seconds
        self.is_over = is_last or statistics.median(replayed) < _WINS * statistics.median(in_python)
        self.lost = is_last and all(of(replayed) > _LOSES * of(in_python) for of in (statistics.median, min))

    def __str__(self) -> str:
        replayed, in_python = (statistics.median(seconds) * 1e6 for seconds in self._seconds)
        return f"from call to call {replayed:.0f} us with replays, {in_python:.0f} with its Python"


__all__ = ["BEGINS", "Race"]

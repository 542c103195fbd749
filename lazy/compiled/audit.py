"""Audits: when a replayed call runs its Python after all, so that what it does can be compared with its template.

Guards see what the code names. They do not see the clock, files, Python's random numbers, or state behind objects of
libraries. Audits catch a call that depends on these, not at once but soon: the 1st, 2nd, 4th, 8th, ... replay is
audited, and every 1000th from then on. From the third audit on no more of the time is spent on them than a tenth, from
the 1000th replay on a fiftieth: an audit of a large model takes as long as hundreds of its replays. The second waits
likewise where the first took half a second or more.

Invariant: an audited call does what the call itself does; it runs its Python, recorded, and is only compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torchlazy.lazy.config import config

_LONGEST = 1000  # replays between audits
_FIRST = 2  # replays that are audited at once, if that is quick: what is never the same twice shows
_QUICK = 0.5  # seconds
SHARE, LATER_SHARE = 10, 50  # times as long as the last audit took


@dataclass(eq=False)
class AuditSchedule:
    """When the next audit is due."""

    replays: int = 0
    next_audit: int = 1
    ended: float = 0.0  # when the last audit ended, by `time.perf_counter`
    seconds: float = 0.0  # how long it took
    at: int = 0  # the replay that it was

    def is_next(self) -> bool:
        """Whether the next replay is to be audited."""
        return self.replays + 1 >= self.next_audit or config.audit == "all"

    def due(self) -> bool:
        """Count a replay; whether it is to be audited."""
        self.replays += 1
        if config.audit == "all":
            self.next_audit = self.replays + 1
            return True
        if self.replays < self.next_audit:
            return False
        is_at_once = self.replays <= _FIRST and self.seconds < _QUICK
        if not is_at_once and (wait := self._wait()):
            self.next_audit = self.replays + wait
            return False
        self.next_audit = self.replays + min(self.replays, _LONGEST)
        return True

    def _wait(self) -> int:
        """The replays by which an audit is put off that comes too soon after the last one, at the pace since then."""
        share = SHARE if self.replays <= _LONGEST else LATER_SHARE
        since, wanted = time.perf_counter() - self.ended, share * self.seconds
        if since >= wanted:
            return 0
        pace = max(since, 1e-6) / max(self.replays - self.at, 1)
        return 1 + min(int((wanted - since) / pace), self.replays)

    def audited(self, begun: float) -> None:
        """An audit that began then has ended."""
        self.ended, self.at = time.perf_counter(), self.replays
        self.seconds = self.ended - begun


__all__ = ["AuditSchedule"]

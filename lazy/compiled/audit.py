"""Audits: when a replayed call runs its Python after all, so that what it does can be compared with its template.

Guards see what the code names. They do not see the clock, files, Python's random numbers, or state behind objects of
libraries. Audits catch a call that depends on these, not at once but soon: the 1st, 2nd, 4th, 8th, ... replay is
audited, and every 1000th from then on; but then no more of the time is spent on audits than a fiftieth.

Invariant: an audited call does what the call itself does; it runs its Python, recorded, and is only compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torchlazy.lazy.config import config

_LONGEST = 1000  # replays between audits
_POSTPONED = 200  # replays by which one is put off that comes too soon after the last
_LEAST_SHARE = 50  # times as long as the last audit took


@dataclass(eq=False)
class AuditSchedule:
    """When the next audit is due."""

    replays: int = 0
    next_audit: int = 1
    ended: float = 0.0  # when the last audit ended, by `time.perf_counter`
    seconds: float = 0.0  # how long it took

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
        if self.replays > _LONGEST and time.perf_counter() - self.ended < _LEAST_SHARE * self.seconds:
            self.next_audit = self.replays + _POSTPONED
            return False
        self.next_audit = self.replays + min(self.replays, _LONGEST)
        return True

    def audited(self, begun: float) -> None:
        """An audit that began then has ended."""
        self.ended = time.perf_counter()
        self.seconds = self.ended - begun


__all__ = ["AuditSchedule"]

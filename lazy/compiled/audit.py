"""Audits: when a replayed call runs its Python after all, so that what it does can be compared with its template.

Guards see what the code names. They do not see the clock, files, Python's random numbers, or state behind objects of
libraries. Audits catch a call that depends on these, not at once but soon: the 1st, 2nd, 4th, 8th, ... replay is
audited, and every 1000th from then on.

Invariant: an audited call does what the call itself does; it runs its Python, recorded, and is only compared.
"""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST = 1000  # replays between audits


@dataclass(eq=False)
class AuditSchedule:
    """When the next audit is due."""

    replays: int = 0
    next_audit: int = 1

    def is_next(self) -> bool:
        """Whether the next replay is to be audited."""
        return self.replays + 1 >= self.next_audit

    def due(self) -> bool:
        """Count a replay; whether it is to be audited."""
        self.replays += 1
        if self.replays < self.next_audit:
            return False
        self.next_audit = self.replays + min(self.replays, _LONGEST)
        return True


__all__ = ["AuditSchedule"]

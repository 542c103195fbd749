"""When replays are audited: often at first, by their number; later by their number and by what audits cost."""

from __future__ import annotations

import time

import pytest
from torchlazy.lazy.compiled.audit import AuditSchedule


def audits(schedule: AuditSchedule, replays: int, seconds: float) -> list[int]:
    """The numbers of the replays that were audited, each for so long."""
    found = []
    for _ in range(replays):
        was_next = schedule.is_next()
        if schedule.due():
            found.append(schedule.replays)
            schedule.audited(time.perf_counter() - seconds)
            assert was_next
    return found


def test_cheap_audits_are_by_number() -> None:
    found = audits(AuditSchedule(), 5000, 0.0)
    assert found[:11] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert found[11:] == [2024, 3024, 4024]


def test_dear_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    schedule = AuditSchedule()
    assert audits(schedule, 1100, 1.0)[-1] == 512  # the one after 1000 comes too soon
    assert audits(schedule, 3000, 1.0) == []
    now = 49.0
    assert audits(schedule, 1000, 1.0) == []
    now = 51.0
    assert len(audits(schedule, 300, 1.0)) == 1

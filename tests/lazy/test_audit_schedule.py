"""When replays are audited: by their number where audits are cheap, else by what they cost."""

from __future__ import annotations

import time

import pytest
from torchlazy.lazy.compiled import audit
from torchlazy.lazy.compiled.audit import AuditSchedule


class Clock:
    """The time that passes by `advance` alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def audits(self, schedule: AuditSchedule, replays: int, replay: float, audit: float) -> list[int]:
        """The numbers of the replays that are audited, where a replay and an audit take so many seconds."""
        found = []
        for _ in range(replays):
            was_next = schedule.is_next()
            begun = self.now
            if schedule.due():
                found.append(schedule.replays)
                self.now += audit
                schedule.audited(begun)
                assert was_next
            else:
                self.now += replay
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(audit, "SHARE", 10)
    monkeypatch.setattr(audit, "LATER_SHARE", 50)
    return Clock(monkeypatch)


def test_cheap_audits_are_by_number(clock: Clock) -> None:
    found = clock.audits(AuditSchedule(), 5000, 1.0, 0.1)
    assert found[:11] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert found[11:] == [2024, 3024, 4024]


def test_dear_ones_take_a_tenth_of_the_time(clock: Clock) -> None:
    assert clock.audits(AuditSchedule(), 900, 0.01, 1.0) == [1]
    begun, schedule = clock.now, AuditSchedule()
    found = clock.audits(schedule, 1000, 0.1, 1.0)
    assert 5 <= len(found) <= 2 + (clock.now - begun) / 10
    assert found == pytest.approx([1, 103, 206, 412, 824], rel=0.02)


def test_the_second_one_is_at_once_where_the_first_was_quick(clock: Clock) -> None:
    assert clock.audits(AuditSchedule(), 90, 0.1, 0.4) == [1, 2, 44, 88]


def test_later_ones_take_a_fiftieth(clock: Clock) -> None:
    schedule = AuditSchedule()
    clock.audits(schedule, 1500, 0.1, 1.0)
    before = clock.now
    found = clock.audits(schedule, 20_000, 0.01, 1.0)
    assert len(found) == pytest.approx((clock.now - before) / 51, abs=1)


def test_a_pause_between_calls_counts(clock: Clock) -> None:
    schedule = AuditSchedule()
    assert clock.audits(schedule, 20, 0.001, 1.0) == [1]
    clock.now += 60.0
    assert len(clock.audits(schedule, 100, 0.001, 1.0)) == 1

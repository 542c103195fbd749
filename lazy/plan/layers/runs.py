"""Finds repetitions in a sequence: runs of one period.

Invariant: nothing here is trusted for correctness: a wrong guess costs time, never a result.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

_CANDIDATES = 24
_LONGEST_PERIOD = 600


@dataclass(frozen=True, slots=True)
class Run:
    """`count` whole periods from `start` on, and `rest` calls more of the next."""

    start: int
    period: int
    count: int
    rest: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count + self.rest


def find_runs(keys: Sequence[Hashable], least: int) -> list[Run]:
    """Disjoint runs of at least `least` equal periods, in order; of several periods the one that covers most."""
    numbers: dict[Hashable, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in keys]
    following: dict[int, list[int]] = {}
    for position, key in enumerate(ids):
        following.setdefault(key, []).append(position)
    place = {key: 0 for key in following}
    runs: list[Run] = []
    position = 0
    while position < len(ids):
        best = _run_from(position, ids, following, place, least)
        if best is None:
            position += 1
        else:
            runs.append(best)
            position = best.end
    return runs


def _run_from(
    start: int, ids: list[int], following: Mapping[int, list[int]], place: dict[int, int], least: int
) -> Run | None:
    same = following[ids[start]]
    at = place[ids[start]]
    while same[at] < start:
        at += 1
    place[ids[start]] = at
    best: Run | None = None
    for again in same[at + 1 : at + 1 + _CANDIDATES]:
        period = again - start
        if period > _LONGEST_PERIOD:
            break
        if ids[start:again] != ids[again : again + period] or start + least * period > len(ids):
            continue
        end = again
        while ids[end : end + period] == ids[end - period : end] and end + period <= len(ids):
            end += period
        rest = 0
        while end + rest < len(ids) and ids[end + rest] == ids[end + rest - period]:
            rest += 1
        run = Run(start, period, (end - start) // period, rest)
        if run.count >= least and (best is None or run.end > best.end):
            best = run
    return best

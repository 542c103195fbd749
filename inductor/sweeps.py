"""Sweep planning: in which pass over the reduce axes, or between which, each statement of a kernel runs.

Phases are numbered: even ones run once for each point, odd ones for each point of the reduce axes. A reduction's
result is known in the phases after its own. A pointwise value over the reduce axes lives for one phase: a later phase
that needs it computes it again, and only one of its statements stores it.

Invariant: a plan lists the statements of a phase in dependency order, stores each buffer once, and stores a value that
overwrites a donated input after every statement that may read the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a kernel, in dependency order. `needs` are earlier members by their place in the list."""

    node: int
    over_reduce: bool  # runs for each point of the reduce axes
    is_reduction: bool
    needs: tuple[int, ...]
    is_stored: bool
    overwrites: bool = False  # its store goes into the memory of an input that this kernel reads


@dataclass(frozen=True, slots=True)
class PlannedSweep:
    """The members to run, in order, and which of them store here."""

    over_reduce: bool
    statements: tuple[tuple[int, bool], ...]  # (place of the member, stores)


def plan_sweeps(members: Sequence[Member]) -> list[PlannedSweep]:
    """The fewest alternating sweeps in which every member stands after what it needs."""
    phase = _earliest_phases(members)
    last = max(phase, default=0)
    wanted: list[set[int]] = [set() for _ in members]
    stored_at: list[int | None] = [None] * len(members)
    for place in reversed(range(len(members))):
        member = members[place]
        if member.is_stored:
            stored_at[place] = _store_phase(member, phase[place], wanted[place], last)
        runs_at = _run_phases(member, phase[place], wanted[place], stored_at[place])
        wanted[place] = runs_at
        for need in member.needs:
            wanted[need] |= runs_at
    phases = sorted(set().union(*wanted)) if members else []
    sweeps = []
    for current in phases:
        statements = tuple(
            (place, stored_at[place] == current) for place in range(len(members)) if current in wanted[place]
        )
        sweeps.append(PlannedSweep(bool(current % 2), statements))
    return sweeps


def _earliest_phases(members: Sequence[Member]) -> list[int]:
    phase: list[int] = []
    for member in members:
        earliest = 0
        for need in member.needs:
            earliest = max(earliest, phase[need] + (1 if members[need].is_reduction else 0))
        if (earliest % 2 == 1) != member.over_reduce:
            earliest += 1
        phase.append(earliest)
    return phase


def _store_phase(member: Member, earliest: int, wanted: set[int], last: int) -> int:
    if member.is_reduction:
        return earliest
    if member.overwrites:
        return last if (last % 2 == 1) == member.over_reduce else last + (1 if not member.over_reduce else -1)
    if member.over_reduce:
        return max(wanted, default=earliest)
    return earliest


def _run_phases(member: Member, earliest: int, wanted: set[int], stored_at: int | None) -> set[int]:
    if not wanted and stored_at is None:
        return set()
    if member.is_reduction:
        return {earliest}
    if member.over_reduce:
        return wanted if stored_at is None else wanted | {stored_at}
    # A value at the points stays readable from its phase on.
    runs = {earliest} if wanted else set()
    return runs if stored_at is None else runs | {stored_at}

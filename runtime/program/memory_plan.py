"""When memory is given back, and which dead memory new values take over.

Invariant: a planned program frees every name after its last reader, and a source not before its windows; memory changes
hands only when nothing reads its old value any more; outputs neither take over memory nor give theirs; and the peak of
the bytes that the program holds at once is never higher than it is without any taking over.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.size_int import hint, surely_at_least
from torchlazy.runtime.program.program import Allocate, ExternCall, Free, Reinterpret, Step
from torchlazy.runtime.program.steps import is_dense, may_alias, names_made, names_read, span_bytes

# A donor more than twice as large is kept for a larger taker, unless it is tiny.
_MOST_WASTE = 2
_TINY_BYTES = 1 << 14
_SMALLEST_EXTERN_DONOR = 512


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Bytes that a program takes for itself, outputs included, inputs not."""

    peak_bytes: int
    total_bytes: int  # of all values, as if none took over another's memory
    reused: int  # how many values took over memory


@dataclass
class _PlannedValue:
    """A piece of memory that the program makes: by Allocate, or as the result of an ATen call."""

    name: str
    device: str
    size: int  # bytes; of a tracked size those at planning, by which memory is dealt out
    extent: int  # the same, tracked where it is
    made: int
    dead: int  # the last step that uses it, through whatever window
    gives: bool  # its memory may be taken over
    takes: bool


@dataclass
class _MemoryFacts:
    """Who owns which memory and how long it is used."""

    values: dict[str, _PlannedValue] = field(default_factory=dict)
    roots: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name -> owners of the memory that it may be on
    last_use: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)


def plan_memory(
    steps: Sequence[Step], *, inputs: Sequence[tuple[str, TensorMeta]], outputs: Sequence[str]
) -> tuple[Step, ...]:
    """The steps with `Free`s placed and `Allocate.reuse` chosen; earlier choices of both are dropped."""
    bare = [replace(step, reuse=None) if isinstance(step, Allocate) else step for step in steps]
    bare = [step for step in bare if not isinstance(step, Free)]
    facts = _collect(bare, [name for name, _ in inputs], outputs)
    donor_of = _choose_donors(list(facts.values.values()), len(bare))
    return _write(bare, facts, donor_of, set(outputs))


def plan_report(steps: Sequence[Step]) -> PlanReport:
    """What a planned program holds at its worst moment; reads `Free` and `Allocate.reuse` as they stand."""
    total = sum(sum(_sizes_made(step).values()) for step in steps)
    reused = sum(isinstance(step, Allocate) and step.reuse is not None for step in steps)
    return PlanReport(max(held_bytes(steps), default=0), total, reused)


def held_bytes(steps: Sequence[Step]) -> tuple[int, ...]:
    """The bytes that the program holds during each step; for a Free, those after it."""
    held: dict[str, int] = {}
    now = 0
    history = []
    for step in steps:
        sizes = _sizes_made(step)
        if isinstance(step, Allocate) and step.reuse is not None:
            sizes = {step.name: held.pop(step.reuse)}
            now -= sizes[step.name]
        held |= sizes
        now += sum(sizes.values())
        if isinstance(step, Free):
            now -= sum(held.pop(name, 0) for name in step.names)
        history.append(now)
    return tuple(history)


def peak_bytes(steps: Sequence[Step], given: Mapping[str, int] | None = None) -> int:
    """The most that a program holds at once; with what it was `given` (bytes by name), until it frees that."""
    left = dict(given or {})
    beside = sum(left.values())
    peak = beside
    for step, own in zip(steps, held_bytes(steps), strict=True):
        peak = max(peak, own + beside)
        if isinstance(step, Free):
            beside -= sum(left.pop(name, 0) for name in step.names)
    return peak


def _sizes_made(step: Step) -> Mapping[str, int]:
    """Bytes of the memory that a step takes, by owner."""
    if isinstance(step, Allocate):
        return {step.name: span_bytes(step.meta)}
    if isinstance(step, ExternCall) and not may_alias(step.op):
        return {name: span_bytes(meta) for name, meta in zip(step.outputs, step.metas, strict=True) if name and meta}
    return {}


def _collect(steps: Sequence[Step], inputs: Sequence[str], outputs: Sequence[str]) -> _MemoryFacts:
    facts = _MemoryFacts()
    for name in inputs:
        facts.roots[name] = (name,)
        facts.made[name] = facts.last_use[name] = -1
    for position, step in enumerate(steps):
        for name in names_read(step):
            facts.last_use[name] = position
        for name in names_made(step):
            facts.made[name] = facts.last_use[name] = position
            facts.roots[name] = (name,)
        if isinstance(step, Reinterpret):
            facts.roots[step.name] = facts.roots[step.source]
        elif isinstance(step, Allocate):
            extent = span_bytes(step.meta)
            facts.values[step.name] = _PlannedValue(
                step.name, step.meta.device, hint(extent), extent, position, position, gives=True, takes=True
            )
        elif isinstance(step, ExternCall):
            _collect_extern(facts, step, position)
    for name, position in facts.last_use.items():
        for root in facts.roots[name]:
            facts.last_use[root] = max(facts.last_use[root], position)
    for name in outputs:
        for root in facts.roots.get(name, ()):
            facts.last_use[root] = len(steps)
            if root in facts.values:
                facts.values[root].gives = facts.values[root].takes = False
    for name, value in facts.values.items():
        value.dead = facts.last_use[name]
    return facts


def _collect_extern(facts: _MemoryFacts, step: ExternCall, position: int) -> None:
    if may_alias(step.op):
        owners = tuple(dict.fromkeys(root for name in names_read(step) for root in facts.roots[name]))
        for name in names_made(step):
            facts.roots[name] = (name, *owners)
        return
    for output, meta in zip(step.outputs, step.metas, strict=True):
        if output and meta:
            # Results that are not dense may interleave with their siblings in one storage; a tiny one (attention's
            # seed) may be on the host although its metadata says CUDA.
            extent = span_bytes(meta)
            gives = is_dense(meta) and hint(extent) >= _SMALLEST_EXTERN_DONOR
            facts.values[output] = _PlannedValue(
                output, meta.device, hint(extent), extent, position, position, gives=gives, takes=False
            )


def _choose_donors(values: Sequence[_PlannedValue], steps: int) -> dict[str, str]:
    """Taker -> donor, in the order of the steps: the smallest dead memory that is large enough."""
    live = {device: np.zeros(steps + 2, dtype=np.int64) for device in {value.device for value in values}}
    for value in values:
        live[value.device][value.made : value.dead + 1] += value.size
    peak = {device: int(timeline.max(initial=0)) for device, timeline in live.items()}
    by_death = sorted(values, key=lambda value: value.dead)
    died = 0
    pool: dict[str, list[tuple[int, int, str]]] = {device: [] for device in live}  # (capacity, death, name), sorted
    capacity: dict[str, int] = {}
    extents = {value.name: value.extent for value in values}  # of what a name's memory began as
    donor_of: dict[str, str] = {}
    for value in values:
        while died < len(by_death) and by_death[died].dead < value.made:
            dead = by_death[died]
            died += 1
            if dead.gives and dead.size:
                bisect.insort(pool[dead.device], (capacity.get(dead.name, dead.size), dead.dead, dead.name))
        if not (value.takes and value.size):
            continue
        candidates, timeline = pool[value.device], live[value.device]
        number = _first_fit(value, candidates, timeline, peak[value.device], extents)
        if number is not None:
            size, death, name = candidates.pop(number)
            timeline[death + 1 : value.made] += size
            timeline[value.made : value.dead + 1] += size - value.size
            donor_of[value.name] = name
            capacity[value.name] = size
            extents[value.name] = extents[name]
    return donor_of


def _first_fit(
    value: _PlannedValue,
    candidates: Sequence[tuple[int, int, str]],
    timeline: np.ndarray,
    peak: int,
    extents: Mapping[str, int],
) -> int | None:
    """The first of the sorted candidates that the value may take over, by its place among them.

    What may not have been kept alive until now because of its size and death, no other of its size may that died as
    early: these are passed over at once."""
    most = max(_MOST_WASTE * value.size, _TINY_BYTES)
    if candidates:  # nor may it be larger than what the worst moment of the value's own life leaves
        most = min(most, peak - int(timeline[value.made : value.dead + 1].max(initial=0)) + value.size)
    number = bisect.bisect_left(candidates, (value.size, -1, ""))
    while number < len(candidates):
        size, death, name = candidates[number]
        if size > most:
            return None
        too_full = np.flatnonzero(timeline[death + 1 : value.made] > peak - size)
        if too_full.size:
            number = bisect.bisect_left(candidates, (size, death + 1 + int(too_full[-1]), ""), number)
        elif surely_at_least(extents[name], value.extent):
            return number
        else:
            number += 1  # large enough at planning, not for all sizes
    return None


def _write(
    steps: Sequence[Step], facts: _MemoryFacts, donor_of: Mapping[str, str], outputs: set[str]
) -> tuple[Step, ...]:
    given = set(donor_of.values())
    freed_after: dict[int, list[str]] = {}
    for name, position in facts.last_use.items():
        if name not in outputs and name not in given and position < len(steps):
            freed_after.setdefault(max(position, 0), []).append(name)
    planned: list[Step] = []
    for position, step in enumerate(steps):
        if isinstance(step, Allocate) and step.name in donor_of:
            step = replace(step, reuse=donor_of[step.name])
        planned.append(step)
        if position in freed_after:
            planned.append(Free(tuple(freed_after[position])))
    return tuple(planned)

"""Small values that only kernels touch lie in one piece of memory, made once a run: their addresses are sums.

To make a tensor costs the host a microsecond, and the programs of a training step have hundreds of small values (sums
of columns, statistics, gradients of biases) that nothing but kernels reads. They are dealt out of one piece, where
values that are not alive together may lie on each other.

Invariant: each value keeps its bytes from the step that makes it to its last reader; values that a library call or the
caller gets are left alone; and what a program holds grows by no more than the piece, which is small beside its peak.
"""

from __future__ import annotations

import bisect
import heapq
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass

from torchlazy.runtime.program.memory_plan import plan_report
from torchlazy.runtime.program.program import Allocate, Program, Reinterpret, Step
from torchlazy.runtime.program.steps import names_made, names_read, span_bytes

LARGEST = 1 << 18  # bytes of a value that counts as small
_ALIGNMENT = 256
_ALWAYS = 1 << 20  # bytes that a piece may have whatever the program holds; beyond that, a part of what it holds
_PART = 256
_LEAST = 4  # values that are worth a piece


@dataclass(frozen=True)
class SmallValues:
    """`names`: what such memory is made under, and what takes it over. `pieces`: for each device the bytes, and where
    in them each value lies, in the order in which the program's steps make them."""

    names: frozenset[str]
    pieces: dict[str, tuple[int, tuple[int, ...]]]


@dataclass
class _SmallValue:
    """Memory that the program makes once, under whatever names; positions are those of steps."""

    name: str
    device: str
    size: int  # bytes
    first: int
    last: int
    offset: int = 0


def place_small_values(program: Program, wants_tensor: Set[str]) -> SmallValues:
    """The small values of a program, and their places; `wants_tensor` are the names that somebody needs as tensors."""
    roots = _roots(program.steps)
    values = _small_values(program.steps, roots, {roots[name] for name in wants_tensor if name in roots})
    pieces: dict[str, tuple[int, tuple[int, ...]]] = {}
    chosen: set[str] = set()
    for device in dict.fromkeys(value.device for value in values):
        found = [value for value in values if value.device == device]
        found, size = _limited(found, max(_ALWAYS, plan_report(program.steps).peak_bytes // _PART))
        if len(found) >= _LEAST:
            pieces[device] = size, tuple(value.offset for value in found)
            chosen.update(value.name for value in found)
    taking = {step.name for step in program.steps if isinstance(step, Allocate) and roots[step.name] in chosen}
    return SmallValues(frozenset(taking), pieces)


def _roots(steps: Sequence[Step]) -> dict[str, str]:
    """From each name to the name that its memory was made under."""
    roots: dict[str, str] = {}
    for step in steps:
        if isinstance(step, Allocate) and step.reuse is not None:
            roots[step.name] = roots.get(step.reuse, step.reuse)
        elif isinstance(step, Reinterpret):
            roots[step.name] = roots.get(step.source, step.source)
        else:
            roots.update((name, name) for name in names_made(step))
    return roots


def _small_values(steps: Sequence[Step], roots: dict[str, str], left_alone: Set[str]) -> list[_SmallValue]:
    """In the order in which they are made."""
    found: dict[str, _SmallValue] = {}
    for position, step in enumerate(steps):
        if isinstance(step, Allocate) and step.reuse is None and step.name not in left_alone:
            # A size that each run computes is a kind of int of its own, which has the value of planning.
            is_fixed = all(type(n) is int for n in (*step.meta.shape, *step.meta.strides))
            if is_fixed and 0 < (size := span_bytes(step.meta)) <= LARGEST:
                found[step.name] = _SmallValue(step.name, step.meta.device, size, position, position)
        for name in names_read(step):
            value = found.get(roots.get(name, name))
            if value is not None:
                value.last = position
    return list(found.values())


def _limited(values: list[_SmallValue], most: int) -> tuple[list[_SmallValue], int]:
    """As many of the values, the smallest first, as fit into so many bytes, with their places; and the bytes."""
    largest = LARGEST
    while True:
        found = [value for value in values if value.size <= largest]
        size = _place(found)
        if size <= most:
            return found, size
        largest //= 2


def _place(values: Sequence[_SmallValue]) -> int:
    """Give each value the lowest place that is free as long as it lives; the bytes that all need together."""
    gaps: list[tuple[int, int]] = [(0, sys.maxsize)]  # what is free, in order; all begin and end aligned
    deaths: list[tuple[int, int, int]] = []  # (last step, begin, end) of those alive
    end = 0
    for value in values:
        while deaths and deaths[0][0] < value.first:
            _, begin, stop = heapq.heappop(deaths)
            _give_back(gaps, begin, stop)
        size = -(-value.size // _ALIGNMENT) * _ALIGNMENT
        place = next(place for place, (begin, stop) in enumerate(gaps) if stop - begin >= size)
        begin, stop = gaps[place]
        gaps[place : place + 1] = [(begin + size, stop)] if begin + size < stop else []
        heapq.heappush(deaths, (value.last, begin, begin + size))
        value.offset = begin
        end = max(end, begin + value.size)
    return end


def _give_back(gaps: list[tuple[int, int]], begin: int, stop: int) -> None:
    """What lay from `begin` to `stop` is free, with the gaps that it touches."""
    place = bisect.bisect_left(gaps, (begin, stop))
    if place < len(gaps) and gaps[place][0] == stop:
        stop = gaps.pop(place)[1]
    if place and gaps[place - 1][1] == begin:
        place -= 1
        begin = gaps.pop(place)[0]
    gaps.insert(place, (begin, stop))

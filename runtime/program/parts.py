"""Which steps of a program repeat: parts that are equal but for the names in them, so that their code is written once.

A model's equal layers are equal stretches of its program, forward and backward, and the memory plan repeats with them
after a few layers. Where it does not, the steps belong to no part.

Invariant: two parts of one key are the same steps over other names, which come in the same places: `names` of the one
stand for `names` of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torchlazy.runtime.program.program import Allocate, ExternCall, Launch, Program, Reinterpret, Step, ValueRef
from torchlazy.runtime.program.step_table import names_apart

_WINDOW = 16  # steps that are looked at together for where they stood before
_LEAST_STEPS = 24  # of a part: calling a shorter one costs more than its share
_LEAST_PARTS = 3
LEAST_STEPS = 4000
"""Of a program: a run with part functions takes 1 to 4 % longer on the host. Writing and compiling the text of a GPT's
step, milliseconds of one core with them and without: 12 layers, 1465 steps, 71 and 84; 24 layers, 2869 steps, 121 and
123; 48 layers, 5677 steps, 267 and 367 kB of text."""
_MOST_PERIODS = 8


@dataclass(frozen=True, slots=True)
class ProgramPart:
    """The steps from `start` to `stop`; `names` in the order in which they come, those that it makes in `made`, those
    of runtime scalars in `scalars`."""

    start: int
    stop: int
    key: Hashable
    names: tuple[str, ...]
    made: frozenset[str]
    scalars: frozenset[str]


def find_parts(program: Program) -> list[ProgramPart]:
    """The parts of the program that repeat, in order; none where it is short, or sizes change from run to run, for
    they have names that only the whole function knows."""
    if program.symbols or program.sizes or len(program.steps) < max(LEAST_STEPS, _LEAST_PARTS * _LEAST_STEPS):
        return []
    numbers: dict[Hashable, int] = {}
    named = [names_apart(step) for step in program.steps]
    keys = [numbers.setdefault(shape, len(numbers)) for shape, _ in named]
    parts = [
        _part(program.steps, named, keys, start, start + period)
        for first, period, count in _runs(keys)
        for start in range(first, first + count * period, period)
    ]
    uses = Counter(part.key for part in parts)
    return sorted((part for part in parts if uses[part.key] > 1), key=lambda part: part.start)


def _part(
    steps: Sequence[Step], named: Sequence[tuple[Hashable, list[str]]], keys: Sequence[int], start: int, stop: int
) -> ProgramPart:
    places: dict[str, int] = {}
    own = [places.setdefault(name, len(places)) for _, names in named[start:stop] for name in names]
    made: set[str] = set()
    scalars: set[str] = set()
    for step in steps[start:stop]:
        if isinstance(step, Allocate | Reinterpret):
            made.add(step.name)
        elif isinstance(step, ExternCall):
            made.update(name for name in step.outputs if name)
            _scalars_in((step.args, step.kwargs), scalars)
        elif isinstance(step, Launch):
            scalars.update(step.scalars)
    return ProgramPart(
        start, stop, (tuple(keys[start:stop]), tuple(own)), tuple(places), frozenset(made), frozenset(scalars)
    )


def _runs(keys: Sequence[int]) -> list[tuple[int, int, int]]:
    """Where the keys repeat: (start, period, how often), not overlapping."""
    values = np.asarray(keys)
    found: list[tuple[int, int, int]] = []  # (start, stop, period)
    for period in _periods(keys):
        same = np.concatenate(([False], values[:-period] == values[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1]).tolist()
        found += [
            (start, stop + period, period)
            for start, stop in zip(edges[::2], edges[1::2], strict=True)
            if stop - start >= (_LEAST_PARTS - 1) * period
        ]
    found.sort(key=lambda run: (run[0] - run[1], run[2]))  # the longest first, of these that of the shortest period
    taken = np.zeros(len(keys) + 1, dtype=bool)
    runs: list[tuple[int, int, int]] = []
    for start, stop, period in found:
        free = np.flatnonzero(np.diff(np.concatenate(([True], taken[start:stop], [True])).astype(np.int8))).tolist()
        whole = period * -(-_LEAST_STEPS // period)
        for begin, end in zip(free[::2], free[1::2], strict=True):
            if (count := (end - begin) // whole) >= _LEAST_PARTS:
                runs.append((start + begin, whole, count))
                taken[start + begin : start + begin + count * whole] = True
    return runs


def _periods(keys: Sequence[int]) -> list[int]:
    """The distances at which windows of keys most often come again."""
    last: dict[tuple[int, ...], int] = {}
    distances: Counter[int] = Counter()
    for start in range(len(keys) - _WINDOW + 1):
        window = tuple(keys[start : start + _WINDOW])
        if window in last:
            distances[start - last[window]] += 1
        last[window] = start
    return [period for period, _ in distances.most_common(_MOST_PERIODS)]


def _scalars_in(value: Any, found: set[str]) -> None:
    if isinstance(value, ValueRef) and value.scalar:
        found.add(value.name)
    elif isinstance(value, tuple | list):
        for item in value:
            _scalars_in(item, found)

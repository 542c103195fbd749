"""Detects repeated layers in a sequence of calls: runs of one period, and the layer of each call and value.

A sequence is anything that reads and makes numbered values: the operators of a trace, or the kernels of a schedule.
Calls of one `key` do the same on other values.

Invariant: nothing here is trusted for correctness. What is built by layers is compared with the whole afterwards
(plan/layers/check.py); a wrong guess costs time, never a result.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import TypeAlias

Class: TypeAlias = Hashable
"""The role of a value in its layer: values of one class differ in their layer alone."""

_CANDIDATES = 24
_LONGEST_PERIOD = 600
_MOST_PERIODS = 6
_AGREEMENT = 0.75
_LOOKED_AT = 8  # repetitions of a run, by which its layers are found


@dataclass(frozen=True)
class Calls:
    """Calls in order. `refs[i]` and `outs[i]` are the values that call i reads and makes, in a fixed order."""

    keys: Sequence[Hashable]
    refs: Sequence[tuple[int, ...]]
    outs: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Run:
    """`count` whole periods from `start` on, and `rest` calls more of the next. Calls of repetition q are of layer
    `sign * q + offset`; without a layer, `sign` is 0."""

    start: int
    period: int
    count: int
    rest: int
    sign: int = 0
    offset: int = 0

    @property
    def end(self) -> int:
        return self.start + self.period * self.count + self.rest

    def layer(self, repetition: int) -> int:
        return self.sign * repetition + self.offset

    @property
    def lowest(self) -> int:
        return min(self.layer(0), self.layer(self.count - 1))

    @property
    def highest(self) -> int:
        return max(self.layer(0), self.layer(self.count - 1))

    def block(self, layer: int) -> range:
        """The calls of a layer."""
        first = self.start + self.period * (layer - self.offset) * self.sign
        return range(first, first + self.period)


@dataclass
class Layers:
    """The runs that have layers; `of_call` by call, None outside of them; `of_value` (class, layer) and back."""

    runs: list[Run] = field(default_factory=list)
    run_of_call: list[int | None] = field(default_factory=list)
    of_call: list[int | None] = field(default_factory=list)
    of_value: dict[int, tuple[Class, int]] = field(default_factory=dict)
    values: dict[tuple[Class, int], int] = field(default_factory=dict)
    sums: frozenset[int] = frozenset()
    """Values of no layer that accumulate over the layers: partial sums."""

    def layer(self, value: int) -> int | None:
        found = self.of_value.get(value)
        return None if found is None else found[1]

    def moved(self, value: int, by: int) -> int | None:
        """The value of the same class, so many layers further on."""
        found = self.of_value.get(value)
        return None if found is None else self.values.get((found[0], found[1] + by))

    def assign(self, value: int, role: Class, layer: int) -> None:
        self.of_value[value] = (role, layer)
        self.values[role, layer] = value


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


def find_layers(
    calls: Calls, runs: Sequence[Run], inputs: Mapping[int, tuple[Class, int]] | None = None,
    hints: Mapping[int, int] | None = None, within: int | None = None, stacks: int = 1,
) -> Layers:  # fmt: skip
    """The layers of the runs' calls and values.

    A run has layers if it reads values of consecutive layers, one further with each repetition. `inputs` are values of
    known class and layer that no call makes; without, the first run of about as many periods as the run of most calls
    counts its layers by itself, and inputs have the layer of the first call that reads them. So does the first run of
    each of `stacks`, which read nothing of each other's layers (an encoder and a decoder). `hints` are layers by
    which runs are found as well. Layer numbers may be shifted by a constant: it is chosen such that `within` and the
    next layer are in.
    """
    found = Layers(of_call=[None] * len(calls.keys), run_of_call=[None] * len(calls.keys))
    for value, (role, layer) in (inputs or {}).items():
        found.assign(value, role, layer)
    made = {value for outs in calls.outs for value in outs}
    count = max(runs, key=lambda run: run.period * run.count).count if runs else 0  # of the run of most calls
    uncounted = 0 if inputs is not None else stacks
    may_count = uncounted > 0
    shared: set[int] = set()
    told = dict(hints or {})
    waiting = list(runs)
    while waiting:
        left: list[Run] = []
        for run in waiting:
            own = _with_layers(calls, run, found, told)
            if own is None and may_count and 0.75 * count <= run.count <= 1.25 * count:
                own = replace(run, sign=1)
                uncounted -= 1
            if own is None:
                left.append(run)
                continue
            may_count = False
            if within is not None:
                off = min(0, within - own.lowest) or max(0, within + 1 - own.highest)
                own = replace(own, offset=own.offset + off)
            _assign_run(calls, own, found, told)
            if inputs is None:
                _assign_inputs(calls, found, made, shared)
        if len(left) == len(waiting):
            if may_count or not uncounted:
                break
            may_count = True  # the rest is independent of the layers so far
        waiting = left
    return found


def without_foreign_calls(calls: Calls, run: Run, roles: Mapping[int, Class]) -> Run:
    """The run without calls at its end that continue it by chance: what they read or make is of other classes than in
    the period before (the next stack's first layers begin alike)."""
    for call in range(run.end - run.rest, run.end):
        for table in (calls.refs, calls.outs):
            for before, after in zip(table[call - run.period], table[call], strict=True):
                if before != after and roles.get(before, None) != roles.get(after, None):
                    return replace(run, rest=call - run.end + run.rest)
    return run


def layers_of_a_period(calls: Calls, runs: Sequence[Run], layers: Mapping[int, int]) -> int:
    """With how many layers all runs repeat, by the known layers of values; 1 where unknown."""
    found = 1
    for run in runs:
        votes: dict[int, int] = {}
        for call in range(run.start, run.end - run.period):
            pairs = [*zip(calls.refs[call], calls.refs[call + run.period], strict=True)]
            pairs += zip(calls.outs[call], calls.outs[call + run.period], strict=True)
            for a, b in pairs:
                if a != b and a in layers and b in layers:
                    step = abs(layers[b] - layers[a])
                    votes[step] = votes.get(step, 0) + 1
        step = max(votes, key=votes.__getitem__, default=0)
        if step and votes[step] >= _AGREEMENT * sum(votes.values()):
            found = lcm(found, step)
    return found


def _assign_run(calls: Calls, own: Run, found: Layers, told: dict[int, int]) -> None:
    number = len(found.runs)
    found.runs.append(own)
    for call in range(own.start, own.end):
        repetition, place = divmod(call - own.start, own.period)
        layer = own.layer(repetition)
        found.of_call[call], found.run_of_call[call] = layer, number
        for k, value in enumerate(calls.outs[call]):
            found.assign(value, (number, place, k), layer)
        for value in calls.refs[call]:  # a run that reads nothing of known layers is found by its readers
            told.setdefault(value, layer)


def _assign_inputs(calls: Calls, found: Layers, made: set[int], shared: set[int]) -> None:
    """Inputs have the layer of the first call of the last run that reads them, unless it reads one in every layer."""
    number = len(found.runs) - 1
    own = found.runs[-1]
    for call in range(own.start, own.end):
        repetition, place = divmod(call - own.start, own.period)
        layer = own.layer(repetition)
        for k, value in enumerate(calls.refs[call]):
            if value in made or value in shared:
                continue
            role = (number, place, k, "input")
            known = found.of_value.get(value)
            if known is None:
                found.assign(value, role, layer)
            elif known[0] == role and known[1] != layer:
                del found.of_value[value], found.values[known]
                shared.add(value)


def _with_layers(calls: Calls, run: Run, found: Layers, hints: Mapping[int, int]) -> Run | None:
    """The run with its layers. A layer may take several of its periods (two equal calls in each, say), and may begin
    with any of these: such that most values move on by one, and those of a repetition are of one layer."""
    best: tuple[tuple[float, float], Run] | None = None
    for periods in range(1, min(_MOST_PERIODS, run.count // 2) + 1):
        for skipped in range(periods):
            count, rest = divmod(run.count - skipped, periods)
            start = run.start + skipped * run.period
            own = Run(start, run.period * periods, count, rest * run.period + run.rest)
            step = _step_of(calls, own, found, hints) if count > 1 else None
            if step is None:
                break  # with another start neither
            score = step[2], 1.0 if periods == 1 else _share_of_one_layer(calls, own, found, hints)
            if best is None or score > best[0]:
                best = score, replace(own, sign=step[0], offset=step[1])
        if best is not None and best[0][0] == 1.0:
            break
    return None if best is None else best[1]


def _layer_of(value: int, found: Layers, hints: Mapping[int, int]) -> int | None:
    return found.layer(value) if value in found.of_value else hints.get(value)


def _share_of_one_layer(calls: Calls, run: Run, found: Layers, hints: Mapping[int, int]) -> float:
    """The share of the repetitions in which values of known layers are of one."""
    number = 0
    for repetition in range(run.count):
        first = run.start + repetition * run.period
        values = (value for place in range(first, first + run.period) for value in calls.refs[place])
        number += len({layer for v in values if (layer := _layer_of(v, found, hints)) is not None}) == 1
    return number / run.count


def _step_of(calls: Calls, run: Run, found: Layers, hints: Mapping[int, int]) -> tuple[int, int, float] | None:
    """(sign, offset, share of the values) of a run, if from each repetition to the next nearly all values of known
    layers move on by one, those in the middle."""
    votes: dict[int, int] = {}
    first: dict[int, tuple[int, int]] = {}
    middle = run.count // 2
    for number, repetition in enumerate(sorted(range(run.count - 1), key=lambda q: abs(q + 1 - middle))[:_LOOKED_AT]):
        if number == 2 and not votes:
            break
        before = run.start + repetition * run.period
        for table in (calls.refs, calls.outs):
            for place in range(before, before + run.period):
                for a, b in zip(table[place], table[place + run.period], strict=True):
                    if a == b:
                        continue
                    x, y = _layer_of(a, found, hints), _layer_of(b, found, hints)
                    if x is not None and y is not None:
                        votes[y - x] = votes.get(y - x, 0) + 1
                        first.setdefault(y - x, (x, repetition))
    step = max(votes, key=votes.__getitem__, default=0)
    if abs(step) != 1 or votes[step] < _AGREEMENT * sum(votes.values()):
        return None
    layer, repetition = first[step]
    return step, layer - step * repetition, votes[step] / sum(votes.values())

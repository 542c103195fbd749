"""Runs cuts of the lazy device; a forward and a backward seen together repeatedly are planned as one (a fused pair).

Python runs at each step and may do anything after the cut. Where a forward was followed by the same backward twice, and
nothing but that backward read what autograd held (run/segments/watch.py), the two traces are joined and compiled as
halves of one plan. From then on the forward's program holds what the plan chose, and the other values that autograd
holds are rematerialized on demand (record/rematerialize.py). When the expected backward comes, its program takes what
is held. When another one comes, or such a value is read, or memory that it is computed from is written to, it is
computed from the forward's inputs first.

One forward may have several backwards: with accumulated gradients, those of the first micro-batch, of those in between,
and of the last one with the optimizer's step. Where a backward comes that is none of its pairs, the forward is computed
twice. So what followed each forward is noted, in order, and its pairs are used only once all backwards that recur are
known.

Invariant: every value is the one that running each trace by itself would give. Nothing that a rematerialized value
depends on is overwritten before the value is computed or its last reference is gone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.record.rematerialize import RematerializedValue, make_ordinary
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.report import metrics
from torchlazy.lazy.run.segments.programs import HalfFailed, HalfPrograms
from torchlazy.lazy.run.segments.split import CutPartition, CutParts, run_parts
from torchlazy.lazy.run.segments.watch import (
    CutWatch,
    FoundPair,
    WatchedCut,
    are_ours,
    is_new,
    pair_of,
    same_trace,
    starts_with_backward,
    watched,
)
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import CutTrace

if TYPE_CHECKING:
    from torchlazy.lazy.run.driver import Driver


_MOST_FORWARDS = 16
_MOST_SEEN = 64
_RARE = 8  # one unknown backward in so many is tolerated
_MANY = 16


class _ForwardHistory:
    def __init__(self, first: CutTrace) -> None:
        self.first = first
        self.seen: deque[tuple[int, CutTrace]] = deque(maxlen=_MOST_SEEN)  # each with its running number
        self.count = 0
        self.longest = 0  # the most backwards between two occurrences of one
        self.last: dict[int, CutTrace] = {}  # by how many forwards were waiting before this one

    def note(self, second: CutTrace, before: int) -> None:
        self.count += 1
        for number, known in reversed(self.seen):
            if same_trace(known, second):
                self.longest = max(self.longest, self.count - number)
                second = known
                break
        self.seen.append((self.count, second))
        self.last[before] = second


class CutFollowers:
    """The last forwards, with the backwards that followed them."""

    def __init__(self) -> None:
        self._families: deque[_ForwardHistory] = deque(maxlen=_MOST_FORWARDS)

    def record_seen(self, first: CutTrace, second: CutTrace, before: int) -> None:
        """Note that this backward followed the forward, which ran while `before` others waited for theirs."""
        family = self._of(first)
        if family is None:
            family = _ForwardHistory(first)
            self._families.append(family)
        family.note(second, before)

    def likely(self, first: CutTrace, before: int) -> CutTrace | None:
        """The backward that followed last time, with `before` forwards waiting: in a loop they have different ones."""
        family = self._of(first)
        return None if family is None else family.last.get(before)

    def are_known(self, first: CutTrace, seconds: Sequence[CutTrace]) -> bool:
        """Whether one of these will likely follow the forward: each other one has been absent for longer than any ever
        was before it recurred, or unknown ones are rare."""
        family = self._of(first)
        if family is None:
            return True
        known: dict[int, bool] = {}
        for _, second in family.seen:
            if id(second) not in known:
                known[id(second)] = any(same_trace(second, found) for found in seconds)
        unknown = [number for number, second in family.seen if not known[id(second)]]
        if not unknown or family.count - unknown[-1] > family.longest:
            return True
        return len(family.seen) >= _MANY and len(unknown) * _RARE <= len(family.seen)

    def _of(self, first: CutTrace) -> _ForwardHistory | None:
        return next((family for family in self._families if same_trace(family.first, first)), None)


_MOST_PAIRS = 16
_STRIKES = 2  # rematerializations before a pair is given up, and one more for each ...
_USES_A_STRIKE = 8  # ... times that its backward came as expected


class _Pair:
    """A pair with its programs, and how often it was of use."""

    def __init__(self, driver: Any, found: FoundPair, frame: str) -> None:
        self.found = found
        self.frame = frame
        self.programs = HalfPrograms(driver, found.joined, found.first, frame)
        self.options = _options()
        self.uses = 0
        self.strikes = 0

    @property
    def is_waiting(self) -> bool:
        """Whether its programs are still being compiled."""
        return not self.programs.find() and not self.programs.is_given_up

    def serves(self, begun: _Pair) -> bool:
        """Whether its second program takes what the first program of `begun` holds: several backwards
        may follow one forward (those of the first and of later micro-batches of accumulated gradients)."""
        return self is begun or (
            self.programs.are_there
            and self.found.hidden == begun.found.hidden
            and self.programs.first_program == begun.programs.first_program
        )

    def add_strike(self) -> None:
        """Its values had to be rematerialized."""
        self.strikes += 1
        if self.strikes > _STRIKES + self.uses // _USES_A_STRIKE:
            self.programs.is_given_up = True


class CutHalves:
    """Runs the recorder's cuts; pairs of them as halves of one plan."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._watch = CutWatch()
        self._parts = CutParts()
        self._followers = CutFollowers()
        self._pairs: list[_Pair] = []  # those used last in front

    def forget(self) -> None:
        """Forget every pair; rematerialized values are still computed on demand."""
        self._watch = CutWatch()
        self._parts = CutParts()
        self._followers = CutFollowers()
        self._pairs.clear()

    def _before(self) -> int:
        """How many forwards wait for their backward."""
        return len(LazyTensor.recorder.rematerializing) + len(self._watch.waiting())

    def leave_mode(self) -> None:
        """Ordinary tensors may be written to unseen from now on."""
        self._watch.forget_held()

    @property
    def found(self) -> list[FoundPair]:
        """The pairs that were seen together, those used last in front."""
        return [pair.found for pair in self._pairs]

    def run(
        self, trace: CutTrace, given: list[LazyStorage], versions: Sequence[int], live: Sequence[LazyStorage],
        memory: list[Any], scalars: list[Any], cause: str, frame: str,
    ) -> list[Any]:  # fmt: skip
        """The outputs of a cut trace, as the driver gives them; a `RematerializedValue` for one that is not in memory.

        `given`: the storages behind its inputs and `versions` theirs when they were read first; `live`: those that get
        its outputs; `memory`: what the inputs hold, `RematerializedValue`s among it. Empties `given` and `memory`.
        """
        parts = self._split(trace, given, versions, live)

        if parts is None:
            return self._run_one(trace, given, versions, live, memory, scalars, False, cause, frame)
        run = partial(self._run_one, cause=cause, frame=frame)
        return run_parts(parts, run, trace, given, versions, live, memory, scalars)

    def _split(
        self, trace: CutTrace, given: list[LazyStorage], versions: Sequence[int], live: Sequence[LazyStorage]
    ) -> CutPartition | None:
        """The parts of a cut that holds the backward of more than one forward, or a forward behind its backward."""
        waiting, driver, watching = LazyTensor.recorder.rematerializing, self.driver, self._watch.waiting()
        if not (waiting or watching) or driver.listeners or driver.shadow is not None or config.debug:
            return None
        forwards = [*(crossing.watched for crossing in list(waiting)), *watching]
        return self._parts.of(trace, given, versions, live, forwards)

    def _run_one(
        self, trace: CutTrace, given: list[LazyStorage], versions: Sequence[int], live: Sequence[LazyStorage],
        memory: list[Any], scalars: list[Any], continues: bool, cause: str, frame: str,
    ) -> list[Any]:  # fmt: skip
        """`run` for a cut that is not split, or a part of one; `continues`: it is a later part of a backward."""
        waiting = LazyTensor.recorder.rematerializing
        begun: list[WatchedCut] = []
        if waiting or RematerializedValue in map(type, memory):
            found = self._expected(waiting, trace, given, versions, memory)
            if found is not None:
                given.clear()
                crossing, pair = found
                if crossing.is_unread():
                    return self._run_second(crossing, pair, memory, scalars)
            begun = [crossing.watched for crossing in list(waiting)]
            _rematerialize_for(
                list(waiting), given, memory, trace, is_backward=continues or starts_with_backward(trace)
            )
        pair_begun = self._begins(trace, given, live)
        if pair_begun is not None:
            return self._run_first(pair_begun, trace, given, live, memory, scalars)
        following = self._watch.follows(trace, given, versions, continues, begun) if given else None
        forward = self._watch.may_be_a_forward(trace, given, live, self._before())
        given.clear()
        values: list[Any] | None = None
        if getattr(self.driver, "graphs", None):
            values = self.driver.by_graph(trace, memory, scalars)
        if values is None:
            values = self.driver(trace, memory, scalars, cause, frame)
        if following is not None:
            self._followers.record_seen(following.watched.trace, trace, following.watched.before)
            pair_found = self._watch.has_followed(following, trace)
            if pair_found is not None:
                self._add(pair_found, frame)
        if forward is not None:
            self._watch.watch(forward)
        return values

    def _add(self, found: FoundPair, frame: str) -> None:
        """A new pair. All pairs of one forward hide the same outputs: each can take what another's forward holds."""
        alike = [pair for pair in self._pairs if same_trace(pair.found.first, found.first)]
        hidden = found.hidden.intersection(*(pair.found.hidden for pair in alike))
        narrowed = _with_hidden(found, hidden)
        self._pairs.insert(0, _Pair(self.driver, narrowed or found, frame))
        if narrowed is not None:
            for pair in alike:
                self._narrow(pair, hidden)
        del self._pairs[_MOST_PAIRS:]

    def _narrow(self, pair: _Pair, hidden: frozenset[int]) -> None:
        """Let the pair rematerialize these outputs only; it is dropped where they are too small."""
        if pair.found.hidden == hidden or pair not in self._pairs:
            return
        place = self._pairs.index(pair)
        narrowed = _with_hidden(pair.found, hidden)
        self._pairs[place : place + 1] = [] if narrowed is None else [_Pair(self.driver, narrowed, pair.frame)]

    # ---------------------------------------------------------------- the first half

    def _begins(self, trace: CutTrace, given: Sequence[LazyStorage], live: Sequence[LazyStorage]) -> _Pair | None:
        """The pair whose first half this is, if its programs are there and everything is as it was."""
        driver = self.driver
        pairs = [pair for pair in self._pairs if same_trace(pair.found.first, trace)]
        if not pairs or driver.listeners or driver.shadow is not None or config.debug:
            return None
        if any(pair.is_waiting for pair in pairs):  # a backward may come that could not take over what is held
            return None
        likely = self._followers.likely(trace, self._before())
        there = [pair for pair in pairs if pair.programs.are_there and pair.options == _options()]
        there.sort(key=lambda pair: likely is None or not same_trace(pair.found.second, likely))
        pair = there[0] if there else None
        if pair is None or pair.programs.is_given_up:
            return None
        if not self._followers.are_known(trace, [other.found.second for other in pairs]):
            return None
        if not all(is_new(live[output]) for output in pair.found.hidden) or not are_ours(given):
            return None
        return pair

    def _run_first(
        self, pair: _Pair, trace: CutTrace, given: list[LazyStorage], live: Sequence[LazyStorage],
        memory: list[Any], scalars: list[Any],
    ) -> list[Any]:  # fmt: skip
        programs, found = pair.programs, pair.found
        siblings = [other for other in self._pairs if same_trace(other.found.first, trace) and other.serves(pair)]
        kept = {n: memory[n] for other in siblings for n in (*other.found.cone, *other.programs.inputs_kept)}
        sources = {n for other in siblings for n in (*other.found.sources, *other.programs.inputs_kept)}
        results = {number for other in siblings for number in other.programs.results_kept}
        begun = watched(trace, given, live, self._before())
        written = {id(storage) for storage in live}
        lost = frozenset(n for n, storage in enumerate(given) if id(storage) in written or storage.pinned)
        alike = _held_alike(pair, given, lost)
        given.clear()
        metrics.hits += 1
        try:
            made = programs.run_first(memory, scalars)
        except HalfFailed as failed:
            return failed.values
        values = programs.visible(made)
        for number, value in alike.items():
            made[number] = value
        alike.clear()
        for number in range(len(found.joined.visible)):
            if number not in results:
                made[number] = None  # not to be kept alive from here
        crossing = Crossing(self, pair, made, kept, scalars, sources, begun, lost)
        for output in found.hidden:
            values[output] = RematerializedValue(crossing, output)
        LazyTensor.recorder.rematerializing.add(crossing)
        return values

    # ---------------------------------------------------------------- the second half

    def _expected(
        self, waiting: weakref.WeakSet[Any], trace: CutTrace, given: Sequence[LazyStorage], versions: Sequence[int],
        memory: Sequence[Any],
    ) -> tuple[Crossing, _Pair] | None:  # fmt: skip
        """The forward that waits for this trace, and the pair of the two."""
        pairs = [pair for pair in self._pairs if same_trace(pair.found.second, trace)]
        if not pairs or self.driver.listeners or self.driver.shadow is not None:
            return None
        for crossing in waiting:
            for pair in pairs:
                if same_trace(pair.found.first, crossing.pair.found.first) and pair.serves(crossing.pair):
                    made, same = crossing.watched.places.of(given, versions)
                    if (made, same) != (pair.found.made, pair.found.given):
                        continue
                    others = [memory[n] for _, n in trace.donations if made[n] is None and same[n] is None]
                    if crossing.is_computed_from(others):  # the plan assumes that it is not the forward's memory
                        continue
                    if all(type(m) is not RematerializedValue or m.source is crossing for m in memory):
                        return crossing, pair
        return None

    def learn(self, pair: _Pair, read: Sequence[int]) -> None:
        """Values of a pair had to be rematerialized; outputs that were read are kept in memory from now on."""
        pair.add_strike()
        if read:
            hidden = pair.found.hidden.difference(read)
            for other in [o for o in self._pairs if same_trace(o.found.first, pair.found.first)]:
                self._narrow(other, other.found.hidden & hidden)

    def _run_second(self, crossing: Crossing, pair: _Pair, memory: list[Any], scalars: list[Any]) -> list[Any]:
        made, kept, both = crossing.hand_over(len(pair.found.first.inputs), scalars)
        pair.uses += 1
        self._followers.record_seen(crossing.pair.found.first, pair.found.second, crossing.watched.before)
        if self._pairs[0] is not pair:
            self._pairs.remove(pair)
            self._pairs.insert(0, pair)
        metrics.hits += 1
        return pair.programs.run_second(made, kept, memory, both)


class Crossing:
    """What is held of a forward until its backward comes, and what can be rematerialized from it."""

    def __init__(
        self, halves: CutHalves, pair: _Pair, made: list[Any], kept: dict[int, torch.Tensor], scalars: list[Any],
        sources: set[int], watched: WatchedCut, lost: frozenset[int],
    ) -> None:  # fmt: skip
        """`kept`: inputs of the forward; `sources`: those of them whose values are needed, not only their metadata;
        `lost`: those that it wrote to, or that others may write to."""
        self.pair = pair
        self.watched = watched
        self._lost = lost
        self.promised: dict[int, weakref.ref[LazyStorage]] = {}  # filled by the recorder, by output
        self._halves = halves
        self._made = made
        self._kept = kept
        self._sources = {kept[number].untyped_storage()._cdata for number in sources}
        self._scalars = scalars
        self._is_over = False

    def is_unread(self) -> bool:
        """Whether nothing refers to a rematerialized value any more."""
        return all(ref() is None for ref in self.promised.values())

    def hand_over(self, inputs: int, scalars: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """What the second program takes: what the first gave, its inputs by number, and the scalars of both."""
        kept = [self._kept.get(number) for number in range(inputs)]
        made, both = self._made, [*self._scalars, *scalars]
        self._end()
        return made, kept, both

    def held_as(self, key: Hashable, inputs: tuple[int | None, ...]) -> torch.Tensor | None:
        """The held value with this recipe (`key`) over these inputs, if there is one."""
        number = self.pair.programs.number_of.get((key, inputs))
        if self._is_over or number is None or not self._lost.isdisjoint(inputs):
            return None
        found: torch.Tensor = self._made[number]
        return found

    def _end(self) -> None:
        self._is_over = True
        self._made, self._kept = [], {}
        LazyTensor.recorder.rematerializing.discard(self)

    def is_computed_from(self, memory: Sequence[Any]) -> bool:
        """Whether rematerialized values depend on some of this memory."""
        tensors = (value for value in memory if type(value) is not RematerializedValue)
        return any(tensor.untyped_storage()._cdata in self._sources for tensor in tensors)

    def rematerialize_all(self, read: int | None = None) -> None:
        """Compute every value that is still referred to; `read`: the output that is being read, if any."""
        self.rematerialize((), () if read is None else (read,))

    def rematerialize(self, more: Sequence[int], read: Sequence[int] = ()) -> dict[int, Any]:
        """`rematerialize_all`, and the outputs `more`, which are returned: values, or the error of one that has
        none."""
        recorder = LazyTensor.recorder
        with recorder.apart():
            if self._is_over:
                return {}
            waiting = {}
            for output, ref in self.promised.items():
                storage = ref()
                if storage is not None and storage.__dict__.get("promise") is not None:
                    waiting[output] = storage
            wanted = sorted({*waiting, *more})
            kept, scalars = self._kept, self._scalars
            self._end()
            if not wanted:
                return {}
            self._halves.learn(self.pair, read)
            first = self.pair.found.first
            needed = sorted(self.pair.found.cone)
            again = replace(
                first,
                inputs=tuple(first.inputs[number] for number in needed),
                outputs=tuple(first.outputs[output] for output in wanted),
                donations=(),
                writes=(),
            )
            values = dict(
                zip(
                    wanted,
                    self._halves.driver(again, [kept[number] for number in needed], scalars, "a promised value", ""),
                    strict=True,
                )
            )
            for output, storage in waiting.items():
                value = values[output]
                if isinstance(value, BaseException):
                    make_ordinary(storage, None, value)
                else:
                    make_ordinary(storage, value)
                    recorder.register_memory(storage)
            return values


def _held_alike(pair: _Pair, given: Sequence[LazyStorage], lost: frozenset[int]) -> dict[int, Any]:
    """By number, what a forward that is about to run will hold and others hold already: computed in the same way from
    memory that was not written to since (half-precision copies of weights)."""
    found: dict[int, Any] = {}
    recipes = {n: recipe for n, recipe in pair.programs.recipes.items() if lost.isdisjoint(recipe.inputs)}
    waiting = list(LazyTensor.recorder.rematerializing) if recipes else []
    versions = [storage.version for storage in given]
    for crossing in waiting:
        _, same = crossing.watched.places.of(given, versions)
        for number, recipe in recipes.items():
            if number not in found:
                value = crossing.held_as(recipe.key, tuple(same[place] for place in recipe.inputs))
                if value is not None:
                    found[number] = value
    return found


def _with_hidden(found: FoundPair, hidden: frozenset[int]) -> FoundPair | None:
    if hidden == found.hidden:
        return found
    return pair_of(found.first, found.second, found.made, found.given, hidden)


def _rematerialize_for(
    waiting: Sequence[Crossing], given: Sequence[LazyStorage], memory: list[Any], trace: CutTrace, *, is_backward: bool
) -> None:
    """Before an unexpected trace runs: compute the promises that it reads, and those whose sources it overwrites."""
    read: dict[int, list[int]] = {}
    for position, value in enumerate(memory):
        if type(value) is RematerializedValue:
            read.setdefault(id(value.source), []).append(position)
    for crossing in waiting:
        positions = read.get(id(crossing), [])
        if positions:
            outputs = [memory[position].output for position in positions]
            values = crossing.rematerialize(outputs, () if is_backward else outputs)
            for position in positions:
                value = values[memory[position].output]
                if isinstance(value, BaseException):
                    raise value
                memory[position] = value
        elif crossing.is_computed_from([memory[number] for _, number in trace.donations]):
            crossing.rematerialize_all()
    for position, value in enumerate(memory):
        if type(value) is RematerializedValue:  # computed meanwhile: its storage is an ordinary one
            memory[position] = given[position].real


def _options() -> tuple[str, str, torch.dtype]:
    """The settings that a program depends on."""
    return config.precision, config.recompute, torch.get_default_dtype()

"""Replays of a template for all sizes with unbacked ones: steps are bound to the sizes while the call runs.

One replay serves all calls with arguments of certain sizes, whatever the unbacked sizes are. Behind each step that
gives sizes the steps that depend on them are bound (compiled/replay/unbacked_steps.py), and the conditions that the
captures had in common are checked.

Invariant: a step runs only when each size that it depends on is known, and all of what a call leaves behind waits
until everything that depends on its data is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchlazy.lazy.compiled.capture.view_checks import SizedOperator
from torchlazy.lazy.compiled.replay.pairs import memory_read
from torchlazy.lazy.compiled.replay.replay import Deeper, Handles, Replay
from torchlazy.lazy.compiled.replay.results import Ending
from torchlazy.lazy.compiled.replay.state import ReplayState
from torchlazy.lazy.compiled.replay.unbacked_steps import CannotBind, NeedsBinding, UnbackedForm, UnbackedPart
from torchlazy.lazy.compiled.sizes.memory_checks import memory_misfit
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.numbers import kind_of_size, numbers_taken, unbacked_sources
from torchlazy.lazy.numbers.expr import SourceRef, evaluator
from torchlazy.lazy.numbers.fit import function_of, symbols_in
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.torch_private.dispatch import below_autograd

_MOST_FITS = 4096
_MOST_VIEWS = 4096


@dataclass(eq=False)
class _KnownAfterStep:
    """What is known behind one step."""

    sources: list[tuple[int, Any, int | None]] = field(default_factory=list)  # source, kind, symbol where it is one
    texts: list[str] = field(default_factory=list)  # expressions of the sizes that are no symbol
    others: list[int] = field(default_factory=list)  # their sources
    guards: list[str] = field(default_factory=list)
    views: list[tuple[SizedOperator, tuple[int, ...]]] = field(default_factory=list)
    layouts: list[tuple[t.LazyCall, UnbackedPart | None]] = field(default_factory=list)
    steps: list[tuple[t.Step, UnbackedPart]] = field(default_factory=list)
    memory: list[tuple[t.Step | None, tuple[t.Step, ...]]] = field(default_factory=list)  # readers, makers
    ending: UnbackedPart | None = None
    claimed: Callable[..., list[Any]] = lambda *_: []
    asked: Callable[..., list[Any]] = lambda *_: []


class UnbackedReplay(Replay):
    """Runs a template at any unbacked sizes. Raises NotLate where its steps cannot be bound one by one.

    `template`: that for the arguments' sizes, with unbacked sizes as in a captured call; `symbols`: their values there.
    """

    is_late = True

    def __init__(
        self,
        recorder: Recorder,
        template: t.CallTemplate,
        handles: Handles,
        deeper: Deeper | None,
        late: UnbackedForm,
        symbols: Sequence[int],
        backend: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(recorder, template, handles, deeper, backend)
        self._handle_of = handles
        self._symbols = tuple(symbols)
        self._fits: dict[tuple[Any, ...], bool] = {}
        self._views: dict[tuple[Any, ...], bool] = {}
        places = {id(step): number for number, step in enumerate(template.steps)}
        if any(id(step) not in places for step in self.steps.steps):
            raise CannotBind("its segments were split")
        known_at = self._learn_sizes(late)
        order = [(at, step, places[id(step)]) for at, step in enumerate(self.steps.steps)]
        parts: dict[int, UnbackedPart] = {}
        for at, step, place in order:
            if place in late.layouts:
                if at not in self._known_after:
                    raise CannotBind("an operator that runs at once gives the same size at each call")
                self._known_after[at].layouts.append((step, late.layouts[place]))  # type: ignore[arg-type]
                _check(late.layouts[place], at + 1, known_at)
            part = late.steps[place]
            if part is not None:
                self._known_after[_check(part, at, known_at)].steps.append((step, part))
                parts[id(step)] = part
        if late.ending is not None:
            self._known_after[_check(late.ending, len(order), known_at)].ending = late.ending
        self._note_memory(parts, late.ending, known_at)
        self._pairs = {
            key: pair
            for key, pair in self._pairs.items()
            if id(pair.pair.first) not in parts and id(pair.pair.second) not in parts
        }

    # ---------------------------------------------------------------- made once

    def _learn_sizes(self, late: UnbackedForm) -> dict[int, int]:
        """Remove the unbacked sizes from the checks; gives for each symbol the step behind which it is known."""
        sources = unbacked_sources(self.template)
        taken = numbers_taken(self.template)
        places = {source: number for number, source in enumerate(sources)}
        symbols = {place - late.first_unbacked: symbol for symbol, place in enumerate(late.form.places)}
        self._known_after: dict[int, _KnownAfterStep] = {}
        known_at: dict[int, int] = {}
        for at in sorted(self._midway):
            _, checks = self._midway[at]
            known = self._known_after[at] = _KnownAfterStep()
            others = []
            for expression, then in checks:
                if not isinstance(expression, SourceRef) or expression.place not in places:
                    others.append((expression, then))
                    continue
                source = expression.place
                symbol = symbols.get(places[source])
                known.sources.append((source, kind_of_size(taken[source]), symbol))
                if symbol is None:
                    known.others.append(source)
                    known.texts.append(late.form.late[places[source]])
                else:
                    known_at[symbol] = at
            self._midway[at] = evaluator([expression for expression, _ in others]), others
        for known in self._known_after.values():
            known.claimed = function_of(late.form.symbols, known.texts)
        late_symbols = frozenset(known_at)
        for text in late.form.guards:
            if reads := symbols_in(text) & late_symbols:
                self._known_after[max(known_at[symbol] for symbol in reads)].guards.append(text)
        for view in late.form.views:
            if reads := view.reads & late_symbols:
                self._known_after[max(known_at[symbol] for symbol in reads)].views.append(
                    (view, tuple(sorted(view.reads)))
                )
        for known in self._known_after.values():
            known.asked = function_of(late.form.symbols, known.guards)
        for at, known in self._known_after.items():
            for text in known.texts:
                if any(known_at.get(symbol, -1) > at for symbol in symbols_in(text)):
                    raise CannotBind("a size follows from one that is known later")
        return known_at

    def _note_memory(
        self, parts: dict[int, UnbackedPart], ending: UnbackedPart | None, known_at: dict[int, int]
    ) -> None:
        makers = {
            target.place: step
            for step in self.steps.steps
            if isinstance(step, t.Segment)
            for target in step.targets
            if isinstance(target, t.FromStep)
        }
        readers: list[tuple[t.Step | None, list[int]]] = [
            (step, [memory.place for memory in memory_read(step) if isinstance(memory, t.FromStep)])
            for step in self.steps.steps
            if isinstance(step, t.Segment)
        ]
        template = self.template
        results = (*template.results, *(r for effect in template.effects for r in effect.results))
        given = [r.memory.place for r in results if isinstance(r, t.TensorResult) and isinstance(r.memory, t.FromStep)]
        for reader, places in (*readers, (None, given)):
            made = {id(makers[place]): makers[place] for place in places if place in makers}
            own = ending if reader is None else parts.get(id(reader))
            found = [part for part in (own, *map(parts.get, made)) if part is not None]
            if found:
                at = max(known_at[symbol] for part in found for symbol in part.reads)
                self._known_after[at].memory.append((reader, tuple(made.values())))

    # ---------------------------------------------------------------- running

    def _prepare(self, state: ReplayState) -> None:
        super()._prepare(state)
        state.sizes = list(self._symbols)

    def _go(self, state: ReplayState, start: int) -> int | None:
        """Operators are inferred outside of where steps run: what is to be made for new sizes interrupts the run."""
        while True:
            stopped = super()._go(state, start)
            if stopped is None or not state.needs_binding:
                return stopped
            state.needs_binding = False
            if not self._is_bound(self._known_after[stopped], state, True):
                return stopped
            if stopped == self._settled_at:
                with below_autograd():
                    state.commit()
            start = stopped + 1

    def _goes_on(self, state: ReplayState, number: int) -> bool:
        if not super()._goes_on(state, number):
            return False
        try:
            return self._is_bound(self._known_after[number], state, False)
        except NeedsBinding:
            state.needs_binding = True
            return False

    def _is_bound(self, known: _KnownAfterStep, state: ReplayState, makes: bool) -> bool:
        """Bind what the sizes known now determine; False where it is not what the captures had in common. Unbound where
        something is to be made first and `makes` is False."""
        sizes, sources, now = state.sizes, state.sources, state.now
        for source, kind, symbol in known.sources:
            value = sources[source]
            if kind_of_size(value) is not kind and (type(value) is not type(kind) or value != kind):
                return False
            if symbol is not None:
                sizes[symbol] = value
        try:
            if known.others and known.claimed(*sizes) != [sources[source] for source in known.others]:
                return False
            if known.guards and not all(known.asked(*sizes)):
                return False
        except ArithmeticError:
            return False
        if not all(self._shows(view, reads, sizes, makes) for view, reads in known.views):
            return False
        for call, part in known.layouts:
            if part is not None:
                laid = part.at(sizes, makes)
                if laid is None:
                    return False
                call = laid.step
            state.lay_out(call)
        for step, part in known.steps:
            bound = part.at(sizes, makes)
            if bound is None:
                return False
            now[id(step)] = bound
        if known.ending is not None:
            state.ending = known.ending.at(sizes, makes)
        return all(self._has_memory(reader, makers, state, makes) for reader, makers in known.memory)

    def _shows(self, view: SizedOperator, reads: Sequence[int], sizes: Sequence[int], makes: bool) -> bool:
        key = (view, *[sizes[symbol] for symbol in reads])
        found = self._views.get(key)
        if found is None:
            if not makes:
                raise NeedsBinding
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[key] = view.stays(sizes)
        return found

    def _has_memory(self, reader: t.Step | None, makers: Sequence[t.Step], state: ReplayState, makes: bool) -> bool:
        now = state.now
        own = state.ending if reader is None else now.get(id(reader))
        key = (reader, own, *[now.get(id(maker)) for maker in makers])
        found = self._fits.get(key)
        if found is None:
            if not makes:
                raise NeedsBinding
            steps = [now[id(step)].step if id(step) in now else step for step in makers]
            template = self.template if own is None or reader is not None else own.template
            if reader is not None:
                steps.append(reader if own is None else own.step)
                template = replace(template, results=(), effects=())
            if len(self._fits) >= _MOST_FITS:
                self._fits.clear()
            misfit = memory_misfit(replace(template, steps=tuple(steps)), state.leaves, self.recorder)
            found = self._fits[key] = not misfit
        return found

    def _run(self, step: t.Step, state: ReplayState) -> None:
        if type(step) is t.Segment:
            self._segment(step, state)
            return
        bound = state.now.get(id(step))
        now = step if bound is None else bound.step
        if type(now) is t.LazyCall:
            state.run_operator(now)  # laid out once its sizes are known
        else:
            super()._run(now, state)

    def _outputs(self, step: t.Segment, memory: list[Any], scalars: list[Any], state: ReplayState) -> list[Any]:
        bound = state.now.get(id(step))
        if bound is None:
            return super()._outputs(step, memory, scalars, state)
        if bound.handle is None:
            bound.handle = self._handle_of(bound.step, False)
        if bound.scalars is not None:
            scalars = bound.scalars(state.sources)
        return bound.handle.run(memory, scalars)  # type: ignore[no-any-return]

    def _ending_of(self, state: ReplayState) -> Ending:
        return self._ending if state.ending is None else state.ending.ending  # type: ignore[no-any-return]


def _check(part: UnbackedPart | None, at: int, known_at: dict[int, int]) -> int:
    """Behind which step a part that is needed at step `at` is known. Raises NotLate where that is too late."""
    known = max((known_at[symbol] for symbol in part.reads), default=-1) if part is not None else -1
    if known >= at:
        raise CannotBind("a step comes before a size that it depends on")
    return known


__all__ = ["UnbackedReplay"]

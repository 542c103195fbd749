"""Steps of a template for all sizes that are bound once the unbacked sizes that they depend on are known.

Each step has its numbers as functions of the sizes' symbols. A step at sizes that were seen is kept; at others it is
made from its recorded form, and compared with what its operators give there.

Invariant: a bound step is that of the template which `SizedCall.template_for` makes for all sizes of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchlazy.lazy.compiled.replay.handle import ProgramHandle
from torchlazy.lazy.compiled.replay.results import Ending
from torchlazy.lazy.compiled.sizes.dynamic_template import SizedCall, SizedForm, SizedTrace
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.numbers import (
    Collected,
    GivenNumbers,
    checks_with_numbers,
    ending_with_numbers,
    step_with_numbers,
    unbacked_sources,
)
from torchlazy.lazy.numbers.expr import SourceRef, evaluator
from torchlazy.lazy.numbers.fit import function_of, symbols_in

_MOST_BOUND = 1024  # of one step
_STEPS = (t.Segment, t.LazyCall, t.LazyItem, t.ToHost, t.ToLazy)


class CannotBind(Exception):
    """The template is made anew for each combination of sizes; the message has the reason."""


class NeedsBinding(Exception):
    """What depends on the sizes was not made yet for these."""


@dataclass(eq=False)
class Bound:
    """A step at known sizes. `scalars`: what computes its numbers, where these are not those of the recorded step."""

    step: t.Step
    scalars: Callable[[Sequence[Any]], list[Any]] | None = None
    handle: ProgramHandle | None = None  # of a segment


@dataclass(eq=False)
class BoundEnding:
    """Results and effects at known sizes, with the template that has them."""

    template: t.CallTemplate
    ending: Ending


@dataclass(eq=False)
class UnbackedPart:
    """A part of a template that depends on unbacked sizes. `reads`: the symbols of these."""

    reads: frozenset[int]
    values: Callable[..., list[Any]]
    make: Callable[[list[Any]], Any]  # None: the operators do something else at these sizes
    kept: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def at(self, symbols: Sequence[int], makes: bool) -> Any:
        """The part where the symbols have these values; None where there is none. Raises Unbound where it is
        not made yet and `makes` is False."""
        try:
            values = self.values(*symbols)
        except ArithmeticError:
            return None
        key = tuple(values)
        found = self.kept.get(key, self)
        if found is self:
            if not makes:
                raise NeedsBinding
            while len(self.kept) >= _MOST_BOUND:
                self.kept.pop(next(iter(self.kept)))
            found = self.kept[key] = self.make(values)
        return found


class UnbackedForm:
    """The steps and the ending of one template for all sizes, by their numbers in the template.

    Raises NotLate where a number that is no size depends on unbacked sizes.
    """

    def __init__(self, sized: SizedCall) -> None:
        self.form = form = sized.form()
        self.template = template = sized.last.template
        self.first_unbacked = len(sized.last.sizes.sizes) + len(sized.last.sizes.others)
        self._late = frozenset(i for i, place in enumerate(form.places) if place >= self.first_unbacked)
        texts = _Texts(form)
        self.steps: list[UnbackedPart | None] = []
        self.layouts: dict[int, UnbackedPart | None] = {}  # of the results of operators that run at once
        for number, step in enumerate(template.steps):
            if isinstance(step, t.LazyCall):
                self.layouts[number] = self._step(replace(step, args=(), kwargs=()), texts)
                step = replace(step, geometries=())
            self.steps.append(self._step(step, texts))
        sources = set(unbacked_sources(template))
        for check in template.checks:
            found = Collected()
            checks_with_numbers((check,), found)
            is_late = isinstance(check[0], SourceRef) and check[0].place in sources
            if self._reads(texts.of(found)[0]) and not is_late:
                raise CannotBind("a condition of its Python depends on unbacked sizes")
        found = Collected()
        ending_with_numbers(template, found)
        self.ending = self._ending(texts.of(found)[0], len(found.ints))

    def _reads(self, texts: Sequence[str]) -> frozenset[int]:
        return frozenset().union(*map(symbols_in, texts)) & self._late

    def _step(self, step: t.Step, texts: _Texts) -> UnbackedPart | None:
        found = Collected()
        step_with_numbers(step, found)
        own, traces = texts.of(found)
        reads = self._reads(own)
        if not reads:
            return None
        if not isinstance(step, _STEPS):
            raise CannotBind(f"a {type(step).__name__} depends on unbacked sizes")
        ints, floats = len(found.ints), len(found.floats)

        def make(values: list[Any]) -> Bound | None:
            made, at = [], ints + floats
            for sized in traces:
                trace = sized.at(values[at : at + len(sized.texts)])
                at += len(sized.texts)
                if trace is None or sized.fit.misfit(trace):
                    return None
                made.append(trace)
            bound = step_with_numbers(step, GivenNumbers(values[:ints], values[ints : ints + floats], made))
            scalars = None
            if isinstance(step, t.Segment) and isinstance(bound, t.Segment) and step.scalars != bound.scalars:
                scalars = evaluator(bound.scalars)
            return Bound(bound, scalars)

        return UnbackedPart(reads, function_of(self.form.symbols, own), make)

    def _ending(self, texts: Sequence[str], ints: int) -> UnbackedPart | None:
        reads = self._reads(texts)
        if not reads:
            return None

        def make(values: list[Any]) -> BoundEnding:
            template = ending_with_numbers(self.template, GivenNumbers(values[:ints], values[ints:], ()))
            return BoundEnding(template, Ending(template))

        return UnbackedPart(reads, function_of(self.form.symbols, texts), make)


class _Texts:
    """The texts of a form, given out in the order in which its template is traversed."""

    def __init__(self, form: SizedForm) -> None:
        self._ints, self._floats = iter(form.ints), iter(form.floats)
        self._traces: Iterator[SizedTrace] = iter(form.traces)

    def of(self, found: Collected) -> tuple[list[str], list[SizedTrace]]:
        """Those of the numbers that were collected now, ints first, then floats, then those of the traces."""
        texts = [next(self._ints) for _ in found.ints]
        texts += [next(self._floats) for _ in found.floats]
        traces = [next(self._traces) for _ in found.traces]
        for trace in traces:
            texts += trace.texts
        return texts, traces


__all__ = ["Bound", "BoundEnding", "CannotBind", "NeedsBinding", "UnbackedForm", "UnbackedPart"]

"""A call template for all sizes, made from captures of one callable that differ in sizes and in what follows from them.

Invariant: it gives a template for other sizes only where every size of the arguments is what its symbols say, what the
Python asked of sizes has the answers that it had, every operator's result has the size that the operator gives, and
all memory has the size that its program expects. Where Python got a size unseen (`range(n)`, NumPy), all captures
behaved alike; a user of such a template lets the Python run now and then and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchlazy.lazy.compiled.capture.call import Captured
from torchlazy.lazy.compiled.capture.view_checks import SizedOperator, TraceFit, Workspaces, sized_operators
from torchlazy.lazy.compiled.sizes.memory_checks import memory_misfit
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.difference import difference, plain
from torchlazy.lazy.compiled.template.numbers import (
    CallSizes,
    GivenNumbers,
    collected,
    kinds_of_sizes,
    numbers_taken,
    unbacked_sizes,
    unbacked_sources_of,
    with_numbers,
)
from torchlazy.lazy.numbers.fit import Column, DoesNotFit, SizeFit, function_of, symbols_in
from torchlazy.lazy.numbers.matcher import Matcher
from torchlazy.lazy.numbers.questions import OPERATIONS, Computed, SizeQuestion, SizeQuestions, SizeRead
from torchlazy.lazy.numbers.unify import CannotUnify, unify
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.trace.skeleton import assemble_trace, decompose_trace
from torchlazy.lazy.trace.trace import CutTrace

_MOST_MADE = 512  # traces of one segment
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
_QUESTIONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


_PLAIN = (
    "its Python takes the plain value of a size or counter (as range(n), a format and len(x) do); write x.shape[0] for "
    "len(x)"
)


@dataclass(frozen=True, eq=False)
class Sample:
    """One captured call and its sizes. `asked`: what its Python asked of sizes, None where this was not recorded."""

    sizes: CallSizes
    captured: Captured
    asked: SizeQuestions | None
    ints: tuple[int | None, ...] = ()  # the plain ints among its arguments, None for all else

    @property
    def template(self) -> t.CallTemplate:
        assert self.captured.template is not None
        return self.captured.template

    @property
    def late(self) -> tuple[int, ...]:
        """Its unbacked sizes: those that the data decided while the call ran."""
        return unbacked_sizes(self.template)


@dataclass(frozen=True, eq=False)
class SizedForm:
    """A template for all sizes as expressions: texts over `symbols` of them, each read off a place among the sizes of
    the arguments and, behind these, the unbacked ones. The texts of ints and floats stand in the order in which a
    template is traversed (compiled/template/numbers.py). The Python runs as it did where each guard and view holds."""

    symbols: int
    places: tuple[int, ...]
    late: tuple[str, ...]
    ints: tuple[str, ...]
    floats: tuple[str, ...]
    traces: tuple[SizedTrace, ...]
    guards: tuple[str, ...]
    views: tuple[SizedOperator, ...]


def ints_among(leaves: Sequence[Any]) -> tuple[int | None, ...]:
    """The arguments that are plain ints, None for the others."""
    return tuple([leaf if type(leaf) is int else None for leaf in leaves])


class NeedsMore(Exception):
    """More captures are needed to find what follows from what."""


class SizedCall:
    """Made from samples of one kind. Raises NeedsMore, or DoesNotFit where the samples have no common template.

    `listens` False: what their Python asked of sizes is left out; such a template only serves to predict a sample.
    """

    def __init__(self, samples: Sequence[Sample], recorder: Recorder, *, listens: bool = True) -> None:
        if len(samples) < 2:
            raise NeedsMore
        self._recorder = recorder
        self.last = samples[-1]
        _check_alike(samples)
        fit = self._fit_arguments(samples)
        heard = [sample for sample in samples if sample.asked is not None or not listens]
        if len(heard) <= len(fit.symbols):
            raise NeedsMore
        if len(heard) < len(samples):  # one expression for each number: what is checked is then what is used
            symbols = len(fit.symbols)
            fit = self._fit_arguments(heard)
            if len(fit.symbols) < symbols:
                raise NeedsMore
        self._views: list[SizedOperator] = []
        guards: list[str] = []
        if listens:
            asked = [sample.asked for sample in heard if sample.asked is not None]
            guards = _guards(asked, fit)
            self._views = sized_operators(asked, fit)
        self._fit_numbers(heard, fit)
        self._guards = guards
        self._holds = function_of(len(fit.symbols), guards)
        self._guards_read = [symbols_in(text) for text in guards]
        if not all(map(self.predicts, samples)):
            raise DoesNotFit("one of its captures is not what the others predict")

    # ---------------------------------------------------------------- making

    def _fit_arguments(self, samples: Sequence[Sample]) -> SizeFit:
        fit = SizeFit(len(samples), len(samples[0].late))
        sizes = list(zip(*(sample.sizes.sizes for sample in samples), strict=True))
        others = list(zip(*(sample.sizes.others for sample in samples), strict=True))
        for column in sorted(set(sizes)):
            fit.add_argument(column)
        late = list(zip(*(sample.late for sample in samples), strict=True))
        columns = (*sizes, *others, *late)
        texts = [fit.add_argument(column) for column in columns]
        self._argument_values = function_of(len(fit.symbols), texts)
        self._symbol_places = [columns.index(column) for column in fit.symbols]
        self._late = len(late)
        self._late_texts = texts[len(texts) - len(late) :]
        return fit

    def _fit_numbers(self, samples: Sequence[Sample], fit: SizeFit) -> None:
        found = [collected(sample.template) for sample in samples]
        if len({(len(c.ints), len(c.floats), len(c.traces)) for c in found}) > 1:
            raise DoesNotFit("what it does depends on the sizes")
        texts = [fit.text(column, "a number") for column in zip(*(c.ints for c in found), strict=True)]
        self._ints = len(texts)
        texts += [fit.text_of_float(column, "a number") for column in zip(*(c.floats for c in found), strict=True)]
        self._floats = len(texts) - self._ints
        self._traces: list[SizedTrace] = []
        for traces in zip(*(c.traces for c in found), strict=True):
            made = SizedTrace(traces, fit, len(texts), [sized.workspaces for sized in self._traces])
            self._traces.append(made)
            texts += made.texts
        self._texts = texts
        self._values = function_of(len(fit.symbols), texts)

    # ---------------------------------------------------------------- using

    def predicts(self, sample: Sample) -> bool:
        """Whether the template at the sizes of a captured call is the call's own."""
        symbols = self._symbols(sample.sizes, sample.late)
        made = None if symbols is None else self._template(symbols)
        return made is not None and not difference(made, sample.captured)

    def _symbols(self, sizes: CallSizes, late: Sequence[int]) -> tuple[int, ...] | None:
        """The symbols' values, where all sizes that are known are what they say. Of the unbacked sizes the first are
        known; the others are assumed to be as in the last capture."""
        unknown = self._late - len(late)
        numbers = [*sizes.sizes, *sizes.others, *late, *self.last.late[len(late) :]]
        known = len(numbers) - unknown
        symbols = tuple([numbers[place] for place in self._symbol_places])
        guessed = {number for number, place in enumerate(self._symbol_places) if place >= known}
        try:
            if self._argument_values(*symbols)[:known] != numbers[:known]:
                return None
            holds = zip(self._holds(*symbols), self._guards_read, strict=True)
        except ArithmeticError:
            return None
        if not all(held for held, read in holds if not read & guessed):
            return None
        return symbols if all(view.stays(symbols) for view in self._views if not view.reads & guessed) else None

    def _template(self, symbols: Sequence[int]) -> t.CallTemplate | None:
        try:
            values = self._values(*symbols)
        except ArithmeticError:
            return None
        traces: list[CutTrace | None] = []
        for sized in self._traces:
            traces.append(sized.at(values[sized.values], traces))
        numbers = GivenNumbers(values[: self._ints], values[self._ints : self._ints + self._floats], traces)  # type: ignore[arg-type]
        return None if any(trace is None for trace in traces) else with_numbers(self.last.template, numbers)

    def form(self) -> SizedForm:
        """What the template is made of."""
        return SizedForm(
            len(self._symbol_places),
            tuple(self._symbol_places),
            tuple(self._late_texts),
            tuple(self._texts[: self._ints]),
            tuple(self._texts[self._ints : self._ints + self._floats]),
            tuple(self._traces),
            tuple(self._guards),
            tuple(self._views),
        )

    def symbols_at(self, sizes: CallSizes) -> tuple[int, ...] | None:
        """The symbols' values as far as arguments of these sizes give them, the others as in the last capture."""
        return self._symbols(sizes, ())

    @property
    def has_unbacked_sizes(self) -> bool:
        """Whether the call has unbacked sizes."""
        return self._late > 0

    def template_for(self, sizes: CallSizes, leaves: Sequence[Any], late: Sequence[int] = ()) -> t.CallTemplate | str:
        """The template of a call of these sizes, whose tensors are among `leaves`; why there is none otherwise. `late`
        holds the unbacked sizes known so far: up to the operator that gives the next, the template is right."""
        if late and kinds_of_sizes(late) != kinds_of_sizes(self.last.late[: len(late)]):
            return "its unbacked sizes are of another kind"
        symbols = self._symbols(sizes, late)
        if symbols is None:
            return "its sizes, or what its Python asks of them, are not as in the captures"
        made = self._template(symbols)
        if made is None:
            return "its operators' sizes are not as in the captures"
        known = _up_to(made, len(late)) if len(late) < self._late else made
        for sized, trace in zip(self._traces, collected(known).traces, strict=False):
            misfit = sized.fit.misfit(trace)
            if misfit:
                return misfit
        misfit = memory_misfit(known, leaves, self._recorder)
        return misfit or made


class SizedTrace:
    """A trace whose numbers are expressions; `texts` are those of its own symbols, then of its floats that move, then
    of what else is known of its numbers. Their `values` stand from `start` on among all values of a call."""

    def __init__(self, traces: Sequence[CutTrace], fit: SizeFit, start: int, before: Sequence[Workspaces] = ()) -> None:
        parts = [decompose_trace(trace) for trace in traces]
        if any(part.skeleton != parts[0].skeleton for part in parts):
            raise DoesNotFit("its operators depend on the sizes")
        try:
            unified = unify(list(zip(traces, parts, strict=True)))
        except CannotUnify as why:
            raise DoesNotFit(str(why)) from None
        self._trace = traces[-1]
        self.fit = TraceFit(self._trace)
        self._floats = parts[-1].floats
        self._made: dict[Any, CutTrace | None] = {}  # the same object for the same sizes
        self._moved_floats = unified.moved_floats
        self._matcher = Matcher(unified)
        self._lows = [low for _, low in unified.symbols]
        columns = [tuple([part.ints[place] for part in parts]) for place in unified.defining]
        self.workspaces = Workspaces(traces, before)
        self.texts = [
            str(column[-1]) if self.workspaces.take(number, column) else fit.text(column, "a size in its program")
            for number, column in enumerate(columns)
        ]
        for place in unified.moved_floats:
            self.texts.append(fit.text_of_float([part.floats[place] for part in parts], "a number in its program"))
        self._symbols = slice(0, len(columns))
        self._rest = slice(len(columns), len(self.texts))
        self._known = self._known_places([part.ints for part in parts], fit)
        self.values = slice(start, start + len(self.texts))

    def _known_places(self, ints: Sequence[Sequence[int]], fit: SizeFit) -> list[tuple[list[int], int]]:
        """Positions of numbers that follow from the arguments, or from sizes that were read, each with the position of
        that expression: what the other numbers of the trace say of them must agree with it."""
        found: dict[Column, list[int]] = {}
        for place, column in enumerate(zip(*ints, strict=True)):
            if fit.is_known(column):
                found.setdefault(column, []).append(place)
        places = []
        for column, own in found.items():
            places.append((own, len(self.texts)))
            self.texts.append(fit.text(column, "a size"))
        return places

    def at(self, values: Sequence[Any], before: Sequence[CutTrace | None] = ()) -> CutTrace | None:
        """The trace where its texts have these values, and the call's earlier traces are these."""
        handed = self.workspaces.handed(before)
        if handed is None:
            return None
        own = (
            *handed,
            *values[self._symbols],
            *[value.hex() for value in values[self._rest]],
            *[values[at] for _, at in self._known],
        )
        if own not in self._made:
            while len(self._made) >= _MOST_MADE:
                self._made.pop(next(iter(self._made)))
            self._made[own] = self._make(values, handed)
        return self._made[own]

    def _make(self, values: Sequence[Any], handed: Sequence[int]) -> CutTrace | None:
        floats, ints_of = list(self._floats), self._matcher.ints_of
        for place, value in zip(self._moved_floats, values[self._rest], strict=True):
            floats[place] = value

        def made(ints: Sequence[int]) -> CutTrace:
            return assemble_trace(self._trace, ints, floats, plain=True)

        try:
            given = values[self._symbols]
            symbols = self.workspaces.filled(given, handed, lambda found: made(ints_of(found)), self.fit.results)
            if symbols is None or any(low is not None and v < low for v, low in zip(symbols, self._lows, strict=True)):
                return None
            ints = ints_of(symbols)
        except ArithmeticError:
            return None
        if any(ints[place] != values[at] for places, at in self._known for place in places):
            return None
        return made(ints)


def _up_to(template: t.CallTemplate, late: int) -> t.CallTemplate:
    """The steps before the one that gives the first unbacked size behind the first `late`."""
    steps: list[t.Step] = []
    taken = numbers_taken(template)
    for step in template.steps:
        late -= len(unbacked_sources_of(step, taken))
        if late < 0:
            break
        steps.append(step)
    return replace(template, steps=tuple(steps), checks=(), results=(), effects=())


# ---- whether captures are alike


def _check_alike(samples: Sequence[Sample]) -> None:
    """Raises DoesNotFit where they differ in what is no number."""
    first, *others = samples
    for other in others:
        if first.captured.aliases != other.captured.aliases:
            raise DoesNotFit("its arguments share memory with the state in another way")
        if first.captured.slots.names != other.captured.slots.names:
            raise DoesNotFit("it replaces other state")
        is_alike = kinds_of_sizes(first.late) == kinds_of_sizes(other.late)
        if not is_alike or _structure(first.template) != _structure(other.template):
            raise DoesNotFit("what it does depends on the sizes")


def _structure(template: t.CallTemplate) -> tuple[Any, ...]:
    """What neither numbers nor `difference` compare of a template."""
    return (
        tuple(map(_structure_of_step, template.steps)),
        template.free, template.kinds, template.sources, template.places, template.hosts, template.spec,
        tuple([(effect.name, type(effect.store), effect.spec) for effect in template.effects]),
        tuple([item if isinstance(item, int) else id(item) for item in template.versions]),
        tuple([tuple(map(id, group)) for group in template.twins]),
        tuple(map(type, template.results)),
    )  # fmt: skip


def _structure_of_step(step: t.Step) -> tuple[Any, ...]:
    if isinstance(step, t.HostCall):
        return step.op, step.made, tuple([plain(host) for host in step.written])
    if isinstance(step, t.LazyCall):
        return step.op, step.made, step.sources
    if isinstance(step, t.JointRun):
        joint = step.joint
        return (
            joint.forward_inputs, joint.writes, joint.saved, joint.backward_inputs, joint.backward_writes,
            joint.gradients, joint.needs, joint.double is None, step.unraised,
            tuple([(r.position, r.tangent) for r in joint.results]),
            tuple([(o.source, o.index, o.is_whole, o.requires_grad) for o in joint.outputs]),
            tuple([(u.input, u.result, u.detached) for u in joint.updates]),
            tuple([w if isinstance(w, int) else id(w) for w in step.wanted]),
            tuple([id(tensor) for _, tensor in step.inputs]),
        )  # fmt: skip
    return (type(step),)


# ---- what Python asked of sizes


def _guards(asked: Sequence[SizeQuestions], fit: SizeFit) -> list[str]:
    """Conditions on the symbols under which the Python runs as it did, as texts."""
    lists = [list(found.asked) for found in asked]
    if len({len(found.reads) for found in asked}) > 1 or len({len(found) for found in lists}) > 1:
        raise DoesNotFit("what its Python asks of sizes depends on the sizes")
    reads = list(zip(*(found.reads for found in asked), strict=True))
    guards: dict[str, None] = {}
    for questions in zip(*lists, strict=True):
        text = _condition(questions, reads, fit)
        if text:
            guards[text] = None
    return list(guards)


def _condition(questions: Sequence[SizeQuestion], reads: Sequence[Column], fit: SizeFit) -> str:
    first = questions[0]
    if len({question.question for question in questions}) > 1:
        raise DoesNotFit("what its Python asks of sizes depends on the sizes")
    left = _text([question.left for question in questions], reads, fit)
    right = _text([question.right for question in questions], reads, fit)
    if "s" not in left + right:
        return ""
    if first.question == "same":
        if len({question.outcome for question in questions}) > 1:
            raise DoesNotFit(_PLAIN)
        return f"{left} == {first.outcome}"
    if first.question == "divided":
        values = [
            (_value(q.left, reads, call), _value(q.right, reads, call)) for call, q in enumerate(questions)
        ]  # fmt: skip
        for sign, compute in (("%", OPERATIONS["mod"]), ("//", OPERATIONS["floordiv"])):
            results = {compute(a, b) for a, b in values}
            if len(results) == 1:
                return f"{left} {sign} {right} == {results.pop()}"
        raise DoesNotFit("its Python divides a size, which comes out in several ways")
    if len({question.outcome for question in questions}) > 1:
        raise DoesNotFit("its Python branches on a size, and took both ways")
    return f"({left} {_QUESTIONS[first.question]} {right}) is {first.outcome}"


def _text(expressions: Sequence[Any], reads: Sequence[Column], fit: SizeFit) -> str:
    """The expression that all captures have at one place, over the symbols."""
    first = expressions[0]
    if len(set(map(type, expressions))) > 1:
        raise DoesNotFit("what its Python asks of sizes depends on the sizes")
    if isinstance(first, SizeRead):
        if len({expression.place for expression in expressions}) > 1:
            raise DoesNotFit("what its Python asks of sizes depends on the sizes")
        return f"({fit.text(reads[first.place], 'a size that its Python reads')})"
    if isinstance(first, Computed):
        if len({expression.operation for expression in expressions}) > 1:
            raise DoesNotFit("what its Python asks of sizes depends on the sizes")
        left = _text([expression.left for expression in expressions], reads, fit)
        right = _text([expression.right for expression in expressions], reads, fit)
        return f"({left} {_SIGNS[first.operation]} {right})"
    if isinstance(first, float):
        return f"({fit.text_of_float(expressions, 'a number that its Python compares a size with')})"
    if isinstance(first, int):
        return f"({fit.text(tuple(expressions), 'a number that its Python compares a size with')})"
    return f"({first!r})" if len(set(expressions)) == 1 and first is None else _no_number()


def _no_number() -> str:
    raise DoesNotFit("its Python compares a size with what is not a plain number")


def _value(expression: Any, reads: Sequence[Column], call: int) -> Any:
    if isinstance(expression, SizeRead):
        return reads[expression.place][call]
    if isinstance(expression, Computed):
        left, right = _value(expression.left, reads, call), _value(expression.right, reads, call)
        return OPERATIONS[expression.operation](left, right)
    return expression


__all__ = ["NeedsMore", "Sample", "SizedCall", "SizedForm", "SizedTrace", "ints_among"]

"""One path for traces that differ in sizes only: which numbers of a native log follow from which, and their program.

The numbers of three logs are fitted by expressions of the sizes in which they differ. The C++ compares each number
among an operator's arguments with its expression, and makes results of the sizes that their expressions say. Those are
guesses from three logs, so they are held against what defines them: the log is written down as it were at other sizes,
small, odd and large ones, and recorded anew. The recorder's shapes and the program's own test of its sizes (the
template's matcher) must agree with it there.

Invariant: sizes beyond those that were tried are not served.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement, takewhile
from math import prod
from typing import Any

from torchlazy.lazy.native.learn import LearnedTrace, Unlearnable
from torchlazy.lazy.numbers.fit import Column, DoesNotFit, SizeFit, function_of, symbols_in
from torchlazy.lazy.plan.loaded import Compiled
from torchlazy.lazy.report import metrics
from torchlazy.lazy.run.dynamic_program import BoundRun, Template
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo
from torchlazy.lazy.trace.skeleton import assemble_trace, decompose_trace
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.runtime.native.program_steps import postfix

SAMPLES = 3
_SIZE, _STRIDE, _OFFSET, _BYTES, _VALUE = range(5)  # kinds of numbers, as in the C++
_ORDER = (_VALUE, _SIZE, _STRIDE, _OFFSET, _BYTES)
_LEAST = 2  # sizes of 0 and 1 have paths of their own
_WINDOWS = ("conv", "pool", "upsample", "im2col", "col2im", "unfold", "fft")
_MOST_PERIOD = 32
_FAR = 8  # times the largest size that came
_NO_BOUND = 2**62


class KnownSizes:
    """What is known of the traces of one skeleton: `first` and the other samples, and how far the work on them is."""

    def __init__(self) -> None:
        self.samples: list[tuple[Any, list[int]]] = []  # the sample, its numbers
        self.wanted: set[int] = set()
        self.shares_scalars = True
        self.learned: list[LearnedTrace] = []
        self.fit: _Fit | None = None

    @property
    def count(self) -> int:
        return len(self.samples)

    @property
    def first(self) -> Any:
        return self.samples[0][0]

    def add(self, sample: Any, wanted: Sequence[int]) -> None:
        """One more trace; of many the last ones stay."""
        numbers = sample.numbers()
        if any(numbers == others for _, others in self.samples):
            return
        self.samples = [*self.samples[-SAMPLES + 1 :], (sample, numbers)]
        self.wanted.update(wanted)
        self._begin_again()

    def want(self, wanted: Sequence[int], are_equal: bool) -> None:
        """The program is to give these, too; where numbers that were equal are not, each is an input of its own."""
        self.wanted.update(wanted)
        self.shares_scalars &= are_equal
        self._begin_again()

    def _begin_again(self) -> None:
        self.learned, self.fit = [], None

    # ---- one piece of work each time that such a trace comes

    def plan(self, wanted: Sequence[int], learn: Callable[..., LearnedTrace], driver: Any, look_up: Any) -> Any:
        """The path's plan once all is there; None before; a reason where there will be none."""
        if not self.wanted.issuperset(wanted):
            self.want(wanted, True)
        try:
            if len(self.learned) < len(self.samples):
                self._learn_one(learn, look_up)
                return None
            if self.fit is None:
                template = self._template(look_up)
                if template is None or isinstance(template, str):
                    return template
                numbers = [numbers for _, numbers in self.samples]
                self.fit = _Fit(numbers, self.first.places(), self.first.operators(), self.learned, template)
                self.fit.hold_windows(self.first, learn)
                return None
            untried = [point for point in self.fit.points() if point not in [tried for tried, _ in self.fit.found]]
            if untried:
                self.fit.hold(untried[0], self.first, lambda log: learn(log, sorted(self.wanted), self.shares_scalars))
                return None
            return self.fit.plan(self.learned[0], driver)
        except (Unlearnable, DoesNotFit) as why:
            return str(why)

    def _learn_one(self, learn: Callable[..., LearnedTrace], look_up: Any) -> None:
        sample, _ = self.samples[len(self.learned)]
        self.learned.append(learn(sample.log(), sorted(self.wanted), self.shares_scalars))
        look_up(self.learned[-1].trace)

    def _template(self, look_up: Any) -> Template | str | None:
        known = look_up(self.learned[-1].trace)
        family = known.family
        if family is None:
            return "its sizes are not generalised"
        for template in reversed(family.templates):
            if all(template.bind(decompose_trace(learned.trace)) is not None for learned in self.learned):
                return template
        if family.pending is not None or family.stored is not None:
            return None
        return family.failure or known.failure or "no program serves all of its sizes"


@dataclass(frozen=True)
class _Moved:
    """A number that is an expression."""

    position: int
    text: str


class _Fit:
    """Expressions for the numbers of a log, of a program's inputs and of its symbols."""

    def __init__(
        self, numbers: Sequence[Sequence[int]], places: Sequence[tuple[int, bool, int]],
        operators: Sequence[str], learned: Sequence[LearnedTrace], template: Template,
    ) -> None:  # fmt: skip
        self.operators = operators
        self.numbers, self.places = numbers[0], places
        self.template = template
        self.columns = list(zip(*numbers, strict=True))
        self.moving = [p for p, column in enumerate(self.columns) if column.count(column[0]) < len(column)]
        self.sizes = self._symbols(len(numbers))
        self.windows: dict[int, list[str]] = {}  # entries whose results' sizes are rounded, and these
        self.moved = self._numbers()
        self._bind()
        if template.matcher.unified.moved_floats:
            raise DoesNotFit("a number that is no input of its program moves with the sizes")
        parts = [decompose_trace(each.trace).ints for each in learned]
        of_program = zip(*(template.matcher.unified.symbols_of(ints) for ints in parts), strict=True)
        self.program_symbols = [self.sizes.text(column, "a symbol of its program") for column in of_program]
        self.inputs = self._inputs(learned)
        self.at_log = function_of(len(self.sizes.symbols), [each.text for each in self.moved])
        self.at_program = function_of(len(self.sizes.symbols), self.program_symbols)
        self.found: list[tuple[tuple[int, ...], bool]] = []  # the points that were tried, and whether they are served

    def _symbols(self, samples: int) -> SizeFit:
        """The sizes that operators' arguments differ in, the smallest first; then other numbers that they are given.
        What follows from the others (half a size) is none."""
        sizes = SizeFit(samples)
        for kind in (_SIZE, _VALUE):
            columns = {
                self.columns[position]
                for position in self.moving
                if self.places[position][0] == kind and not self.places[position][1] and self.places[position][2] >= 0
            }
            for column in sorted(columns):
                sizes.add_argument(column)
        for column in sizes.symbols if len(sizes.symbols) > 1 else ():
            others = SizeFit(samples)
            for other in sizes.symbols:
                if other != column:
                    others.add_argument(other)
            with contextlib.suppress(DoesNotFit):
                others.text(column, "")
                sizes = others
        return sizes

    def _numbers(self) -> list[_Moved]:
        """Sizes and other numbers by themselves, then what follows from the sizes of the same tensor."""
        texts: dict[int, str] = {}
        entry = -1
        given: dict[Column, str] = {}  # by the entry's arguments
        for position in self.moving:
            kind, is_result, at = self.places[position]
            if at != entry:
                entry, given = at, {}
            if kind not in (_SIZE, _VALUE):
                continue
            if is_result:
                texts[position] = self._result(position, given)
            else:
                given[self.columns[position]] = texts[position] = self._text(position, "a number")
        for position in self.moving:
            kind = self.places[position][0]
            if kind == _OFFSET:
                texts[position] = self._text(position, "an offset")
            elif kind in (_STRIDE, _BYTES):
                sizes = self._sizes_beside(position)
                found = self._product(position, sizes, texts, whole=kind == _BYTES)
                texts[position] = found or self._text(position, "a stride or the bytes of memory")
        return [_Moved(position, texts[position]) for position in self.moving]

    def _sizes_beside(self, position: int) -> list[int]:
        """The sizes of the tensor whose bytes or stride this is: in a row bytes, offset, sizes, strides."""
        while self.places[position][0] == _STRIDE:
            position -= 1
        if self.places[position][0] == _BYTES:
            return list(takewhile(lambda p: self.places[p][0] == _SIZE, range(position + 2, len(self.places))))
        return list(takewhile(lambda p: self.places[p][0] == _SIZE, range(position, -1, -1)))[::-1]

    def _text(self, position: int, what: str) -> str:
        return self.sizes.text(self.columns[position], what)

    def _result(self, position: int, given: dict[Column, str]) -> str:
        """The size of a result: a size or a number of its arguments, or a sum of some; of windows what fits."""
        column, entry = self.columns[position], self.places[position][2]
        if column in given:
            return given[column]
        for count in (1, 2, 3):
            for chosen in combinations_with_replacement(given, count):
                rest = {have - sum(values) for have, *values in zip(column, *chosen, strict=True)}
                if len(rest) == 1:
                    text = " + ".join(f"({text})" for text in (*(given[c] for c in chosen), str(rest.pop())))
                    self.sizes.note(column, f"({text})")
                    return f"({text})"
        if entry < 0:
            return self._text(position, "the size of a view")
        if not any(part in self.operators[entry] for part in _WINDOWS):
            what = f"the size of a result of {self.operators[entry]} was {', '.join(map(str, column))}"
            raise DoesNotFit(f"{what}, which is no size of its arguments")
        text = self._text(position, "the size of a result")
        self.windows.setdefault(entry, []).append(text)
        return text

    def _product(self, position: int, sizes: Sequence[int], texts: dict[int, str], whole: bool = False) -> str:
        """A number as a product of some of the sizes, or a multiple of all; empty where it is not."""
        column = self.columns[position]
        for count in range(len(sizes), len(sizes) - 1 if whole else 0, -1):
            for chosen in combinations(sizes, count):
                product = [prod(values) for values in zip(*(self.columns[p] for p in chosen), strict=True)]
                factor = column[0] // product[0] if whole and product[0] else 1
                if all(factor * value == have for value, have in zip(product, column, strict=True)):
                    factors = (texts[p] if p in texts else str(self.columns[p][0]) for p in chosen)
                    return " * ".join([str(factor), *(f"({text})" for text in factors)])
        return ""

    def _bind(self) -> None:
        """In the order of the operators: the numbers that symbols are read off, each times a factor and shifted.

        What has symbols that are not known yet (a product of two) is a symbol for the time being, and checked later.
        """
        count = len(self.sizes.symbols)
        self.bindings: list[tuple[int, int, int]] = []
        self.order: list[int] = []  # the symbols as they become known
        self.checks: list[tuple[str, int]] = []  # expressions that such a symbol has to be equal to
        stand_ins: list[Column] = []
        by_entry: dict[int, list[int]] = {}
        texts = {each.position: each.text for each in self.moved}
        for position in texts:
            if (entry := self.places[position][2]) >= 0:
                by_entry.setdefault(entry, []).append(position)
        for entry in sorted(by_entry):
            positions = sorted(by_entry[entry], key=lambda p: (self.places[p][1], _ORDER.index(self.places[p][0]), p))
            for position in positions:
                text, is_result = texts[position], self.places[position][1]
                found = symbols_in(text)
                line = _line(text, count) if len(found) == 1 and not is_result and not found & set(self.order) else None
                if line is not None:
                    self.order += found
                    self.bindings.append((position, *line))
            for position in positions:
                text, column = texts[position], self.columns[position]
                if not symbols_in(text) - set(self.order):
                    continue
                known = next((k for k, other in enumerate(stand_ins) if _times(other, column)), None)
                if known is not None:
                    texts[position] = f"{_times(stand_ins[known], column)} * s{count + known}"
                elif self.places[position][1]:
                    raise DoesNotFit("the size of a result comes before the sizes that it follows from")
                else:
                    texts[position] = f"s{count + len(stand_ins)}"
                    self.checks.append((text, count + len(stand_ins)))
                    self.order.append(count + len(stand_ins))
                    self.bindings.append((position, 1, 0))
                    stand_ins.append(column)
        if len(self.order) < count + len(stand_ins):
            raise DoesNotFit("a size that only results have")
        self.columns_of = [*self.sizes.symbols, *stand_ins]
        self.compared = [_Moved(position, text) for position, text in texts.items()]

    def _inputs(self, learned: Sequence[LearnedTrace]) -> list[list[tuple[int, str]]]:
        """Of each input of the program: which of its offset, sizes and strides in a row are expressions."""
        found = []
        for geoms in zip(*((geom for _, geom in each.trace.inputs) for each in learned), strict=True):
            rows = zip(*((geom.offset, *geom.shape, *geom.strides) for geom in geoms), strict=True)
            found.append(
                [(place, self.sizes.text(row, "an input")) for place, row in enumerate(rows) if len(set(row)) > 1]
            )
        return found

    # ---- holding it against the program

    def points(self) -> list[tuple[int, ...]]:
        """The values of the symbols that are tried: small ones, ones between those that came, and large ones."""
        symbols = self.sizes.symbols
        between = tuple(_odd(min(c) + (max(c) - min(c)) * (2 + i) // (5 + i)) for i, c in enumerate(symbols))
        far = tuple(_odd(_FAR * max(c) + 7 * i) for i, c in enumerate(symbols))
        return [between, (_LEAST,) * len(symbols), far]

    def hold_windows(self, sample: Any, learn: Callable[..., LearnedTrace]) -> None:
        """Sizes that are rounded (of convolutions, pooling, resampling) are tried at many sizes in a row."""
        seen = set()
        numbers_of: dict[int, list[Column]] = {}
        for column, (_, _, entry) in zip(self.columns, self.places, strict=True):
            if entry in self.windows:
                numbers_of.setdefault(entry, []).append(column)
        for entry, texts in self.windows.items():
            key = (self.operators[entry], *texts, *numbers_of[entry])
            if key in seen:
                continue
            seen.add(key)
            period = max([2, *(int(divisor) for text in texts for divisor in re.findall(r"(?://|%) (\d+)", text))])
            if period > _MOST_PERIOD:
                raise DoesNotFit(f"sizes of {self.operators[entry]} that are rounded to {period}")
            symbols = {number for text in texts for number in symbols_in(text)}
            for symbol in symbols:
                for by in range(2 * period):
                    point = [
                        max(column) + (by if number == symbol else 0)
                        for number, column in enumerate(self.sizes.symbols)
                    ]
                    learn(sample.log_with(self._at(point), entry), [], True)

    def _at(self, point: Sequence[int]) -> list[int]:
        numbers = list(self.numbers)
        for each, value in zip(self.moved, self.at_log(*point), strict=True):
            numbers[each.position] = value
        return numbers

    def hold(self, point: tuple[int, ...], sample: Any, learn: Callable[[Any], LearnedTrace]) -> None:
        """Record the log as it were at these sizes, and see whether the program's numbers are the ones expected."""
        served = False
        try:
            trace = learn(sample.log_with(self._at(point))).trace
            found = self.template.matcher.match(decompose_trace(trace))
            served = found is not None and list(found[0]) == self.at_program(*point)
        except Exception as error:  # the operators do not take such sizes
            reason = f"{type(error).__name__}: {error}"
        else:
            reason = "" if served else "its program has other numbers"
        if not served and point == self.points()[0]:
            raise DoesNotFit(f"at other sizes {reason}")
        self.found.append((point, served))

    # ---- the plan

    def plan(self, learned: LearnedTrace, driver: Any) -> tuple[Any, ...]:
        _, is_small, is_large = (served for _, served in self.found)
        symbols = self.columns_of
        place = {symbol: number for number, symbol in enumerate(self.order)}
        texts = dict.fromkeys(
            [each.text for each in self.compared]
            + [text for row in self.inputs for _, text in row]
            + [text for text, _ in self.checks]
        )
        number_of = {text: number for number, text in enumerate(texts)}
        names = {f"s{symbol}": number for symbol, number in place.items()}
        sizes = {
            "expressions": [postfix(text, names) for text in texts],
            "moved": [(each.position, number_of[each.text]) for each in self.compared],
            "checks": [(number_of[text], place[symbol]) for text, symbol in self.checks],
            "bindings": self.bindings,
            "low": [_LEAST if is_small else min(symbols[s]) for s in self.order],
            "high": [_NO_BOUND if is_large else max(symbols[s]) for s in self.order],
        }
        inputs = [
            (number, geom.dtype, geom.offset, list(geom.shape), list(geom.strides), [(p, number_of[t]) for p, t in row])
            for number, (_, geom), row in zip(learned.inputs, learned.trace.inputs, self.inputs, strict=True)
        ]
        back = [place[symbol] for symbol in range(len(self.sizes.symbols))]
        program = RunsForAllSizes(
            driver, self.template, learned.trace, lambda values: self.at_program(*[values[p] for p in back])
        )
        return (
            program, inputs, list(learned.scalars), list(learned.equal), list(learned.fixed), list(learned.outputs),
            list(learned.unchanged), None, sizes,
        )  # fmt: skip


class RunsForAllSizes:
    """The program of a template, asked for with the values of the path's symbols."""

    def __init__(
        self, driver: Any, template: Template, trace: CutTrace, symbols: Callable[[Sequence[int]], list[int]]
    ) -> None:
        self.driver, self.template, self.trace, self._symbols = driver, template, trace, symbols

    def at(self, values: Sequence[int]) -> RunsForSizes | None:
        """The program for these sizes; None where its guards do not hold."""
        symbols = tuple(self._symbols(values))
        return RunsForSizes(self, symbols) if self.template.holds(*symbols) else None


class RunsForSizes:
    """The program for some sizes: memory and scalars -> the outputs' values. `native` as in `Programs.plan`."""

    def __init__(self, programs: RunsForAllSizes, symbols: tuple[int, ...]) -> None:
        template, self.driver, self.trace = programs.template, programs.driver, programs.trace
        self.symbols = symbols
        run: Any = BoundRun(template.run, symbols)
        self.native = run.native()
        self._compiled = Compiled(run, template.program, self.trace, None, template.fallbacks, template.timings)  # type: ignore[arg-type]
        self._ints_of = template.matcher.ints_of

    def _trace_at_sizes(self) -> CutTrace:
        floats = decompose_trace(self.trace).floats
        return assemble_trace(self.trace, self._ints_of(self.symbols), floats, plain=True)

    def __call__(self, memory: list[Any], scalars: list[Any]) -> list[Any]:
        metrics.hits += 1
        found: list[Any] = self.driver.run_compiled(self._compiled, self._trace_at_sizes, memory, scalars)
        error = next((value for value in found if isinstance(value, BaseException)), None)
        if error is not None:
            raise error
        return found


def _odd(size: int) -> int:
    """The next size without the divisors that sizes are rounded to most often."""
    while size % 2 == 0 or size % 3 == 0 or size % 5 == 0:
        size += 1
    return size


def _times(column: Column, other: Column) -> int:
    """By which factor a column is another; 0 where it is not."""
    factor = other[0] // column[0] if column[0] else 0
    return factor if all(factor * a == b for a, b in zip(column, other, strict=True)) else 0


def _line(text: str, symbols: int) -> tuple[int, int] | None:
    """Factor and shift of an expression of one symbol, where it is a line."""
    if "//" in text or "%" in text:
        return None
    at = function_of(symbols, [text])
    zero, one, two, five = (at(*[value] * symbols)[0] for value in (0, 1, 2, 5))
    factor = one - zero
    return (factor, zero) if factor > 0 and two == zero + 2 * factor and five == zero + 5 * factor else None


exclude_from_dynamo(RunsForAllSizes.at, RunsForSizes.__call__)

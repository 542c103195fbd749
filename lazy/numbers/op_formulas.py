"""Operators' own formulas for result sizes and padding amounts, where trying out the operands' sizes would be a guess.

Programs pad what is too small for something else (a level of a U-Net at an odd image), to a multiple (of a window),
or to a given length. The size that a padding reaches is searched, and its amounts follow: where sizes happened to fit
in all samples the amounts are 0, and expressions all the same.

Invariant: a formula is the operator's own; one that does not fit the samples is not used (its column differs). Amounts
and sizes are right for every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

from torchlazy.lazy.numbers.arithmetic import Arithmetic, Column, Num, is_constant
from torchlazy.lazy.trace.skeleton import entry_numbers
from torchlazy.lazy.trace.trace import CutTrace, Entry, Float, Slot, slots_in

TILED_ATTENTION, _ATTENTION_TILE = "aten::_scaled_dot_product_efficient_attention", 32
VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape")
Formula: TypeAlias = "Iterator[tuple[int, Num]]"  # sizes, each with its dimension
_FINEST_FACTOR = 64  # of resampling: 2/3, 0.75


class Formulas:
    """The formulas of one unification; `size` gives the expression of a slot's dimension, if known."""

    def __init__(
        self,
        trace: CutTrace,
        sums: Arithmetic,
        size: Callable[[int, int], Num | None],
        columns: Sequence[Sequence[Column]],
    ) -> None:
        self._trace = trace
        self._sums = sums
        self._size = size
        self._columns = columns  # the sizes of each slot

    def of(self, entry: Entry, rank: int, known: dict[Column, Num]) -> Formula:
        """Sizes of a result of this many dimensions, each with its dimension."""
        name = entry.op.name()
        if name == "aten::cat":
            yield from self._joined(entry)
        elif name == "aten::slice.Tensor":
            yield from self._sliced(entry, known)
        elif name == TILED_ATTENTION:
            yield from self._row_sums(entry, rank)
        elif name in VIEWS:
            yield from self._viewed(entry)
        elif "upsample" in name and "backward" not in name:
            yield from self._resampled(entry, rank)
        elif "backward" not in name and any(part in name for part in ("conv", "pool", "im2col")):
            yield from self._windows(entry)

    def _rank(self, number: Slot) -> int:
        return len(self._trace.geometries[number.number].shape)

    def _windows(self, entry: Entry) -> Formula:
        values = arguments_of(entry)
        given = next((v for v in values.values() if isinstance(v, Slot)), None)
        if given is None:
            return
        rank = self._rank(given)
        weight = values.get("weight")
        kernel = values.get("kernel_size")
        if isinstance(weight, Slot):
            kernel = self._trace.geometries[weight.number].shape[2:]
        if type(kernel) is not tuple:
            return
        spatial = len(kernel) if len(kernel) > 1 else rank - 2
        for d in range(spatial):
            k = rank - spatial + d
            num = self._size(given.number, k)
            if num is None or rank < spatial:
                continue
            window = _at(kernel, d)
            step = _at(values.get("stride") or kernel, d)
            padding, dilation = _at(values.get("padding") or (0,), d), _at(values.get("dilation") or (1,), d)
            reach = 2 * padding - dilation * (window - 1) - 1
            sums = self._sums
            if values.get("transposed") is True:
                more = _at(values.get("output_padding") or (0,), d)
                yield k, sums.shift(sums.scale(num, step), more - reach - step)
                continue
            yield k, sums.shift(sums.floor(sums.shift(num, reach), step), 1)
            if values.get("ceil_mode"):
                yield k, sums.shift(sums.floor(sums.shift(num, reach + step - 1), step), 1)

    def _resampled(self, entry: Entry, rank: int) -> Formula:
        """Given a factor, the result is that many times the operand, rounded down."""
        given, factors = entry.args[0], [value for _, value in entry_numbers(entry) if type(value) is Float]
        if type(given) is not Slot or len(factors) != rank - 2:
            return
        for k, factor in enumerate(factors, 2):
            num, exact = self._size(given.number, k), Fraction(factor.value).limit_denominator(_FINEST_FACTOR)
            if num is not None:
                yield k, self._sums.floor(self._sums.scale(num, exact.numerator), exact.denominator)

    def _viewed(self, entry: Entry) -> Formula:
        """Dimensions that are joined, and those that are split: into a number of equal parts, mostly."""
        given, made = entry.args[0], entry.outputs
        if type(given) is not Slot or type(made) is not Slot:
            return
        sums, columns = self._sums, self._columns[made.number]
        for before, after in _groups(self._columns[given.number], columns):
            whole = sums.constant(1)
            for k in before:
                size = self._size(given.number, k)
                if size is None:
                    return
                whole = sums.mul(whole, size)
            moving = [k for k in after if not is_constant(columns[k])] or list(after[:1])
            if whole.moves and len(moving) == 1:
                part = prod(columns[k][0] for k in after if k != moving[0])
                if part:
                    yield moving[0], sums.floor(whole, part)

    def _row_sums(self, entry: Entry, rank: int) -> Formula:
        """Attention on a GPU keeps the sums of its rows in whole tiles of 32."""
        query = entry.args[0]
        assert isinstance(query, Slot)
        length = self._size(query.number, 2)
        if rank == 3 and length is not None:
            yield 2, self._sums.ceil_to(length, _ATTENTION_TILE)

    def _joined(self, entry: Entry) -> Formula:
        """The sum of the operands' sizes along the dimension."""
        dim = entry.args[1] if len(entry.args) > 1 else dict(entry.kwargs).get("dim", 0)
        total: Num | None = None
        rank = 0
        for number in slots_in(entry.args[0]):
            rank = self._rank(number)
            size = self._size(number.number, dim % rank) if rank else None
            if size is None:
                return
            total = size if total is None else self._sums.add(total, size)
        if total is not None:
            yield dim % rank, total

    def _sliced(self, entry: Entry, known: dict[Column, Num]) -> Formula:
        """(end - start) // step rounded up, where the bounds lie inside."""
        values = arguments_of(entry)
        given, dim = values["self"], values.get("dim", 0)
        assert isinstance(given, Slot)
        rank, sums = self._rank(given), self._sums
        whole = self._size(given.number, dim % rank)
        start, end, step = values.get("start") or 0, values.get("end"), values.get("step", 1)
        if whole is None or any(type(v) is not int for v in (start, step)):
            return
        bounds = [known.get(whole.column)]
        if type(end) is int:
            bounds += [num for num in known.values() if num.column[0] == end]
            bounds += [sums.shift(whole, end) if end < 0 else sums.constant(end), whole]
        else:
            bounds.append(whole)
        for upper in bounds:
            if upper is not None and start >= 0 and step > 0:
                yield dim % rank, sums.floor(sums.shift(upper, step - 1 - start), step)


def _groups(given: Sequence[Column], made: Sequence[Column]) -> Iterator[tuple[list[int], list[int]]]:
    """Which dimensions of a view's operand become which of its result, in all samples alike; without those of 1."""
    left = [k for k, column in enumerate(given) if set(column) != {1}]
    right = [k for k, column in enumerate(made) if set(column) != {1}]
    while left and right:
        before, after = [left.pop(0)], [right.pop(0)]
        a, b = given[before[0]], made[after[0]]
        while a != b:
            if a[0] < b[0] and left:
                before.append(left.pop(0))
                a = tuple(x * y for x, y in zip(a, given[before[-1]], strict=True))
            elif a[0] > b[0] and right:
                after.append(right.pop(0))
                b = tuple(x * y for x, y in zip(b, made[after[-1]], strict=True))
            else:
                return
        yield before, after


def arguments_of(entry: Entry) -> dict[str, Any]:
    """The arguments that were given, by name."""
    return {a.name: v for a, v in zip(entry.op._schema.arguments, entry.args, strict=False)} | dict(entry.kwargs)


def _at(values: Any, d: int) -> int:
    return values if isinstance(values, int) else values[d] if d < len(values) else values[-1]


PAD = "aten::constant_pad_nd"
_PadRule: TypeAlias = "Callable[[Num, Column, Column], Num | None]"


def split_sizes(trace: CutTrace, sizes_at: Sequence[Sequence[Column]]) -> dict[Column, frozenset[int]]:
    """Sizes that a view splits into a number of equal parts, and how large the parts are. `sizes_at` has the sizes of
    each slot."""
    found: dict[Column, set[int]] = {}
    for entry in trace.entries:
        if entry.op.name() in VIEWS and type(entry.outputs) is Slot and type(entry.args[0]) is Slot:
            given, made = sizes_at[entry.args[0].number], sizes_at[entry.outputs.number]
            for count, part in pairwise(made):
                whole = tuple(a * b for a, b in zip(count, part, strict=True))
                if is_constant(part) and part[0] > 1 and whole in given and whole != part:
                    found.setdefault(whole, set()).add(part[0])
    return {whole: frozenset(parts) for whole, parts in found.items()}


class PadFormulas:
    """The paddings of one unification."""

    def __init__(self, sums: Arithmetic, splits: dict[Column, frozenset[int]]) -> None:
        self._sums = sums
        self._splits = splits
        self._multiples: set[int] = set()

    def dimension(self, size: Num, low: Column, high: Column, alike: Sequence[Num]) -> tuple[Num, Num] | None:
        """What a changing dimension is padded by, before and behind; `alike` are the expressions known for the padded
        size. None where the amounts are best resolved by themselves."""
        made = tuple(n + a + b for n, a, b in zip(size.column, low, high, strict=True))
        if min(*low, *high) < 0 < max(*low, *high):
            return None
        amounts = tuple(a + b for a, b in zip(low, high, strict=True))
        multiple = self._multiple(made, amounts)
        if multiple is not None:
            self._multiples.add(multiple)
            total = self._sums.add(self._sums.ceil_to(size, multiple), size, -1)
            return self._parts(total, low, high, (self._ending, self._halves))
        up_to = self._up_to(size, made, amounts, alike)
        return None if up_to is None else self._parts(up_to, low, high, (self._halves, self._ending, self._beginning))

    def _up_to(self, size: Num, made: Column, amounts: Column, alike: Sequence[Num]) -> Num | None:
        """The amounts up to another size, or to one that is the same in all samples."""
        sums = self._sums
        for target in alike:
            difference = sums.add(target, size, -1)
            if difference.poly.terms and (any(amounts) or self._sign(difference)):
                return difference
        if is_constant(made) and not is_constant(amounts):
            return sums.add(sums.constant(made[0]), size, -1)
        return None

    def _sign(self, num: Num) -> int:
        """1 or -1 where the expression is at least or at most 0 for all sizes, else 0: no padding looks like that."""
        if min(num.column) < 0 or max(num.column) > 0:
            return 1 if max(num.column) > 0 else -1
        if self._sums.surely_at_least_zero(num):
            return 1
        return -1 if self._sums.surely_at_least_zero(self._sums.negative(num)) else 0

    def _multiple(self, made: Column, amounts: Column) -> int | None:
        """The number whose multiple the size is padded to: the size of parts that it is split into later, or a divisor
        that all samples share."""
        if min(amounts) < 0 or is_constant(made):
            return None
        fitting = sorted(k for k in self._splits.get(made, ()) if k > max(amounts))
        if fitting:
            return fitting[0]
        shared = [k for k in sorted(self._multiples) if k > max(amounts) and not any(m % k for m in made)]
        if shared and any(amounts):
            return shared[0]
        if is_constant(amounts):
            return None
        return next((k for k in range(max(amounts) + 1, min(made) + 1) if not any(m % k for m in made)), None)

    def _parts(self, total: Num, low: Column, high: Column, ways: Sequence[_PadRule]) -> tuple[Num, Num] | None:
        """Before and behind, by the first rule that fits."""
        for way in ways:
            first = way(total, low, high)
            second = None if first is None else self._sums.add(total, first, -1)
            if first is not None and second is not None and (first.column, second.column) == (low, high):
                return first, second
        return None

    def _halves(self, total: Num, low: Column, high: Column) -> Num:
        """The larger half behind, as in `[n // 2, n - n // 2]`; or before."""
        sums = self._sums
        below = sums.negative(sums.floor(sums.negative(total), 2)) if self._sign(total) < 0 else sums.floor(total, 2)
        return below if below.column == low else sums.add(total, below, -1)

    def _ending(self, total: Num, low: Column, high: Column) -> Num | None:
        """A given number before, the rest behind."""
        return self._sums.constant(low[0]) if is_constant(low) else None

    def _beginning(self, total: Num, low: Column, high: Column) -> Num | None:
        """A given number behind."""
        return self._sums.add(total, self._sums.constant(high[0]), -1) if is_constant(high) else None


def amounts_of(pad: Sequence[Column], rank: int) -> dict[int, tuple[int, int]]:
    """Positions in the list of amounts of each dimension's: before it, behind it."""
    return {rank - 1 - i: (2 * i, 2 * i + 1) for i in range(len(pad) // 2)}

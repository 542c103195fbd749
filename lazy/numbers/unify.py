"""Unification: traces that differ in numbers only become one, whose numbers are expressions over few symbols.

Numbers that did not change between the samples stay constants, but for results that rounding made equal (a stride of 2
over 31 and 32 elements), where the operator's formula is known. A size of an input that changed becomes a symbol, or a
multiple of one; every other number that changed is searched among the sizes at hand (those of the operator's operands,
the formula of a convolution or a pooling window, products, sums, ...), and becomes a symbol of its own where nothing
simple fits. Floats that changed become runtime scalars.

A compiled callable makes a number an input once it saw another value of it. The trace before that has the same
operators and is as good a sample: `as_sample_of` gives it the inputs.

Invariant: every expression is right for every sample. A guess that is wrong elsewhere does no harm: each number of a
new trace is compared with what its symbols say before anything made from the expressions is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from torchlazy.lazy.numbers.arithmetic import Arithmetic, Column, Num, is_constant
from torchlazy.lazy.numbers.matcher import UnifiedTrace
from torchlazy.lazy.numbers.op_formulas import (
    PAD,
    TILED_ATTENTION,
    VIEWS,
    Formulas,
    PadFormulas,
    amounts_of,
    arguments_of,
    split_sizes,
)
from torchlazy.lazy.trace.skeleton import DecomposedTrace, bits, entry_numbers
from torchlazy.lazy.trace.trace import CutTrace, Entry, Float, ScalarSlot, Slot, slots_in
from torchlazy.prims.size_expr import Symbol

_SMALL_SHIFT = 2  # an input's size this near to another's is that one and a constant: a cache and its mask
_MOST_SYMBOLS = 24
_SIZES_OF_RESULT = dict.fromkeys(VIEWS, "size") | {"aten::reshape": "shape"}
_POSITIONS = frozenset(("pad", "start", "index", "diagonal", "shifts", "storage_offset", "offset"))  # 0 and 1 as well
_PLAIN_DIVISORS = frozenset((2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 32, 64, 128))


class CannotUnify(Exception):
    """The samples cannot be unified; the message says which number at which operator, and what to do."""


def unify(samples: Sequence[tuple[CutTrace, DecomposedTrace]]) -> UnifiedTrace:
    """The unified trace of samples of one skeleton; CannotUnify where there is none."""
    return _Unifier(samples).run()


class _Unifier:
    def __init__(self, samples: Sequence[tuple[CutTrace, DecomposedTrace]]) -> None:
        self.trace = samples[0][0]
        self.columns: list[Column] = list(zip(*(parts.ints for _, parts in samples), strict=True))
        self.float_columns = list(zip(*(parts.floats for _, parts in samples), strict=True))
        self.sums = Arithmetic(len(samples))
        self.known: dict[Column, Num] = {}
        self.alike: dict[Column, list[Num]] = {}  # expressions that are equal in all samples
        self.symbols: list[tuple[str, int | None, Num]] = []
        self.defining: list[int] = []
        self.nums: list[Num | None] = [None] * len(self.columns)
        self.rounded: dict[tuple[int, int, Column], Num] = {}  # sizes equal by rounding: rank, dimension from the end
        self.slot_at: list[int] = []  # position of the first number of each slot's geometry
        at = 0
        for geom in self.trace.geometries:
            self.slot_at.append(at)
            at += 2 * len(geom.shape) + 1
        self.ends_at = at
        sizes = [self.columns[p : p + len(g.shape)] for p, g in zip(self.slot_at, self.trace.geometries, strict=True)]
        self.formulas = Formulas(self.trace, self.sums, self._size, sizes)
        self.pads = PadFormulas(self.sums, split_sizes(self.trace, sizes))

    def run(self) -> UnifiedTrace:
        for position, column in enumerate(self.columns):
            if is_constant(column):
                self.nums[position] = self.sums.constant(column[0])
        self._inputs()
        ends = self.ends_at
        at = ends + sum(2 * len(geom.shape) + 1 for _, geom in (*self.trace.inputs, *self.trace.outputs))
        for position, entry in enumerate(self.trace.entries):
            at = self._entry(entry, position, at)
        for number, geom in (*self.trace.inputs, *self.trace.outputs):
            twin = self.slot_at[number.number]
            is_twin = self.trace.geometries[number.number].shape == geom.shape
            for k in range(2 * len(geom.shape) + 1):
                same = twin + k
                if is_twin and self.columns[same] == self.columns[ends + k]:
                    self.nums[ends + k] = self.nums[same]
                elif self.nums[ends + k] is None:
                    self.nums[ends + k] = self._resolve(ends + k, [], "an output of the program")
            ends += 2 * len(geom.shape) + 1
        moved = [p for p, num in enumerate(self.nums) if num is None or num.moves or not is_constant(num.column)]
        moved_floats = [p for p, column in enumerate(self.float_columns) if len(set(map(bits, column))) > 1]
        first = tuple(column[0] for column in self.columns)
        nums = [self.nums[position] for position in moved]
        assert all(num is not None for num in nums)
        return UnifiedTrace(
            tuple((name, low) for name, low, _ in self.symbols),
            tuple(self.defining),
            tuple(moved),
            tuple(self.sums.exprs.structure(num.poly) for num in nums if num is not None),
            len(self.columns),
            first,
            tuple(moved_floats),
            tuple(column[0] for column in self.float_columns),
        )

    # ---- numbers

    def _size(self, slot: int, dimension: int) -> Num | None:
        return self.nums[self.slot_at[slot] + dimension]

    def _note(self, num: Num) -> Num:
        """Keep an expression for later numbers; the first of its column is preferred."""
        self.known.setdefault(num.column, num)
        found = self.alike.setdefault(num.column, [])
        if num.moves and not any(num.poly is other.poly for other in found):
            found.append(num)
        return num

    def _new_symbol(self, position: int, what: str, least: int = 2) -> Num:
        column = self.columns[position]
        if len(self.symbols) >= _MOST_SYMBOLS:
            raise CannotUnify(
                f"more than {_MOST_SYMBOLS} numbers change independently, the last of them {column} in {what}; "
                "keep sizes that belong together in step"
            )
        name = f"s{len(self.symbols)}"
        low = 2 if min(column) >= least > 0 else 0 if min(column) >= 0 else None
        self.sums.exprs.add_symbol(Symbol(name, column[0], column[-1], low))
        num = Num(self.sums.exprs.symbol(name), column)
        self.symbols.append((name, low, num))
        self.defining.append(position)
        return self._note(num)

    # ---- inputs

    def _inputs(self) -> None:
        """Sizes of inputs, the smallest first: new symbols, multiples of one, or one and a small constant."""
        sizes: dict[Column, int] = {}
        for number, geom in self.trace.inputs:
            at = self.slot_at[number.number]
            for k in range(len(geom.shape)):
                column = self.columns[at + k]
                if is_constant(column):
                    continue
                if min(column) < 2:
                    raise CannotUnify(f"a size of an input is {column}: sizes of 0 and 1 have programs of their own")
                sizes.setdefault(column, at + k)
        for column, position in sorted(sizes.items()):
            num = self._multiple(column) or self._shifted(column) or self._sum_of_symbols(column)
            if num is None:
                num = self._new_symbol(position, "an input's size")
            self._note(num)
        for number, geom in self.trace.inputs:
            at = self.slot_at[number.number]
            rank = len(geom.shape)
            self._geometry(at, rank, [], f"input {number}", {})

    def _multiple(self, column: Column) -> Num | None:
        for _, _, symbol in self.symbols:
            factor, rest = divmod(column[0], symbol.column[0])
            if not rest and self.sums.scale(symbol, factor).column == column:
                return self.sums.scale(symbol, factor)
        return None

    def _shifted(self, column: Column) -> Num | None:
        for _, _, symbol in self.symbols:
            by = column[0] - symbol.column[0]
            if abs(by) <= _SMALL_SHIFT and self.sums.shift(symbol, by).column == column:
                return self.sums.shift(symbol, by)
        return None

    def _sum_of_symbols(self, column: Column) -> Num | None:
        if len(self.symbols) < 2:
            return None
        nums = [symbol for _, _, symbol in self.symbols]
        for a, b in combinations(nums, 2):
            for made in (self.sums.mul(a, b), self.sums.add(a, b)):
                if made.column == column:
                    return made
        return None

    # ---- entries

    def _entry(self, entry: Entry, place: int, at: int) -> int:
        frame = self.trace.frames[place] if place < len(self.trace.frames) else ""
        what = f"{entry.op} at {frame or '?'}"
        local = self._operand_sizes(entry)
        values = arguments_of(entry)
        told: dict[tuple[int, Column], Num] = {}  # sizes that a list argument gives, by their position from its end
        items: Counter[str] = Counter()
        rank = len(self.trace.geometries[entry.outputs.number].shape) if type(entry.outputs) is Slot else 0
        kind = entry.op.name()
        given = self._exact_sizes(entry, rank) if "upsample" in kind or kind in VIEWS else {}
        amounts = self._amounts(entry, at) if entry.op.name() == PAD else {}
        for name, value in entry_numbers(entry):
            if type(value) is Float:
                continue
            column, listed = self.columns[at], values[name]
            from_end = items[name] - len(listed) if type(listed) is tuple else 0
            num = amounts.get(items[name]) if name == "pad" else None
            if name == _SIZES_OF_RESULT.get(kind, "output_size"):
                num = num or given.get((rank + from_end, column))
            num = num or self._derived_size(entry, name, column, from_end, local)
            items[name] += 1
            if num is not None:
                self.nums[at] = told[from_end, column] = num
            elif self.nums[at] is None:
                self.nums[at] = self._resolve(at, local, f"{name} of {what}", 0 if name in _POSITIONS else 2)
            num = self.nums[at]
            if num is not None and num.moves:
                local.append(num)
            at += 1
        for number in slots_in(entry.outputs):
            place, rank = self.slot_at[number.number], len(self.trace.geometries[number.number].shape)
            exact = self._padded_sizes(entry, at) if amounts else self._exact_sizes(entry, rank)
            exact |= {(rank + from_end, column): num for (from_end, column), num in told.items()}
            self._rounded_equal(entry, place, rank, exact)
            self._geometry(place, rank, local, f"the result of {what}", exact)
        return at

    def _exact_sizes(self, entry: Entry, rank: int) -> dict[tuple[int, Column], Num]:
        """Sizes of the result by the operator's formula, by dimension and column."""
        return {(k, num.column): num for k, num in self.formulas.of(entry, rank, self.known)}

    def _amounts(self, entry: Entry, at: int) -> dict[int, Num]:
        """A padding's amounts by their position in the list: all those of dimensions that change."""
        x, listed = entry.args[:2]
        found: dict[int, Num] = {}
        if type(x) is not Slot:
            return found
        rank = len(self.trace.geometries[x.number].shape)
        for k, (before, behind) in amounts_of(listed, rank).items():
            size, low, high = self._size(x.number, k), self.columns[at + before], self.columns[at + behind]
            if size is None or not size.moves:
                continue
            alike = self.alike.get(tuple(n + a + b for n, a, b in zip(size.column, low, high, strict=True)), [])
            padded = self.pads.dimension(size, low, high, alike)
            for place in (before, behind) if padded is None else ():
                found[place] = self.nums[at + place] or self._resolve(at + place, [], f"pad of {entry.op}", 0)
            if padded is not None:
                found[before], found[behind] = padded
        return found

    def _padded_sizes(self, entry: Entry, ends_at: int) -> dict[tuple[int, Column], Num]:
        """The sizes of a padding's result, given its amounts."""
        x, listed = entry.args[:2]
        rank = len(self.trace.geometries[x.number].shape)
        at = ends_at - sum(1 for _, value in entry_numbers(entry) if type(value) is not Float)
        found = {}
        for k, places in amounts_of(listed, rank).items():
            size = self._size(x.number, k)
            for place in places:
                amount = self.nums[at + place]
                size = None if size is None or amount is None else self.sums.add(size, amount)
            if size is not None:
                found[k, size.column] = size
        return found

    def _rounded_equal(self, entry: Entry, at: int, rank: int, exact: dict[tuple[int, Column], Num]) -> None:
        """Sizes of a result that are the same in all samples, and yet expressions: as the operator's formula says, or
        the same dimension of an operand."""
        for k in range(rank):
            column = self.columns[at + k]
            if is_constant(column):
                num = exact.get((k, column)) or self._same_dimension(entry, k, rank, column)
                if num is not None and num.moves:
                    self.nums[at + k] = num
                    if entry.op.name() != TILED_ATTENTION:  # whose sums only its own gradient reads
                        self.rounded[rank, k - rank, column] = num

    def _derived_size(self, entry: Entry, name: str, column: Column, from_end: int, local: list[Num]) -> Num | None:
        """An argument that is more than a number: a size resampled by a factor; a size or a number of elements (that a
        sum is divided by) that is equal by rounding."""
        op = entry.op.name()
        if name == "output_size" and "upsample" in op and any(type(value) is Float for value in entry.args):
            # Given a factor, the result is that many times the operand, whatever else has the same size today.
            return next((num for num in self._scaled(column, local) if num.moves and num.column == column), None)
        if not self.rounded or not is_constant(column):
            return None
        if name in ("size", "input_size"):
            listed = arguments_of(entry)[name]
            return self.rounded.get((len(listed), from_end, column)) if type(listed) is tuple else None
        if op == "aten::div.Scalar":
            sides = [num for num in local if is_constant(num.column)]
            products = (self.sums.mul(a, b) for a, b in (*combinations(sides, 2), *((a, a) for a in sides)))
            return next((num for num in products if num.column == column), None)
        return None

    def _same_dimension(self, entry: Entry, k: int, rank: int, column: Column) -> Num | None:
        for number in slots_in((entry.args, tuple(value for _, value in entry.kwargs))):
            if len(self.trace.geometries[number.number].shape) == rank:
                num = self.nums[self.slot_at[number.number] + k]
                if num is not None and num.moves and num.column == column:
                    return num
        return None

    def _operand_sizes(self, entry: Entry) -> list[Num]:
        """Sizes of the operands that changed, then their strides, each once."""
        found: dict[Column, Num] = {}
        slots = slots_in((entry.args, tuple(value for _, value in entry.kwargs)))
        for part in (0, 1):
            for number in slots:
                at, rank = self.slot_at[number.number], len(self.trace.geometries[number.number].shape)
                for k in range(rank):
                    num = self.nums[at + part * rank + k]
                    if num is not None and num.moves:
                        found.setdefault(num.column, num)
        return list(found.values())

    def _geometry(self, at: int, rank: int, local: list[Num], what: str, exact: dict[tuple[int, Column], Num]) -> None:
        """Sizes, then strides from the sizes, then the offset."""
        for k in range(rank):
            if self.nums[at + k] is None:
                num = exact.get((k, self.columns[at + k]))
                self.nums[at + k] = self._resolve(at + k, local, what) if num is None else self._note(num)
        sizes = [self.nums[at + k] for k in range(rank)]
        step = self.sums.constant(1)
        for k in reversed(range(rank)):  # strides that are the same in all samples are products all the same
            size = sizes[k]
            if step.moves and step.column == self.columns[at + rank + k]:
                self.nums[at + rank + k] = step
            if size is None:
                break
            step = self.sums.mul(step, size)
        products = list(self._products([size for size in sizes if size is not None]))
        for k in range(rank):
            position = at + rank + k
            if self.nums[position] is None:
                column = self.columns[position]
                fitting = next((num for num in products if num.column == column), None)
                self.nums[position] = fitting or self._resolve(position, local + products, what)
        if self.nums[at + 2 * rank] is None:
            self.nums[at + 2 * rank] = self._resolve(at + 2 * rank, local, what)

    def _products(self, sizes: list[Num]) -> Iterator[Num]:
        """Strides of the row-major layout, then of other orders of the dimensions."""
        step = self.sums.constant(1)
        for size in reversed(sizes):
            yield step
            step = self.sums.mul(step, size)
        yield step
        for count in range(1, len(sizes) + 1):
            for chosen in combinations(sizes, count):
                product = chosen[0]
                for size in chosen[1:]:
                    product = self.sums.mul(product, size)
                yield product

    # ---- looking for an expression

    def _resolve(self, position: int, local: list[Num], what: str, least: int = 2) -> Num:
        column = self.columns[position]
        num = next((num for num in self._candidates(column, local) if num.column == column), None)
        if num is None:
            return self._new_symbol(position, what, least)
        return self._note(num)

    def _candidates(self, column: Column, local: list[Num]) -> Iterator[Num]:
        yield from local
        if column in self.known:
            yield self.known[column]
        sizes = local[:12]
        symbols = [symbol for _, _, symbol in self.symbols]
        for nums in (sizes, symbols):
            yield from self._scaled(column, nums)
            pairs = [self.sums.mul(a, b) for a, b in combinations(nums, 2)] + [self.sums.mul(a, a) for a in nums]
            yield from self._scaled(column, pairs)
            for a, b in combinations(nums, 2):
                yield self.sums.add(a, b)
                yield self.sums.add(a, b, -1)
                yield self.sums.add(b, a, -1)
            yield from self._shifts(column, nums, _SMALL_SHIFT)
            yield from self._parts(column, nums)
            for a, b, c in combinations(nums[:6], 3):
                yield from self._scaled(column, [self.sums.mul(self.sums.mul(a, b), c)])
                yield self.sums.add(self.sums.add(a, b), c)
            yield from self._shifts(column, nums, None)
            yield from self._affine(column, nums)
            if len(nums) > 2:
                yield self._total(nums)

    def _parts(self, column: Column, nums: list[Num]) -> Iterator[Num]:
        """num // k, and num // k rounded up."""
        for num in nums:
            quotients = (num.column[0] // column[0], -(-num.column[0] // column[0])) if column[0] > 0 else ()
            for divisor in dict.fromkeys(quotients):
                if divisor in _PLAIN_DIVISORS:
                    yield self.sums.floor(num, divisor)
                    yield self.sums.floor(self.sums.shift(num, divisor - 1), divisor)

    def _shifts(self, column: Column, nums: list[Num], most: int | None) -> Iterator[Num]:
        """num + c, the least c first."""
        for num in sorted(nums, key=lambda num: abs(column[0] - num.column[0])):
            by = column[0] - num.column[0]
            if most is None or abs(by) <= most:
                yield self.sums.shift(num, by)

    def _total(self, nums: list[Num]) -> Num:
        total = nums[0]
        for num in nums[1:]:
            total = self.sums.add(total, num)
        return total

    def _scaled(self, column: Column, nums: list[Num]) -> Iterator[Num]:
        for num in nums:
            if num.column[0] and column[0] % num.column[0] == 0:
                yield self.sums.scale(num, column[0] // num.column[0])

    def _affine(self, column: Column, nums: list[Num]) -> Iterator[Num]:
        """k * (num + c); (num + c) // k of small k."""
        for num in nums:
            for other, value in zip(column[1:], num.column[1:], strict=True):
                if value != num.column[0] and (other - column[0]) % (value - num.column[0]) == 0:
                    factor = (other - column[0]) // (value - num.column[0])
                    made = self.sums.scale(num, factor)
                    shift = column[0] - made.column[0]
                    if factor and shift % factor == 0 and abs(shift // factor) <= max(abs(factor), 64):
                        yield self.sums.shift(made, shift)
                    break
        for num in nums:
            for divisor in (2, 3, 4, 8, 16, 32):
                for shift in range(divisor):
                    yield self.sums.floor(self.sums.shift(num, shift), divisor)
                    yield self.sums.shift(self.sums.floor(self.sums.shift(num, shift), divisor), 1)


def as_sample_of(before: CutTrace, trace: CutTrace) -> CutTrace | None:
    """`before` with inputs where `trace` has them instead of plain numbers; None where there is no such place, or where
    they differ in more than that and in numbers."""
    if len(before.scalar_kinds) >= len(trace.scalar_kinds) or len(before.entries) != len(trace.entries):
        return None
    entries = []
    for old, new in zip(before.entries, trace.entries, strict=True):
        if old.op is not new.op or len(old.args) != len(new.args) or len(old.kwargs) != len(new.kwargs):
            return None
        args = tuple([_as(a, b) for a, b in zip(old.args, new.args, strict=True)])
        kwargs = tuple([(name, _as(a, b)) for (name, a), (_, b) in zip(old.kwargs, new.kwargs, strict=True)])
        entries.append(Entry(old.op, args, kwargs, old.outputs))
    return replace(before, entries=tuple(entries), scalar_kinds=trace.scalar_kinds)


def _as(old: Any, new: Any) -> Any:
    if type(new) is ScalarSlot:
        return new if type(old) in (Float, int, ScalarSlot) else old
    if type(old) is tuple and type(new) is tuple and len(old) == len(new):
        return tuple([_as(a, b) for a, b in zip(old, new, strict=True)])
    return old

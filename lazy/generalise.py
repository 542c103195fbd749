"""Unification: traces that differ in numbers only become one, whose numbers are expressions over few symbols.

Numbers that did not move between the samples stay constants. A size of an input that moved becomes a symbol, or a
multiple of one; every other number that moved is looked for among the sizes at hand (those of the operator's operands,
the formula of a convolution or a pooling window, products, sums, ...), and becomes a symbol of its own where nothing
simple fits. Floats that moved become runtime scalars.

Invariant: every expression is right for every sample. A guess that is wrong elsewhere cannot hurt: a new trace is
compared with what its symbols say of each of its numbers before anything made from the expressions is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from torchlazy.lazy.numbers import Parts, entry_numbers
from torchlazy.lazy.trace import CutTrace, Entry, Float, Slot, slots_in
from torchlazy.lazy.unified import Unified
from torchlazy.prims.size_expr import Poly, SizeExprs, Symbol

Column: TypeAlias = "tuple[int, ...]"  # one number in each sample

_SMALL_SHIFT = 2  # an input's size this near to another's is that one and a constant: a cache and its mask
_MOST_SYMBOLS = 24
_PLAIN_DIVISORS = frozenset((2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 32, 64, 128))


class CannotUnify(Exception):
    """The samples have no template; the message says which number at which operator, and what to do."""


@dataclass(frozen=True, slots=True)
class Num:
    """A number as an expression, and its values in the samples."""

    poly: Poly
    column: Column


def has_small_size(trace: CutTrace) -> bool:
    """Whether an input has a size of 0 or 1."""
    return any(size < 2 for _, geom in trace.inputs for size in geom.shape)


def mixes_small_sizes(a: CutTrace, b: CutTrace) -> bool:
    """Whether a size of an input is 0 or 1 in one trace only: broadcasting and emptiness make those other programs."""
    return any(
        x != y and min(x, y) < 2
        for (_, one), (_, other) in zip(a.inputs, b.inputs, strict=True)
        if one is not other
        for x, y in zip(one.shape, other.shape, strict=True)
    )


def unify(samples: Sequence[tuple[CutTrace, Parts]]) -> Unified:
    """One template for samples of one skeleton; CannotUnify where there is none."""
    return _Unifier(samples).run()


class _Unifier:
    def __init__(self, samples: Sequence[tuple[CutTrace, Parts]]) -> None:
        self.trace = samples[0][0]
        self.columns: list[Column] = list(zip(*(parts.ints for _, parts in samples), strict=True))
        self.float_columns = list(zip(*(parts.floats for _, parts in samples), strict=True))
        self.exprs = SizeExprs(())
        self.known: dict[Column, Num] = {}
        self.symbols: list[tuple[str, int | None, Num]] = []
        self.defining: list[int] = []
        self.nums: list[Num | None] = [None] * len(self.columns)
        self.slot_at: list[int] = []  # position of the first number of each slot's geometry
        at = 0
        for geom in self.trace.geometries:
            self.slot_at.append(at)
            at += 2 * len(geom.shape) + 1
        self.ends_at = at

    def run(self) -> Unified:
        for position, column in enumerate(self.columns):
            if _is_constant(column):
                self.nums[position] = self._constant(column)
        self._inputs()
        ends = self.ends_at
        at = ends + sum(2 * len(geom.shape) + 1 for _, geom in (*self.trace.inputs, *self.trace.outputs))
        for position, entry in enumerate(self.trace.entries):
            at = self._entry(entry, position, at)
        for number, geom in (*self.trace.inputs, *self.trace.outputs):
            twin = self.slot_at[number.number]
            for k in range(2 * len(geom.shape) + 1):
                if self.nums[ends + k] is None:
                    same = twin + k
                    is_twin = self.trace.geometries[number.number].shape == geom.shape
                    if is_twin and self.columns[same] == self.columns[ends + k]:
                        self.nums[ends + k] = self.nums[same]
                    else:
                        self.nums[ends + k] = self._resolve(ends + k, [], "an output of the program")
            ends += 2 * len(geom.shape) + 1
        moved = [p for p, column in enumerate(self.columns) if not _is_constant(column)]
        moved_floats = [p for p, column in enumerate(self.float_columns) if len(set(map(float.hex, column))) > 1]
        first = tuple(column[0] for column in self.columns)
        nums = [self.nums[position] for position in moved]
        assert all(num is not None for num in nums)
        return Unified(
            tuple((name, low) for name, low, _ in self.symbols),
            tuple(self.defining),
            tuple(moved),
            tuple(self.exprs.structure(num.poly) for num in nums if num is not None),
            len(self.columns),
            first,
            tuple(moved_floats),
            tuple(column[0] for column in self.float_columns),
        )

    # ---- numbers

    def _constant(self, column: Column) -> Num:
        return Num(self.exprs.number(column[0]), column)

    def _add(self, a: Num, b: Num, factor: int = 1) -> Num:
        column = tuple(x + factor * y for x, y in zip(a.column, b.column, strict=True))
        return Num(self.exprs.add(a.poly, b.poly, factor), column)

    def _mul(self, a: Num, b: Num) -> Num:
        column = tuple(x * y for x, y in zip(a.column, b.column, strict=True))
        return Num(self.exprs.mul(a.poly, b.poly), column)

    def _shift(self, a: Num, by: int) -> Num:
        return self._add(a, self._constant((by,) * len(a.column)))

    def _scale(self, a: Num, by: int) -> Num:
        return self._mul(a, self._constant((by,) * len(a.column)))

    def _floor(self, a: Num, by: int) -> Num:
        return Num(self.exprs.floor_div(a.poly, self.exprs.number(by)), tuple(x // by for x in a.column))

    def _new_symbol(self, position: int, what: str) -> Num:
        column = self.columns[position]
        if len(self.symbols) >= _MOST_SYMBOLS:
            raise CannotUnify(
                f"more than {_MOST_SYMBOLS} numbers change independently, the last of them {column} in {what}; "
                "keep sizes that belong together in step"
            )
        name = f"s{len(self.symbols)}"
        low = 2 if min(column) >= 2 else 0 if min(column) >= 0 else None
        self.exprs.add_symbol(Symbol(name, column[0], column[-1], low))
        num = Num(self.exprs.symbol(name), column)
        self.symbols.append((name, low, num))
        self.defining.append(position)
        self.known[column] = num
        return num

    # ---- inputs

    def _inputs(self) -> None:
        """Sizes of inputs, the smallest first: new symbols, multiples of one, or one and a small constant."""
        sizes: dict[Column, int] = {}
        for number, geom in self.trace.inputs:
            at = self.slot_at[number.number]
            for k in range(len(geom.shape)):
                column = self.columns[at + k]
                if _is_constant(column):
                    continue
                if min(column) < 2:
                    raise CannotUnify(f"a size of an input is {column}: sizes of 0 and 1 have programs of their own")
                sizes.setdefault(column, at + k)
        for column, position in sorted(sizes.items()):
            num = self._multiple(column) or self._shifted(column) or self._sum_of_symbols(column)
            if num is None:
                num = self._new_symbol(position, "an input's size")
            self.known.setdefault(column, num)
        for number, geom in self.trace.inputs:
            at = self.slot_at[number.number]
            rank = len(geom.shape)
            self._geometry(at, rank, [], f"input {number}", iter(()))

    def _multiple(self, column: Column) -> Num | None:
        for _, _, symbol in self.symbols:
            factor, rest = divmod(column[0], symbol.column[0])
            if not rest and self._scale(symbol, factor).column == column:
                return self._scale(symbol, factor)
        return None

    def _shifted(self, column: Column) -> Num | None:
        for _, _, symbol in self.symbols:
            by = column[0] - symbol.column[0]
            if abs(by) <= _SMALL_SHIFT and self._shift(symbol, by).column == column:
                return self._shift(symbol, by)
        return None

    def _sum_of_symbols(self, column: Column) -> Num | None:
        if len(self.symbols) < 2:
            return None
        nums = [symbol for _, _, symbol in self.symbols]
        for a, b in combinations(nums, 2):
            for made in (self._mul(a, b), self._add(a, b)):
                if made.column == column:
                    return made
        return None

    # ---- entries

    def _entry(self, entry: Entry, place: int, at: int) -> int:
        frame = self.trace.frames[place] if place < len(self.trace.frames) else ""
        what = f"{entry.op} at {frame or '?'}"
        local = self._operand_sizes(entry)
        # Given a factor, the result is that many times the operand, whatever else has the same size today.
        is_resampled = "upsample" in entry.op.name() and any(type(value) is Float for value in entry.args)
        for name, value in entry_numbers(entry):
            if type(value) is Float:
                continue
            if self.nums[at] is None and is_resampled and name == "output_size":
                scaled = self._scaled(self.columns[at], local)
                self.nums[at] = next((num for num in scaled if num.column == self.columns[at]), None)
            if self.nums[at] is None:
                self.nums[at] = self._resolve(at, local, f"{name} of {what}")
            num = self.nums[at]
            if num is not None and not _is_constant(num.column):
                local.append(num)
            at += 1
        for number in slots_in(entry.outputs):
            geom = self.trace.geometries[number.number]
            formulas = self._window_formulas(entry, number)
            self._geometry(self.slot_at[number.number], len(geom.shape), local, f"the result of {what}", formulas)
        return at

    def _operand_sizes(self, entry: Entry) -> list[Num]:
        """Sizes of the operands that moved, then their strides, each once."""
        found: dict[Column, Num] = {}
        slots = slots_in((entry.args, tuple(value for _, value in entry.kwargs)))
        for part in (0, 1):
            for number in slots:
                at, rank = self.slot_at[number.number], len(self.trace.geometries[number.number].shape)
                for k in range(rank):
                    num = self.nums[at + part * rank + k]
                    if num is not None and not _is_constant(num.column):
                        found.setdefault(num.column, num)
        return list(found.values())

    def _geometry(self, at: int, rank: int, local: list[Num], what: str, formulas: Iterator[Num]) -> None:
        """Sizes, then strides from the sizes, then the offset."""
        exact = {num.column: num for num in formulas}
        for k in range(rank):
            if self.nums[at + k] is None:
                self.nums[at + k] = exact.get(self.columns[at + k]) or self._resolve(at + k, local, what)
        sizes = [self.nums[at + k] for k in range(rank)]
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
        step = self._constant((1,) * len(self.columns[0]))
        for size in reversed(sizes):
            yield step
            step = self._mul(step, size)
        yield step
        for count in range(1, len(sizes) + 1):
            for chosen in combinations(sizes, count):
                product = chosen[0]
                for size in chosen[1:]:
                    product = self._mul(product, size)
                yield product

    def _window_formulas(self, entry: Entry, result: Slot) -> Iterator[Num]:
        """Sizes of what slides a window over its operand."""
        name = entry.op.name()
        if name == "aten::cat":
            yield from self._cat_formulas(entry)
            return
        if name == "aten::slice.Tensor":
            yield from self._slice_formulas(entry)
            return
        if "conv" not in name and "pool" not in name and "im2col" not in name:
            return
        values = {a.name: v for a, v in zip(entry.op._schema.arguments, entry.args, strict=False)} | dict(entry.kwargs)
        given = next((v for v in values.values() if isinstance(v, Slot)), None)
        if given is None:
            return
        at, rank = self.slot_at[given.number], len(self.trace.geometries[given.number].shape)
        weight = values.get("weight")
        kernel = values.get("kernel_size")
        if isinstance(weight, Slot):
            kernel = self.trace.geometries[weight.number].shape[2:]
        if type(kernel) is not tuple or values.get("transposed") is True:
            return
        spatial = len(kernel) if len(kernel) > 1 else rank - 2
        for d in range(spatial):
            num = self.nums[at + rank - spatial + d]
            if num is None or rank < spatial:
                continue
            window = _at(kernel, d)
            step = _at(values.get("stride") or kernel, d)
            padding, dilation = _at(values.get("padding") or (0,), d), _at(values.get("dilation") or (1,), d)
            reach = 2 * padding - dilation * (window - 1) - 1
            if values.get("ceil_mode"):
                yield self._shift(self._floor(self._shift(num, reach + step - 1), step), 1)
            yield self._shift(self._floor(self._shift(num, reach), step), 1)

    def _cat_formulas(self, entry: Entry) -> Iterator[Num]:
        """The sum of the operands' sizes along the dimension."""
        dim = entry.args[1] if len(entry.args) > 1 else dict(entry.kwargs).get("dim", 0)
        total: Num | None = None
        for number in slots_in(entry.args[0]):
            rank = len(self.trace.geometries[number.number].shape)
            size = self.nums[self.slot_at[number.number] + dim % rank] if rank else None
            if size is None:
                return
            total = size if total is None else self._add(total, size)
        if total is not None:
            yield total

    def _slice_formulas(self, entry: Entry) -> Iterator[Num]:
        """(end - start) // step rounded up, where the bounds lie inside."""
        values = {a.name: v for a, v in zip(entry.op._schema.arguments, entry.args, strict=False)} | dict(entry.kwargs)
        given, dim = values["self"], values.get("dim", 0)
        assert isinstance(given, Slot)
        at, rank = self.slot_at[given.number], len(self.trace.geometries[given.number].shape)
        whole = self.nums[at + dim % rank]
        start, end, step = values.get("start") or 0, values.get("end"), values.get("step", 1)
        if whole is None or any(type(v) is not int for v in (start, step)):
            return
        bounds = [self.known.get(tuple(whole.column))]
        if type(end) is int:
            bounds += [num for num in self.known.values() if num.column[0] == end]
            bounds += [self._shift(whole, end) if end < 0 else self._constant((end,) * len(whole.column)), whole]
        else:
            bounds.append(whole)
        for upper in bounds:
            if upper is not None and start >= 0 and step > 0:
                yield self._floor(self._shift(upper, step - 1 - start), step)

    # ---- looking for an expression

    def _resolve(self, position: int, local: list[Num], what: str) -> Num:
        column = self.columns[position]
        num = next((num for num in self._candidates(column, local) if num.column == column), None)
        if num is None:
            return self._new_symbol(position, what)
        self.known.setdefault(column, num)
        return num

    def _candidates(self, column: Column, local: list[Num]) -> Iterator[Num]:
        yield from local
        if column in self.known:
            yield self.known[column]
        sizes = local[:12]
        symbols = [symbol for _, _, symbol in self.symbols]
        for nums in (sizes, symbols):
            yield from self._scaled(column, nums)
            pairs = [self._mul(a, b) for a, b in combinations(nums, 2)] + [self._mul(a, a) for a in nums]
            yield from self._scaled(column, pairs)
            for a, b in combinations(nums, 2):
                yield self._add(a, b)
                yield self._add(a, b, -1)
                yield self._add(b, a, -1)
            yield from self._shifts(column, nums, _SMALL_SHIFT)
            yield from self._parts(column, nums)
            for a, b, c in combinations(nums[:6], 3):
                yield from self._scaled(column, [self._mul(self._mul(a, b), c)])
                yield self._add(self._add(a, b), c)
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
                    yield self._floor(num, divisor)
                    yield self._floor(self._shift(num, divisor - 1), divisor)

    def _shifts(self, column: Column, nums: list[Num], most: int | None) -> Iterator[Num]:
        """num + c, the least c first."""
        for num in sorted(nums, key=lambda num: abs(column[0] - num.column[0])):
            by = column[0] - num.column[0]
            if most is None or abs(by) <= most:
                yield self._shift(num, by)

    def _total(self, nums: list[Num]) -> Num:
        total = nums[0]
        for num in nums[1:]:
            total = self._add(total, num)
        return total

    def _scaled(self, column: Column, nums: list[Num]) -> Iterator[Num]:
        for num in nums:
            if num.column[0] and column[0] % num.column[0] == 0:
                yield self._scale(num, column[0] // num.column[0])

    def _affine(self, column: Column, nums: list[Num]) -> Iterator[Num]:
        """k * (num + c); (num + c) // k of small k."""
        for num in nums:
            for other, value in zip(column[1:], num.column[1:], strict=True):
                if value != num.column[0] and (other - column[0]) % (value - num.column[0]) == 0:
                    factor = (other - column[0]) // (value - num.column[0])
                    made = self._scale(num, factor)
                    shift = column[0] - made.column[0]
                    if factor and shift % factor == 0 and abs(shift // factor) <= max(abs(factor), 64):
                        yield self._shift(made, shift)
                    break
        for num in nums:
            for divisor in (2, 3, 4, 8, 16, 32):
                for shift in range(divisor):
                    yield self._floor(self._shift(num, shift), divisor)
                    yield self._shift(self._floor(self._shift(num, shift), divisor), 1)


def _is_constant(column: Column) -> bool:
    first = column[0]
    return all(value == first for value in column)


def _at(values: Any, d: int) -> int:
    return values if isinstance(values, int) else values[d] if d < len(values) else values[-1]

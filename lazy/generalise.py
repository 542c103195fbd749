"""Unification: traces that differ in numbers only become one, whose numbers are expressions over few symbols.

Numbers that did not move between the samples stay constants, but for results that rounding made equal (a stride of 2
over 31 and 32 elements), where the operator's formula is known. A size of an input that moved becomes a symbol, or a
multiple of one; every other number that moved is looked for among the sizes at hand (those of the operator's operands,
the formula of a convolution or a pooling window, products, sums, ...), and becomes a symbol of its own where nothing
simple fits. Floats that moved become runtime scalars.

Invariant: every expression is right for every sample. A guess that is wrong elsewhere cannot hurt: a new trace is
compared with what its symbols say of each of its numbers before anything made from the expressions is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from torchlazy.lazy.numbers import Parts, bits, entry_numbers
from torchlazy.lazy.trace import CutTrace, Entry, Float, Slot, slots_in
from torchlazy.lazy.unified import Unified
from torchlazy.prims.size_expr import Poly, SizeExprs, Symbol

Column: TypeAlias = "tuple[int, ...]"  # one number in each sample

_SMALL_SHIFT = 2  # an input's size this near to another's is that one and a constant: a cache and its mask
_MOST_SYMBOLS = 24
_TILED_ATTENTION, _ATTENTION_TILE = "aten::_scaled_dot_product_efficient_attention", 32
_PLAIN_DIVISORS = frozenset((2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 32, 64, 128))


class CannotUnify(Exception):
    """The samples have no template; the message says which number at which operator, and what to do."""


@dataclass(frozen=True, slots=True)
class Num:
    """A number as an expression, and its values in the samples."""

    poly: Poly
    column: Column

    @property
    def moves(self) -> bool:
        """Whether it depends on the symbols, though it may be the same in all samples."""
        return self.poly.constant is None


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
        self.rounded: dict[tuple[int, int, Column], Num] = {}  # sizes equal by rounding: rank, dimension from the end
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
            is_twin = self.trace.geometries[number.number].shape == geom.shape
            for k in range(2 * len(geom.shape) + 1):
                same = twin + k
                if is_twin and self.columns[same] == self.columns[ends + k]:
                    self.nums[ends + k] = self.nums[same]
                elif self.nums[ends + k] is None:
                    self.nums[ends + k] = self._resolve(ends + k, [], "an output of the program")
            ends += 2 * len(geom.shape) + 1
        moved = [p for p, num in enumerate(self.nums) if num is None or num.moves or not _is_constant(num.column)]
        moved_floats = [p for p, column in enumerate(self.float_columns) if len(set(map(bits, column))) > 1]
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
            self._geometry(at, rank, [], f"input {number}", {})

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
        values = _arguments(entry)
        told: dict[tuple[int, Column], Num] = {}  # sizes that are told in a list, by their place from its end
        items: Counter[str] = Counter()
        for name, value in entry_numbers(entry):
            if type(value) is Float:
                continue
            column, listed = self.columns[at], values[name]
            from_end = items[name] - len(listed) if type(listed) is tuple else 0
            items[name] += 1
            num = self._told_size(entry, name, column, from_end, local)
            if num is not None:
                self.nums[at] = told[from_end, column] = num
            elif self.nums[at] is None:
                self.nums[at] = self._resolve(at, local, f"{name} of {what}")
            num = self.nums[at]
            if num is not None and num.moves:
                local.append(num)
            at += 1
        for number in slots_in(entry.outputs):
            place, rank = self.slot_at[number.number], len(self.trace.geometries[number.number].shape)
            exact = {(k, num.column): num for k, num in self._window_formulas(entry, rank)}
            exact |= {(rank + from_end, column): num for (from_end, column), num in told.items()}
            self._rounded_equal(entry, place, rank, exact)
            self._geometry(place, rank, local, f"the result of {what}", exact)
        return at

    def _rounded_equal(self, entry: Entry, at: int, rank: int, exact: dict[tuple[int, Column], Num]) -> None:
        """Sizes of a result that are the same in all samples, and yet expressions: as the operator's formula says, or
        the same dimension of an operand."""
        found = False
        for k in range(rank):
            column = self.columns[at + k]
            if _is_constant(column):
                num = exact.get((k, column)) or self._same_dimension(entry, k, rank, column)
                if num is not None and num.moves:
                    self.nums[at + k] = num
                    found = True
                    if entry.op.name() != _TILED_ATTENTION:  # whose sums only its own gradient reads
                        self.rounded[rank, k - rank, column] = num
        step = self._constant((1,) * len(self.columns[0]))
        for k in reversed(range(rank if found else 0)):  # strides of the row-major layout are products of them
            size = self.nums[at + k]
            if step.moves and step.column == self.columns[at + rank + k]:
                self.nums[at + rank + k] = step
            if size is None:
                break
            step = self._mul(step, size)

    def _told_size(self, entry: Entry, name: str, column: Column, from_end: int, local: list[Num]) -> Num | None:
        """An argument that is not what it seems: resampled by a factor; equal by rounding, as a size of a shape or as
        the number of elements that a sum is divided by."""
        op = entry.op.name()
        if name == "output_size" and "upsample" in op and any(type(value) is Float for value in entry.args):
            # Given a factor, the result is that many times the operand, whatever else has the same size today.
            return next((num for num in self._scaled(column, local) if num.moves and num.column == column), None)
        if not self.rounded or not _is_constant(column):
            return None
        if name == "size":
            listed = _arguments(entry)[name]
            return self.rounded.get((len(listed), from_end, column)) if type(listed) is tuple else None
        if op == "aten::div.Scalar":
            sides = [num for num in local if _is_constant(num.column)]
            products = (self._mul(a, b) for a, b in (*combinations(sides, 2), *((a, a) for a in sides)))
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
        """Sizes of the operands that moved, then their strides, each once."""
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
                self.nums[at + k] = exact.get((k, self.columns[at + k])) or self._resolve(at + k, local, what)
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

    def _window_formulas(self, entry: Entry, rank: int) -> Iterator[tuple[int, Num]]:
        """Sizes of results that the operator's own formula tells, each with its dimension."""
        name = entry.op.name()
        if name == "aten::cat":
            yield from self._cat_formulas(entry)
            return
        if name == "aten::slice.Tensor":
            yield from self._slice_formulas(entry)
            return
        if name == _TILED_ATTENTION:
            yield from self._row_sums_formula(entry, rank)
            return
        if "backward" in name or not any(part in name for part in ("conv", "pool", "im2col")):
            return
        values = _arguments(entry)
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
            k = rank - spatial + d
            num = self.nums[at + k]
            if num is None or rank < spatial:
                continue
            window = _at(kernel, d)
            step = _at(values.get("stride") or kernel, d)
            padding, dilation = _at(values.get("padding") or (0,), d), _at(values.get("dilation") or (1,), d)
            reach = 2 * padding - dilation * (window - 1) - 1
            yield k, self._shift(self._floor(self._shift(num, reach), step), 1)
            if values.get("ceil_mode"):
                yield k, self._shift(self._floor(self._shift(num, reach + step - 1), step), 1)

    def _row_sums_formula(self, entry: Entry, rank: int) -> Iterator[tuple[int, Num]]:
        """Attention on a GPU keeps the sums of its rows in whole tiles of 32."""
        query = entry.args[0]
        assert isinstance(query, Slot)
        length = self.nums[self.slot_at[query.number] + 2]
        if rank == 3 and length is not None:
            tiles = self._floor(self._shift(length, _ATTENTION_TILE - 1), _ATTENTION_TILE)
            yield 2, self._scale(tiles, _ATTENTION_TILE)

    def _cat_formulas(self, entry: Entry) -> Iterator[tuple[int, Num]]:
        """The sum of the operands' sizes along the dimension."""
        dim = entry.args[1] if len(entry.args) > 1 else dict(entry.kwargs).get("dim", 0)
        total: Num | None = None
        rank = 0
        for number in slots_in(entry.args[0]):
            rank = len(self.trace.geometries[number.number].shape)
            size = self.nums[self.slot_at[number.number] + dim % rank] if rank else None
            if size is None:
                return
            total = size if total is None else self._add(total, size)
        if total is not None:
            yield dim % rank, total

    def _slice_formulas(self, entry: Entry) -> Iterator[tuple[int, Num]]:
        """(end - start) // step rounded up, where the bounds lie inside."""
        values = _arguments(entry)
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
                yield dim % rank, self._floor(self._shift(upper, step - 1 - start), step)

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


def _arguments(entry: Entry) -> dict[str, Any]:
    """The arguments that were given, by name."""
    return {a.name: v for a, v in zip(entry.op._schema.arguments, entry.args, strict=False)} | dict(entry.kwargs)


def _at(values: Any, d: int) -> int:
    return values if isinstance(values, int) else values[d] if d < len(values) else values[-1]

"""How far a padding reaches, as an expression: what it fills up to is looked for, not what its numbers look like.

Programs pad what is too small for something else (a level of a U-Net at an odd image), to a multiple (of a window),
or to a given length. Where sizes happened to fit in all samples the amounts are 0 there, and expressions all the same.

Invariant: amounts and sizes are right for every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from torchlazy.lazy.size_formulas import VIEWS
from torchlazy.lazy.trace import CutTrace, Slot
from torchlazy.lazy.unified_sizes import Arithmetic, Column, Num, is_constant

PAD = "aten::constant_pad_nd"
_Way: TypeAlias = "Callable[[Num, Column, Column], Num | None]"


def split_sizes(trace: CutTrace, sizes_at: Sequence[Sequence[Column]]) -> dict[Column, frozenset[int]]:
    """Sizes that a view takes apart into a number of equal parts, and how large the parts are. `sizes_at` has the sizes
    of each slot."""
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
        """What a dimension that moves is padded by, before and behind; `alike` are the expressions known
        for the size it leads to. None where the amounts are best told by themselves."""
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
        """1 or -1 where the expression is at least or at most 0 for all sizes, else 0: nobody pads by such a number."""
        if min(num.column) < 0 or max(num.column) > 0:
            return 1 if max(num.column) > 0 else -1
        if self._sums.surely_at_least_zero(num):
            return 1
        return -1 if self._sums.surely_at_least_zero(self._sums.negative(num)) else 0

    def _multiple(self, made: Column, amounts: Column) -> int | None:
        """What the size is filled up to multiples of: parts that it is taken apart into later, or what all samples
        share."""
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

    def _parts(self, total: Num, low: Column, high: Column, ways: Sequence[_Way]) -> tuple[Num, Num] | None:
        """Before and behind, the first way that fits."""
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
    """Where in the list of amounts those of each dimension stand: before it, behind it."""
    return {rank - 1 - i: (2 * i, 2 * i + 1) for i in range(len(pad) // 2)}

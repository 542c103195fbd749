"""What traces of one skeleton have in common, and a test whether another trace fits.

Invariant: `Matcher.match` accepts a trace only if each of its numbers is what the symbols, read off it, say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torchlazy.lazy.trace.skeleton import DecomposedTrace, assemble_trace, bits
from torchlazy.lazy.trace.trace import CutTrace, scalar_slot
from torchlazy.prims.size_expr import Structure, python_text
from torchlazy.prims.size_int import SizeSpace


@dataclass(frozen=True, eq=False)
class UnifiedTrace:
    """What the samples have in common.

    `moved` are the positions of ints that differ between samples, `exprs` their expressions; `constants` has the ints
    that agree. `defining[i]` is a position whose number is symbol i itself. Floats likewise.
    """

    symbols: tuple[tuple[str, int | None], ...]  # name, least value
    defining: tuple[int, ...]
    moved: tuple[int, ...]
    exprs: tuple[Structure, ...]
    count: int
    constants: tuple[int, ...]  # at all positions; those that moved hold the first sample's number
    moved_floats: tuple[int, ...]
    float_constants: tuple[complex, ...]  # floats and complex numbers

    def to_json(self) -> str:
        """All of it as text."""
        distinct = list(dict.fromkeys(self.exprs))
        place = {expr: number for number, expr in enumerate(distinct)}
        return json.dumps(
            {
                "symbols": self.symbols,
                "defining": self.defining,
                "moved": self.moved,
                "exprs": distinct,
                "places": [place[expr] for expr in self.exprs],
                "constants": self.constants,
                "moved_floats": self.moved_floats,
                "floats": [bits(value) for value in self.float_constants],
            }
        )

    @staticmethod
    def from_json(text: str) -> UnifiedTrace:
        """What `to_json` wrote; nothing in the text is run but arithmetic on its symbols."""
        data = json.loads(text)
        exprs = [_as_tuples(expr) for expr in data["exprs"]]
        symbols = tuple((str(name), low) for name, low in data["symbols"])
        if not all(name.isidentifier() for name, _ in symbols):
            raise ValueError("template: a symbol's name is no name")
        return UnifiedTrace(
            symbols,
            tuple(map(int, data["defining"])),
            tuple(map(int, data["moved"])),
            tuple(exprs[place] for place in data["places"]),
            len(data["constants"]),
            tuple(map(int, data["constants"])),
            tuple(map(int, data["moved_floats"])),
            tuple(map(_number_of_bits, data["floats"])),
        )

    def symbols_of(self, ints: Sequence[int]) -> tuple[int, ...]:
        """The values that a trace's numbers give to the symbols."""
        return tuple([ints[position] for position in self.defining])

    def trace_in(self, space: SizeSpace, trace: CutTrace) -> CutTrace:
        """A sample with tracked sizes in the place of numbers that moved, and scalars in that of floats."""
        ints: list[int] = list(self.constants)
        for position, structure in zip(self.moved, self.exprs, strict=True):
            ints[position] = space.read(structure)
        first = len(trace.scalar_kinds)
        floats: list[Any] = list(self.float_constants)
        for number, position in enumerate(self.moved_floats):
            floats[position] = scalar_slot(first + number, type(self.float_constants[position]))
        together = assemble_trace(trace, ints, floats)
        kinds = (*trace.scalar_kinds, *(type(self.float_constants[position]) for position in self.moved_floats))
        return CutTrace(
            together.entries, together.geometries, together.inputs, kinds, together.outputs, together.donations,
            together.frames,
        )  # fmt: skip


class Matcher:
    """A fast test whether a trace is an instance of a unified trace: one comparison of all its numbers."""

    def __init__(self, unified: UnifiedTrace) -> None:
        self.unified = unified
        moved = set(unified.moved)
        self._fixed = _getter([p for p in range(unified.count) if p not in moved])
        self._constants = self._fixed(unified.constants)
        self._moved = _getter(unified.moved)
        distinct = dict.fromkeys(map(python_text, unified.exprs))
        place = {text: number for number, text in enumerate(distinct)}
        names = ", ".join(name for name, _ in unified.symbols)
        source = f"def values({names}):\n    return [{', '.join(distinct)}]\n"
        namespace: dict[str, Any] = {}
        exec(source, namespace)
        self._values = namespace["values"]
        self._spread = _getter([place[python_text(expr)] for expr in unified.exprs])
        moved_floats = set(unified.moved_floats)
        self._fixed_floats = _getter([p for p in range(len(unified.float_constants)) if p not in moved_floats])
        self._float_bits = tuple(map(bits, self._fixed_floats(unified.float_constants)))
        self._lows = tuple(low for _, low in unified.symbols)

    def ints_of(self, symbols: Sequence[int]) -> list[int]:
        """All integers of the trace that has these values of the symbols."""
        found = list(self.unified.constants)
        for position, value in zip(self.unified.moved, self._spread(self._values(*symbols)), strict=True):
            found[position] = value
        return found

    def match(self, parts: DecomposedTrace) -> tuple[tuple[int, ...], tuple[complex, ...]] | None:
        """The values of the symbols and of the floats that moved, or None for another trace."""
        unified, ints = self.unified, parts.ints
        if len(ints) != unified.count or self._fixed(ints) != self._constants:
            return None
        symbols = unified.symbols_of(ints)
        if any(low is not None and value < low for value, low in zip(symbols, self._lows, strict=True)):
            return None
        try:
            if self._moved(ints) != self._spread(self._values(*symbols)):
                return None
        except ZeroDivisionError:
            return None
        if tuple(map(bits, self._fixed_floats(parts.floats))) != self._float_bits:
            return None
        return symbols, tuple([parts.floats[position] for position in unified.moved_floats])


def _number_of_bits(text: str) -> complex:
    parts = [float.fromhex(part) for part in str(text).split()]
    return parts[0] if len(parts) == 1 else complex(*parts)


def _getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if not positions:
        return lambda values: ()
    if len(positions) == 1:
        (only,) = positions
        return lambda values: (values[only],)
    return itemgetter(*positions)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value

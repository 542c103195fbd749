"""Constant values of the running trace: masks of ones, positions, comparisons of those.

Libraries read such values on the host ("is every position 0?"), where a cut would split the program for an answer that
is always the same.

Invariant: a value is a constant only if no input, no varying number and no random or uninitialised operator leads to
it; it is computed once by the operators themselves, and cached under these operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.trace import Complex, Entry, ScalarSlot, Slot, slots_in

_MAX_ENTRIES = 64
_MAX_NUMEL = 1 << 22
_MAX_KEPT = 512
_UNKNOWN = ("aten::empty", "aten::new_empty", "torchlazy::random_bits", "aten::rand", "aten::_efficientzerotensor")


class ConstantValues:
    """Constants computed so far, by the operators that lead to them."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def item(
        self, entries: Sequence[Entry], geometries: Sequence[Geometry], inputs: frozenset[int], wanted: Slot
    ) -> Any:
        """The one Python number that slot `wanted` holds, or None where it is no constant (or too expensive)."""
        needed = _needed(entries, geometries, inputs, wanted)
        if needed is None:
            return None
        key = _key(entries, geometries, needed, wanted)
        if key not in self._known:
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            self._known[key] = _computed(entries, needed, wanted)
        return self._known[key]


def _needed(
    entries: Sequence[Entry], geometries: Sequence[Geometry], inputs: frozenset[int], wanted: Slot
) -> list[int] | None:
    """Positions of the entries that lead to the slot, in order; None if it depends on anything else, too."""
    slots = {wanted.number}
    if slots & inputs:
        return None
    found: list[int] = []
    for position in range(len(entries) - 1, -1, -1):
        entry = entries[position]
        made = {out.number for out in slots_in(entry.outputs)}
        if not made & slots:
            continue
        slots -= made
        values = (*entry.args, *(value for _, value in entry.kwargs))
        read = {slot.number for slot in slots_in(values)}
        if (
            read & inputs
            or _has_scalar(values)
            or entry.op.name().startswith(_UNKNOWN)
            or any(geometries[number].numel > _MAX_NUMEL for number in made)
        ):
            return None
        found.append(position)
        if len(found) > _MAX_ENTRIES:
            return None
        slots |= read
        if not slots:
            break
    return None if slots else found[::-1]


def _has_scalar(value: Any) -> bool:
    if type(value) is tuple:
        return any(map(_has_scalar, value))
    return type(value) is ScalarSlot


def _key(
    entries: Sequence[Entry], geometries: Sequence[Geometry], needed: Sequence[int], wanted: Slot
) -> tuple[Any, ...]:
    """The operators with their slots numbered from zero, their results, and which of these is wanted: `max` has two
    results, and operators with equal arguments (1 and True) may give different dtypes."""
    numbers: dict[int, int] = {}

    def renamed(value: Any) -> Any:
        if type(value) is Slot:
            return ("slot", numbers.setdefault(value.number, len(numbers)))
        return tuple(map(renamed, value)) if type(value) is tuple else value

    calls = tuple(
        (entries[i].op, renamed(entries[i].args), renamed(entries[i].kwargs), renamed(entries[i].outputs))
        for i in needed
    )
    return (*calls, tuple(geometries[number] for number in numbers), renamed(wanted))


def _computed(entries: Sequence[Entry], needed: Sequence[int], wanted: Slot) -> Any:
    values: dict[int, Any] = {}

    def real(value: Any) -> Any:
        if type(value) is Slot:
            return values[value.number]
        if type(value) is tuple:
            return [real(item) for item in value]
        if type(value) is Complex:
            return complex(value)
        return getattr(value, "value", value)  # a Float

    def keep(outputs: Any, result: Any) -> None:
        if type(outputs) is Slot:
            values[outputs.number] = result
        elif type(outputs) is tuple:
            for output, item in zip(outputs, result, strict=True):
                keep(output, item)

    for position in needed:
        entry = entries[position]
        keep(entry.outputs, entry.op(*map(real, entry.args), **{name: real(v) for name, v in entry.kwargs}))
    found: torch.Tensor = values[wanted.number]
    return found.item()

"""Values of a trace by what they are made of, as far down as primitives: equal values are one.

A call of the trace counts as the primitives that decomposition made of it, so that a norm's mean is made of its operand
but not of its weight, and what a backward computes anew is the forward's.

Invariant: two slots are one value only if the same primitives make them of the same values; operators with an effect
make a value of their own at each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cache
from typing import Any

import torch
from torchlazy.lazy.repeated_trace import TraceCalls
from torchlazy.lazy.slot_places import Alone, Expression, Partial, Place, SlotPlaces
from torchlazy.lazy.trace import CutTrace, Float
from torchlazy.prims.ops import reshape

_DROPOUT = "dropout_p"


class Values:
    """The values of one trace, numbered. `ops` numbers what makes values, for all traces that shall be compared."""

    def __init__(
        self, trace: CutTrace, calls: TraceCalls, short: TraceCalls, places: SlotPlaces, ops: dict[Hashable, int]
    ) -> None:
        """`places` are those of the trace of the calls `short`, whose primitives equal calls of this trace have."""
        self.trace, self.calls, self.expressions, self._ops = trace, calls, places.parts, ops
        self.made: list[tuple[int, tuple[int, ...]] | None] = []
        """By value: what makes it, and of which values; None for one that is given."""
        self.whole_of: dict[int, int] = {}
        """By value of a part of a reduction: the reduction's. It counts as what the part is made of."""
        self.reshaped: dict[int, int] = {}
        """By value: what it has the elements of, in the same order."""
        self._numbers: dict[Hashable, int] = {}
        self._of_slot: dict[int, int] = {}
        self._op_of: dict[int, int] = {}  # by expression: hashing what one is takes long
        known: dict[Hashable, tuple[int | None, ...] | None] = {}
        for key, outs in zip(short.calls.keys, short.calls.outs, strict=True):
            found = tuple([places.expressions.get(slot) for slot in outs])
            known[key] = found if known.setdefault(key, found) == found else None
        kinds: dict[Hashable, tuple[tuple[int | None, ...] | None, list[int]]] = {}
        for call, key in enumerate(calls.calls.keys):
            kind = kinds.get(key)
            if kind is None:
                ops_of_results = [self._op(("call", key, k)) for k in range(len(calls.calls.outs[call]))]
                kind = kinds[key] = known.get(key), ops_of_results
            self._add(call, *kind)

    def of(self, place: Place) -> int:
        """The value of a slot, of a scalar, of an expression inside of a call, or of a part of one of these."""
        if isinstance(place, Partial):
            whole = self.of(place.whole)
            part = self._number(self._op(("partial", place.number, place.how)), (whole,), None)
            self.whole_of[part] = whole
            return part
        if isinstance(place, int):
            found = self._of_slot.get(place)
            if found is None:
                found = self._of_slot[place] = len(self.made)
                self.made.append(None)
            return found
        if isinstance(place, Alone):
            return self._expression(place.expression, [self.of(place.slot)], {})
        call, _ = self.calls.maker[place[0]]
        return self._expression(place[1], [self.of(number) for number in self.calls.calls.refs[call]], {})

    def _add(self, call: int, expressions: tuple[int | None, ...] | None, ops: list[int]) -> None:
        outs = self.calls.calls.outs[call]
        operands = [self.of(number) for number in self.calls.calls.refs[call]]
        entry = self.trace.entries[self.calls.entry[call]]
        with_effect = has_effect(entry.op, entry.args, entry.kwargs)
        inside: dict[int, int] = {}
        for k, slot in enumerate(outs):
            expression = None if with_effect or expressions is None else expressions[k]
            if expression is not None:
                self._of_slot[slot] = self._expression(expression, operands, inside)
            else:
                own = call if with_effect else None
                self._of_slot[slot] = self._number(ops[k], tuple(operands), own)

    def _expression(self, number: int, operands: list[int], inside: dict[int, int]) -> int:
        if number not in inside:
            one: Expression = self.expressions[number]
            if one.operand is not None:
                return operands[one.operand]
            parts = tuple([self._expression(part, operands, inside) for part in one.parts])
            is_reshape = one.op[0] is reshape  # type: ignore[index]
            if is_reshape:  # of what was reshaped before: a view that was cut goes by way of the memory behind it
                parts = (self.reshaped.get(parts[0], parts[0]),)
            op = self._op_of.get(number)
            if op is None:
                op = self._op_of[number] = self._op(one.op)
            made = inside[number] = self._number(op, parts, None)
            if is_reshape:
                self.reshaped[made] = parts[0]
        return inside[number]

    def _op(self, op: Hashable) -> int:
        return self._ops.setdefault(op, len(self._ops))

    def _number(self, op: int, parts: tuple[int, ...], own: int | None) -> int:
        made = op, parts
        number = self._numbers.setdefault((made, own), len(self.made))
        if number == len(self.made):
            self.made.append(made)
        return number


def has_effect(op: torch._ops.OpOverload, args: tuple[Any, ...], keywords: Iterable[tuple[str, Any]]) -> bool:
    """Whether each call counts: it draws random numbers, or talks to other processes. Attention without dropout draws
    none, whatever its tag says."""
    effect = _effect_of(op)
    if type(effect) is bool:
        return effect
    given = args[effect] if effect < len(args) else dict(keywords).get(_DROPOUT, 0.0)
    given = given.value if type(given) is Float else given
    return type(given) not in (int, float) or given != 0


@cache
def _effect_of(op: torch._ops.OpOverload) -> bool | int:
    """Whether calls of an operator have an effect; of attention the place of its share of dropout, which tells."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return op.namespace in ("c10d", "_c10d_functional")
    names = [argument.name for argument in op._schema.arguments]
    is_attention = op.__name__.startswith("_scaled_dot_product_") and _DROPOUT in names
    return names.index(_DROPOUT) if is_attention else True

"""Proves that a schedule with stamped layers computes its trace, given that the short one computes the short trace.

Values are compared down to primitives: a call counts as the primitives that its decomposition made, so that a norm's
mean depends on its operand but not on its weight, and what a backward rematerializes equals the forward's value.

Buffers of both schedules hold slots of their traces: which ones is known for the short schedule, and follows for the
long one by layers. For each item of the long schedule that makes such a slot, the operators between that slot and the
slots that the item reads must be those between the slots of the item which it was stamped from. Then the item computes
the one from the others as the original does, and so, by induction along the schedule, each buffer holds its slot. What
an item reads that holds no slot counts as made by the item itself.

Also: each buffer is made before it is read, an input is overwritten after its last reader, the outputs are the
trace's, and so are the donations.

Invariant: two slots are one value only if the same primitives make them from the same values; operators with an effect
make a value of their own at each call. Nothing that plan/layers/detect.py guessed is trusted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torchlazy.inductor.grouping import item_reads, item_writes, roots_of
from torchlazy.inductor.ir import Buffer, ExternNode, Kernel, ViewNode
from torchlazy.inductor.scheduler import Item, Schedule
from torchlazy.lazy.plan.layers.items import layout_of
from torchlazy.lazy.plan.layers.names import NotPeriodic, Stamped
from torchlazy.lazy.plan.layers.shorten import TraceCalls, scalar_value
from torchlazy.lazy.plan.layers.slot_places import (
    Alone,
    BufferValue,
    Expression,
    Partial,
    Place,
    SlotPlaces,
    moved,
    slot_of,
)
from torchlazy.lazy.plan.layers.stamp import Repeater
from torchlazy.lazy.trace.trace import CutTrace, Float
from torchlazy.prims.ops import reshape

_DROPOUT = "dropout_p"


class Values:
    """The values of one trace, numbered. `ops` numbers what makes values, shared by all traces that are compared."""

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
        """By value of a reshape: the value that was reshaped."""
        self._numbers: dict[Hashable, int] = {}
        self._of_slot: dict[int, int] = {}
        self._op_of: dict[int, int] = {}  # by expression: hashing one is slow
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
            if is_reshape:  # a reshape of a reshape is one of the first value: a cut view goes through its base
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
    """Whether each call has an effect: it draws random numbers, or communicates with other processes. Attention without
    dropout draws none, whatever its tag says."""
    effect = _effect_of(op)
    if type(effect) is bool:
        return effect
    given = args[effect] if effect < len(args) else dict(keywords).get(_DROPOUT, 0.0)
    given = given.value if type(given) is Float else given
    return type(given) not in (int, float) or given != 0


@cache
def _effect_of(op: torch._ops.OpOverload) -> bool | int:
    """Whether calls of an operator have an effect; for attention, the position of `dropout_p`, which decides."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return op.namespace in ("c10d", "_c10d_functional")
    names = [argument.name for argument in op._schema.arguments]
    is_attention = op.__name__.startswith("_scaled_dot_product_") and _DROPOUT in names
    return names.index(_DROPOUT) if is_attention else True


def check(
    repeater: Repeater,
    stamped: Sequence[Stamped],
    schedule: Schedule,
    places: SlotPlaces,
    values: tuple[Values, Values] | None = None,
) -> None:
    """Raises NotPeriodic unless the schedule computes the long trace. `values`: those of the repeater's traces, where
    several schedules are checked."""
    checker = _Checker(repeater, stamped, values or values_of(repeater, places))
    checker.check_items()
    checker.check_outputs(repeater, schedule)
    checker.check_effects(repeater)
    _check_order(schedule, {name: None for name in repeater.positions.values()})
    _check_donations(repeater, schedule)


def values_of(repeater: Repeater, places: SlotPlaces) -> tuple[Values, Values]:
    """The values of the long trace and of the short one, made by operators of the same numbers."""
    ops: dict[Hashable, int] = {}
    traces = repeater.traces
    short = traces.short_calls
    return Values(traces.long, traces.long_calls, short, places, ops), Values(traces.short, short, short, places, ops)


_MOST_OPENED = 2000
"""At most so many values above what an item reads are searched."""


class _Checker:
    def __init__(self, repeater: Repeater, stamped: Sequence[Stamped], values: tuple[Values, Values]) -> None:
        self.traces, self.stamped = repeater.traces, stamped
        self.calls, self.names = repeater.short.calls, repeater.short.names
        self.keys = _numbered(self.calls.keys)
        self.long, self.short = values
        self.short_maker = {
            self.names[value]: (item, k) for item, outs in enumerate(self.calls.outs) for k, value in enumerate(outs)
        }
        self.long_maker = {name: (number, k) for number, one in enumerate(stamped) for k, name in enumerate(one.outs)}
        self.results = [_results(item) for item in repeater.schedule.items]
        self.geometries = _given(self.traces.long), _given(self.traces.short)
        held = repeater.held
        names = [[self.names[value] for value in outs] for outs in self.calls.outs]
        self.stand_ins = {n: (layout_of(b), held[n].form) for n, b in repeater.stand_ins.items() if n in held}
        self.forms = [tuple([held[n].form if n in held else None for n in outs]) for outs in names]
        self.short_places = self._short_places(repeater, held)
        self.long_places = self._long_places(repeater)
        self.short_holds = {name: self.short.of(place) for name, place in self.short_places.items()}
        self.long_holds = {name: self.long.of(place) for name, place in self.long_places.items()}

    def _short_places(self, repeater: Repeater, held: dict[str, BufferValue]) -> dict[str, Place]:
        """What of the short trace is in each buffer and input of the short schedule."""
        short = self.traces.short
        holds: dict[str, Place] = {f"in{place}": name.number for place, (name, _) in enumerate(short.inputs)}
        holds |= {f"scalar{n}": scalar_value(n) for n in range(len(short.scalar_kinds))}
        for name, one in held.items():
            holds.setdefault(name, one.place)
        for name, (output, _) in zip(repeater.schedule.outputs, short.outputs, strict=True):
            holds.setdefault(name, output.number)
        return holds

    def _long_places(self, repeater: Repeater) -> dict[str, Place]:
        holds: dict[str, Place] = {name: number for number, name in repeater.positions.items()}
        for one in self.stamped:
            for old, new in zip(self.calls.outs[one.item], one.outs, strict=True):
                place = self.short_places.get(self.names[old])
                if place is not None:
                    slot = repeater.long_slot(self.traces.slots[slot_of(place)], one.ahead)
                    holds[new] = moved(place, slot)
        return holds

    def check_items(self) -> None:
        for number, one in enumerate(self.stamped):
            names = zip(self.calls.outs[one.item], one.outs, strict=True)
            made = [(name, self.names[value]) for value, name in names if self.names[value] in self.short_holds]
            if made:
                known = self._read(number)
                seen: set[tuple[int, int]] = set()
                for name, like in made:
                    self._compare(self.long_holds[name], self.short_holds[like], known, seen)
                self._confirm({short: long for short, long in known.items() if (long, short) not in seen}, known)

    def check_outputs(self, repeater: Repeater, schedule: Schedule) -> None:
        """Each output of the long trace is in its buffer as its counterpart is in the short schedule's."""
        long, short = self.traces.long, self.traces.short
        if len(set(schedule.outputs)) != len(schedule.outputs):
            raise NotPeriodic("two outputs share memory")
        for name, (slot, geometry), place in zip(schedule.outputs, long.outputs, repeater.output_likes, strict=True):
            other, (like, lies) = repeater.schedule.outputs[place], short.outputs[place]
            if geometry is not lies or not self._lies_alike(name, other):
                raise NotPeriodic(f"output {name} has another layout")
            if other not in self.short_holds or name not in self.long_holds:
                raise NotPeriodic(f"output {name} holds an unknown value")
            known = {self.short_holds[other]: self.long_holds[name]}
            self._compare(self.long.of(slot.number), self.short.of(like.number), known, set())

    def check_effects(self, repeater: Repeater) -> None:
        """Calls with an effect come in the trace's order, each once."""
        a = self.traces.long_calls
        entries = self.traces.long.entries
        wanted = [
            n
            for n, position in enumerate(a.entry)
            if has_effect(entries[position].op, entries[position].args, entries[position].kwargs)
        ]
        found: list[int] = []
        for one in self.stamped:
            item = repeater.schedule.items[one.item]
            if isinstance(item, ExternNode) and has_effect(item.op, item.args, item.kwargs.items()):
                places = [self.long_places[name] for name in one.outs if name in self.long_places]
                made = {a.maker[place][0] for place in places if place in a.maker}
                if len(made) != 1:
                    raise NotPeriodic(f"{item.op} makes an unknown value")
                found.extend(made)
        if found != wanted:
            raise NotPeriodic("calls with an effect come in another order")

    def _read(self, number: int) -> dict[int, int]:
        """Which value of the long trace corresponds to which of the short one in what an item reads."""
        known: dict[int, int] = {}
        seen: set[tuple[str, str]] = set()
        one = self.stamped[number]
        todo = list(zip(one.refs, (self.names[value] for value in self.calls.refs[one.item]), strict=True))
        while todo:
            long, short = todo.pop()
            if (long, short) in seen:
                continue
            seen.add((long, short))
            value = self.short_holds.get(short)
            if value is not None:
                held = self.long_holds.get(long)
                if held is None or known.setdefault(value, held) != held:
                    raise NotPeriodic(f"{long} stands for {short}, but holds another value")
                if not self._lies_alike(long, short):
                    raise NotPeriodic(f"{long} stands for {short}, but has another layout")
                if value in self.short.reshaped and held in self.long.reshaped:  # equal views have equal bases
                    whole, elements = self.short.reshaped[value], self.long.reshaped[held]
                    if known.setdefault(whole, elements) != elements:
                        raise NotPeriodic(f"{long} stands for {short}, but has other elements")
                continue
            if not self._is_alike(long, short):
                raise NotPeriodic(f"{long} stands for {short}, but is computed differently")
            maker, item = self.long_maker[long][0], self.short_maker[short][0]
            other = self.stamped[maker]
            todo.extend(zip(other.refs, (self.names[value] for value in self.calls.refs[item]), strict=True))
        return known

    def _lies_alike(self, long: str, short: str) -> bool:
        """Whether both are inputs or scalars, or made with the same layout, possibly by a stand-in."""
        a, b = self.long_maker.get(long), self.short_maker.get(short)
        if a is not None and short in self.stand_ins:
            return self._layout(self.stamped[a[0]].item, a[1]) == self.stand_ins[short]
        if a is None or b is None:
            return a is b and self.geometries[0].get(long) is self.geometries[1].get(short)
        return self._layout(self.stamped[a[0]].item, a[1]) == self._layout(b[0], b[1])

    def _layout(self, item: int, result: int) -> Hashable:
        return layout_of(self.results[item][result]), self.forms[item][result]

    def _is_alike(self, long: str, short: str) -> bool:
        """Whether both are the same result of items of one key: the same layout, and what the same kernel makes."""
        a, b = self.long_maker.get(long), self.short_maker.get(short)
        if a is None or b is None:
            return False
        return a[1] == b[1] and self.keys[self.stamped[a[0]].item] == self.keys[b[0]]

    def _compare(self, long: int, short: int, known: dict[int, int], seen: set[tuple[int, int]]) -> None:
        """Raises unless the same primitives compute both values from what is known. A reduction is known as well if
        parts of it are."""
        parts: dict[int, list[int]] = {}  # that are known, of each reduction of the short trace
        for value in known:
            if value in self.short.whole_of:
                parts.setdefault(self.short.whole_of[value], []).append(value)
        todo = [(long, short)]
        while todo:
            pair = todo.pop()
            if pair in seen:
                continue
            seen.add(pair)
            here, there = pair
            if there in known:
                if known[there] != here:
                    raise NotPeriodic(f"value {here} is read where {known[there]} should be")
                continue
            above = self._above(here, there)
            if above is None:
                raise NotPeriodic(f"value {here} is computed differently")
            if there not in parts:
                todo.extend(above)
                continue
            for part in parts[there]:
                if self._above(known[part], part) != [(here, there)]:
                    raise NotPeriodic(f"part {known[part]} is read where one of {here} should be")
                seen.add((known[part], part))

    def _confirm(self, beside: dict[int, int], known: dict[int, int]) -> None:
        """What an item reads beside what its results were found to depend on (a norm's mean beside the norm's operand)
        must belong with the others: it is found above one of these, or computed from them."""
        left = dict(beside)
        todo = deque((long, short) for short, long in known.items())
        seen: set[tuple[int, int]] = set()
        while todo and left and len(seen) < _MOST_OPENED:
            pair = todo.popleft()
            if pair in seen:
                continue
            seen.add(pair)
            for here, there in self._above(*pair) or ():
                if there in left and left.pop(there) != here:
                    raise NotPeriodic(f"value {known[there]} is read, {here} belongs with the others")
                todo.append((here, there))
        for short, long in left.items():
            self._compare(long, short, {a: b for a, b in known.items() if a != short}, set())

    def _above(self, long: int, short: int) -> list[tuple[int, int]] | None:
        """The operands of two values, if the same operator makes them."""
        here, there = self.long.made[long], self.short.made[short]
        if here is None or there is None or here[0] != there[0]:
            return None
        return list(zip(here[1], there[1], strict=True))


def _results(item: Item) -> tuple[Buffer, ...]:
    if isinstance(item, Kernel):
        return item.writes
    return (item.output,) if isinstance(item, ViewNode) else tuple(b for b in item.outputs if b is not None)


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    ids: dict[Hashable, int] = {}
    return [ids.setdefault(key, len(ids)) for key in keys]


def _check_order(schedule: Schedule, given: dict[str, None]) -> None:
    roots = roots_of(schedule)
    made = set(given)
    gone: set[str] = set()
    for item in schedule.items:
        for name in item_reads(item):
            if name not in made:
                raise NotPeriodic(f"{name} is read before it is made")
            if name not in schedule.donations and roots.get(name, name) in gone:
                raise NotPeriodic(f"{name} is read after it was overwritten")
        for name in item_writes(item):
            if name in made:
                raise NotPeriodic(f"{name} is made twice")
            made.add(name)
            if not isinstance(item, ViewNode) and name in schedule.donations:
                gone.add(schedule.donations[name])


def _check_donations(repeater: Repeater, schedule: Schedule) -> None:
    """The trace's donations, as the kernels that carry them out have them."""
    long = repeater.traces.long
    donated = {schedule.outputs[out]: f"in{given}" for out, given in long.donations}
    wanted = {name: target for name, target in donated.items() if name != target}
    if schedule.donations != wanted:
        raise NotPeriodic("a donation is missing, or another one than the trace's")
    for item in schedule.items:
        if isinstance(item, Kernel):
            read = {buffer.name for buffer in item.reads}
            names = (buffer.name for buffer in item.writes)
            if item.aliases != tuple((n, wanted[n]) for n in names if wanted.get(n) in read):
                raise NotPeriodic("a kernel overwrites another input than it should")


def _given(trace: CutTrace) -> dict[str, object]:
    """Geometries of inputs and kinds of scalars, by name."""
    found: dict[str, object] = {f"in{place}": geometry for place, (_, geometry) in enumerate(trace.inputs)}
    return found | {f"scalar{number}": kind for number, kind in enumerate(trace.scalar_kinds)}

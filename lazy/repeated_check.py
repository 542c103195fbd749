"""Whether a schedule whose layers were repeated computes its trace, given that the short one computes the short trace.

Both schedules' buffers hold slots of their traces: which, is known of the short schedule, and follows for the long one
by layers. For each item of the long schedule that makes such a slot, the operators between that slot and the slots
that the item reads must be those that stand between the slots of the item which it was stamped from. Then it makes the
one of the others as the original does, and so, by induction along the schedule, each buffer holds its slot. What an
item reads that holds no slot counts as made by the item itself.

Also: each buffer is made before it is read, an input is overwritten after its last reader, the outputs are the
trace's, and so are the donations.

Invariant: nothing that `repeated_runs` guessed is taken for granted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torchlazy.inductor.grouping import item_reads, item_writes, roots_of
from torchlazy.inductor.ir import Buffer, ExternNode, Kernel, ViewNode
from torchlazy.inductor.scheduler import Item, Schedule
from torchlazy.lazy.repeated_names import NotPeriodic
from torchlazy.lazy.repeated_plan import Repeater, Stamped, layout_of
from torchlazy.lazy.repeated_trace import scalar_value
from torchlazy.lazy.trace import CutTrace


def check(repeater: Repeater, stamped: Sequence[Stamped], schedule: Schedule, places: dict[str, int]) -> None:
    """Raises NotPeriodic unless the schedule computes the long trace."""
    checker = _Checker(repeater, stamped, places)
    checker.check_items()
    checker.check_outputs(repeater, schedule)
    checker.check_effects(repeater)
    _check_order(schedule, {name: None for name in repeater.positions.values()})
    _check_donations(repeater, schedule)


class _Checker:
    def __init__(self, repeater: Repeater, stamped: Sequence[Stamped], places: dict[str, int]) -> None:
        self.traces, self.stamped = repeater.traces, stamped
        self.calls, self.names = repeater.short.calls, repeater.short.names
        self.keys = _numbered(self.calls.keys)
        ids: dict[Hashable, int] = {}
        self.long_keys = [ids.setdefault(key, len(ids)) for key in self.traces.long_calls.calls.keys]
        self.short_keys = [ids.setdefault(key, len(ids)) for key in self.traces.short_calls.calls.keys]
        self.short_maker = {
            self.names[value]: (item, k) for item, outs in enumerate(self.calls.outs) for k, value in enumerate(outs)
        }
        self.long_maker = {name: (number, k) for number, one in enumerate(stamped) for k, name in enumerate(one.outs)}
        self.results = [_results(item) for item in repeater.schedule.items]
        self.geometries = _given(self.traces.long), _given(self.traces.short)
        self.short_holds = self._short_holds(repeater, places)
        self.long_holds = self._long_holds(repeater)

    def _short_holds(self, repeater: Repeater, places: dict[str, int]) -> dict[str, int]:
        """The slot of the short trace in each buffer and input of the short schedule."""
        short = self.traces.short
        holds = {f"in{place}": name.number for place, (name, _) in enumerate(short.inputs)}
        holds |= {f"scalar{n}": scalar_value(n) for n in range(len(short.scalar_kinds))}
        for name, slot in places.items():
            holds.setdefault(name, slot)
        for name, (output, _) in zip(repeater.schedule.outputs, short.outputs, strict=True):
            holds.setdefault(name, output.number)
        return holds

    def _long_holds(self, repeater: Repeater) -> dict[str, int]:
        holds = {name: number for number, name in repeater.positions.items()}
        for one in self.stamped:
            for old, new in zip(self.calls.outs[one.item], one.outs, strict=True):
                slot = self.short_holds.get(self.names[old])
                if slot is not None:
                    holds[new] = repeater.long_slot(self.traces.slots[slot], one.ahead)
        return holds

    def check_items(self) -> None:
        for number, one in enumerate(self.stamped):
            known: dict[int, int] | None = None
            for value, name in zip(self.calls.outs[one.item], one.outs, strict=True):
                slot = self.short_holds.get(self.names[value])
                if slot is None:
                    continue
                if known is None:
                    known = self._read(number)
                self._compare(self.long_holds[name], slot, known)

    def check_outputs(self, repeater: Repeater, schedule: Schedule) -> None:
        """Each output of the long trace is in its buffer as the one that it is like is in the short schedule's."""
        long, short = self.traces.long, self.traces.short
        if len(set(schedule.outputs)) != len(schedule.outputs):
            raise NotPeriodic("two outputs share memory")
        for name, (slot, geometry), place in zip(schedule.outputs, long.outputs, repeater.output_likes, strict=True):
            other, (like, known) = repeater.schedule.outputs[place], short.outputs[place]
            if geometry is not known or not self._lies_alike(name, other):
                raise NotPeriodic(f"output {name} lies otherwise")
            if other not in self.short_holds or name not in self.long_holds:
                raise NotPeriodic(f"output {name} holds what is not known")
            self._compare(slot.number, like.number, {self.short_holds[other]: self.long_holds[name]})

    def check_effects(self, repeater: Repeater) -> None:
        """Calls that draw random numbers, or talk to other processes, come in the trace's order, each once."""
        a = self.traces.long_calls
        wanted = [n for n, position in enumerate(a.entry) if _has_effect(self.traces.long.entries[position].op)]
        found: list[int] = []
        for one in self.stamped:
            item = repeater.schedule.items[one.item]
            if isinstance(item, ExternNode) and _has_effect(item.op):
                slots = [self.long_holds[name] for name in one.outs if name in self.long_holds]
                made = {a.maker[slot][0] for slot in slots if slot in a.maker}
                if len(made) != 1:
                    raise NotPeriodic(f"{item.op} makes what is not known")
                found.extend(made)
        if found != wanted:
            raise NotPeriodic("calls with an effect come in another order")

    def _read(self, number: int) -> dict[int, int]:
        """Which slot of the long trace stands for which of the short one in what an item reads."""
        known: dict[int, int] = {}
        seen: set[tuple[str, str]] = set()
        one = self.stamped[number]
        todo = list(zip(one.refs, (self.names[value] for value in self.calls.refs[one.item]), strict=True))
        while todo:
            long, short = todo.pop()
            if (long, short) in seen:
                continue
            seen.add((long, short))
            slot = self.short_holds.get(short)
            if slot is not None:
                held = self.long_holds.get(long)
                if held is None or known.setdefault(slot, held) != held:
                    raise NotPeriodic(f"{long} stands for {short}, but holds another slot")
                if not self._lies_alike(long, short):
                    raise NotPeriodic(f"{long} stands for {short}, but lies otherwise")
                continue
            if not self._is_alike(long, short):
                raise NotPeriodic(f"{long} stands for {short}, but is made otherwise")
            maker, item = self.long_maker[long][0], self.short_maker[short][0]
            other = self.stamped[maker]
            todo.extend(zip(other.refs, (self.names[value] for value in self.calls.refs[item]), strict=True))
        return known

    def _lies_alike(self, long: str, short: str) -> bool:
        """Whether both are inputs or scalars, or made with the same layout."""
        a, b = self.long_maker.get(long), self.short_maker.get(short)
        if a is None or b is None:
            return a is b and self.geometries[0].get(long) is self.geometries[1].get(short)
        return self._layout(self.stamped[a[0]].item, a[1]) == self._layout(b[0], b[1])

    def _layout(self, item: int, result: int) -> Hashable:
        return layout_of(self.results[item][result])

    def _is_alike(self, long: str, short: str) -> bool:
        """Whether both are the same result of items of one key: the same layout, and what the same kernel makes."""
        a, b = self.long_maker.get(long), self.short_maker.get(short)
        if a is None or b is None:
            return False
        return a[1] == b[1] and self.keys[self.stamped[a[0]].item] == self.keys[b[0]]

    def _compare(self, long: int, short: int, known: dict[int, int]) -> None:
        """The operators above two slots, down to what is known: the same ones on the same."""
        a, b = self.traces.long_calls, self.traces.short_calls
        todo = [(long, short)]
        seen: set[tuple[int, int]] = set()
        while todo:
            pair = todo.pop()
            if pair in seen:
                continue
            seen.add(pair)
            here, there = pair
            if there in known:
                if known[there] != here:
                    raise NotPeriodic(f"slot {here} is read where {known[there]} should be")
                continue
            made, like = a.maker.get(here), b.maker.get(there)
            if made is None or like is None or made[1] != like[1]:
                raise NotPeriodic(f"slot {here} is made otherwise")
            if self.long_keys[made[0]] != self.short_keys[like[0]]:
                raise NotPeriodic(f"slot {here} is made by another operator")
            todo.extend(zip(a.calls.refs[made[0]], b.calls.refs[like[0]], strict=True))


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


def _has_effect(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags or op.namespace in ("c10d", "_c10d_functional")

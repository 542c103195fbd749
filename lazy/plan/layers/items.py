"""A schedule as a sequence of calls, and which values of its trace the calls read and make.

Invariant: items of one key are equal up to the names of what they read and make.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.inductor.fingerprint import EmitOnce
from torchlazy.inductor.ir import Buffer, BufferRef, ExternNode, Kernel
from torchlazy.inductor.scheduler import Item, Schedule
from torchlazy.lazy.plan.layers.detect import Calls, find_runs, layers_of_a_period
from torchlazy.lazy.plan.layers.names import NotPeriodic
from torchlazy.lazy.plan.layers.shorten import ShortTrace
from torchlazy.lazy.plan.layers.slot_places import BufferValue


@dataclass(frozen=True)
class ItemCalls:
    """A schedule as calls: `names` by number of value, and `numbers` by name."""

    calls: Calls
    names: list[str]
    numbers: dict[str, int]


def item_calls(items: Sequence[Item], donations: dict[str, str], emit_once: EmitOnce) -> ItemCalls:
    """The items as calls over names; those of one key are equal up to these."""
    numbers: dict[str, int] = {}
    keys: list[Hashable] = []
    refs: list[tuple[int, ...]] = []
    outs: list[tuple[int, ...]] = []

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    for item in items:
        if isinstance(item, Kernel):
            own = emit_once.fingerprint(item)
            donated = tuple(buffer.name in donations for buffer in item.writes)
            keys.append((own.key, item.is_late, donated))
            read = (*(buffer.name for buffer in item.reads), *own.scalars)
            made: tuple[str, ...] = tuple(buffer.name for buffer in item.writes)
        elif isinstance(item, ExternNode):
            found: list[str] = []
            structure = _structure((item.args, tuple(item.kwargs.items())), found)
            keys.append((item.op, structure, tuple(None if b is None else layout_of(b) for b in item.outputs)))
            read, made = tuple(found), tuple(buffer.name for buffer in item.outputs if buffer is not None)
        else:
            keys.append(("view", layout_of(item.output)))
            read, made = (item.source,), (item.output.name,)
        refs.append(tuple(map(number, read)))
        outs.append(tuple(map(number, made)))
    return ItemCalls(Calls(keys, refs, outs), list(numbers), numbers)


def layout_of(buffer: Buffer) -> Hashable:
    return buffer.dtype, buffer.shape, buffer.strides, buffer.device, buffer.offset


def _structure(value: Any, found: list[str]) -> Hashable:
    if isinstance(value, BufferRef):
        found.append(value.name)
        return BufferRef, value.scalar
    if isinstance(value, (tuple, list)):
        return tuple([_structure(item, found) for item in value])
    if isinstance(value, torch.Tensor):
        raise NotPeriodic("a tensor among the arguments of a call")
    return type(value), repr(value) if isinstance(value, float) else value


def places_by_trace(
    traces: ShortTrace, short: ItemCalls, held: dict[str, BufferValue]
) -> dict[int, tuple[Hashable, int]]:
    """By value of the short schedule its class in the trace and its layer there, where layers count one by one."""
    known = traces.layers if traces.single is None else traces.single[2]
    slots = {f"in{place}": name.number for place, (name, _) in enumerate(traces.short.inputs)}
    slots |= {name: one.slot for name, one in held.items()}
    found: dict[int, tuple[Hashable, int]] = {}
    for name, number in short.numbers.items():
        slot = traces.slots.get(slots.get(name, -1))
        place = None if slot is None else known.of_value.get(slot)
        if place is not None:
            found[number] = place[0], traces.single_layer(place[1])
    return found


def found_period(traces: ShortTrace, schedule: Schedule, emit_once: EmitOnce, held: dict[str, BufferValue]) -> int:
    """With how many of the trace's layers the whole schedule repeats."""
    short = item_calls(schedule.items, schedule.donations, emit_once)
    layers = {number: layer for number, (_, layer) in places_by_trace(traces, short, held).items()}
    return layers_of_a_period(short.calls, find_runs(short.calls.keys, traces.least), layers)

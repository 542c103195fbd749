"""Which kernels share a launch: equal flat kernels that no third item must run between.

Invariant: slots run in order; each item stands in one slot, after the slots of everything it depends on, and the
members of a slot do not depend on each other. Dependence is by memory: a donated output and the views of a buffer are
the memory that they stand on, so writing over what an earlier item reads counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchlazy.inductor.dependencies import extern_reads
from torchlazy.inductor.ir import ExternNode, Kernel, ViewNode
from torchlazy.inductor.scheduler import Item, Schedule

# What kernels that run earlier than they must may keep in memory meanwhile. All of a 100M parameter model's weights
# converted to a half fit; larger models convert the rest where it is used, as they would without grouping.
HOISTED_BYTES = 256 << 20


@dataclass
class Slot:
    """Items to run together; more than one only where all are kernels of one group key."""

    items: list[int]
    key: str | None = None


@dataclass
class _Memory:
    """Who touched one piece of memory last."""

    writer: int | None = None
    readers: list[int] = field(default_factory=list)


def plan_slots(plan: Schedule, keys: Sequence[str | None], hoisted_bytes: int = HOISTED_BYTES) -> list[Slot]:
    """Group the schedule's items; `keys[i]` is None where item i must not share a launch.

    A kernel joins the last slot of its key when all that it depends on stands before that slot. What it writes then
    lives longer, so the bytes that run early in this way are bounded; donated outputs cost none.
    """
    before = _dependences(plan)
    slots: list[Slot] = []
    slot_of: list[int] = []
    open_slot: dict[str, int] = {}
    for number, key in enumerate(keys):
        earliest = max((slot_of[source] for source in before[number]), default=-1) + 1
        target = open_slot.get(key) if key is not None else None
        if key is not None and target is not None and earliest <= target:
            cost = 0 if target == len(slots) - 1 else _fresh_bytes(plan, number)
            if cost <= hoisted_bytes:
                hoisted_bytes -= cost
                slots[target].items.append(number)
                slot_of.append(target)
                continue
        slot_of.append(len(slots))
        if key is not None:
            open_slot[key] = len(slots)
        slots.append(Slot([number], key))
    return slots


def roots_of(plan: Schedule) -> dict[str, str]:
    """The memory that a name stands on, for views and donated outputs."""
    roots = {output: target for output, target in plan.donations.items() if output != target}
    for item in plan.items:
        if isinstance(item, ViewNode):
            roots[item.output.name] = roots.get(item.source, item.source)
    return roots


def item_reads(item: Item) -> tuple[str, ...]:
    """The buffers that an item reads from memory."""
    if isinstance(item, Kernel):
        return tuple(buffer.name for buffer in item.reads)
    return extern_reads(item) if isinstance(item, ExternNode) else (item.source,)


def item_writes(item: Item) -> tuple[str, ...]:
    """The buffers that an item makes."""
    if isinstance(item, Kernel):
        return tuple(buffer.name for buffer in item.writes)
    if isinstance(item, ExternNode):
        return tuple(buffer.name for buffer in item.outputs if buffer is not None)
    return (item.output.name,)


def _dependences(plan: Schedule) -> list[set[int]]:
    """For each item the earlier ones that must have run."""
    roots: Mapping[str, str] = roots_of(plan)
    memory: dict[str, _Memory] = {}
    maker: dict[str, int] = {}
    before: list[set[int]] = []
    for number, item in enumerate(plan.items):
        sources: set[int] = set()
        for name in item_reads(item):
            if name in maker:
                sources.add(maker[name])
            place = memory.setdefault(roots.get(name, name), _Memory())
            if place.writer is not None:
                sources.add(place.writer)
            place.readers.append(number)
        for name in item_writes(item):
            maker[name] = number
            if isinstance(item, ViewNode):
                continue  # a view moves nothing
            place = memory.setdefault(roots.get(name, name), _Memory())
            sources.update(place.readers)
            if place.writer is not None:
                sources.add(place.writer)
            place.writer, place.readers = number, []
        sources.discard(number)
        before.append(sources)
    return before


def _fresh_bytes(plan: Schedule, number: int) -> int:
    item = plan.items[number]
    assert isinstance(item, Kernel)
    return sum(
        int(buffer.meta.numel) * buffer.dtype.itemsize for buffer in item.writes if buffer.name not in plan.donations
    )

"""Which kernels share a launch: kernels of one key that no third item must run between.

A kernel that holds little memory waits for the first reader of its results (the second stages of bias gradients, whose
readers are the optimizer's), so that it meets others of its key; then it may run earlier than it must, beside one
of its key that has to.

Invariant: slots run in order; each item stands in one slot, after the slots of everything it depends on, and the
members of a slot do not depend on each other. Dependence is by memory: a donated output and the views of a buffer are
the memory that they stand on, so writing over what an earlier item reads counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torchlazy.inductor.dependencies import extern_reads
from torchlazy.inductor.ir import Buffer, ExternNode, Kernel, ViewNode
from torchlazy.inductor.scheduler import Item, Schedule
from torchlazy.prims.size_int import hint

# What kernels that run earlier than they must may keep in memory meanwhile. All of a 100M parameter model's weights
# converted to a half fit; larger models convert the rest where it is used, as they would without grouping.
HOISTED_BYTES = 256 << 20

# What one kernel that waits may keep in memory by reading it, and all of them together. The partial sums of a layer
# norm's weight gradient are 128 KiB for a thousand columns.
WAITING_KERNEL_BYTES = 2 << 20
WAITING_BYTES = 64 << 20


@dataclass
class LaunchGroup:
    """Items to run together; more than one only where all are kernels of one group key."""

    items: list[int]
    key: Hashable | None = None


@dataclass
class _Memory:
    """Who touched one piece of memory last."""

    writer: int | None = None
    readers: list[int] = field(default_factory=list)


def plan_slots(
    plan: Schedule, keys: Sequence[Hashable | None], hoisted_bytes: int = HOISTED_BYTES
) -> list[LaunchGroup]:
    """Group the schedule's items; `keys[i]` is None where item i must not share a launch.

    Items are taken in the order of `_late_order`. A kernel joins the last slot of its key when all that it depends on
    stands before that slot. What it writes then lives longer, so the bytes that run early in this way are bounded;
    donated outputs cost none.
    """
    before = _dependences(plan)
    slots: list[LaunchGroup] = []
    slot_of: dict[int, int] = {}
    open_slot: dict[Hashable, int] = {}
    for number in _late_order(plan, keys, before):
        key = keys[number]
        earliest = max((slot_of[source] for source in before[number]), default=-1) + 1
        target = open_slot.get(key) if key is not None else None
        if key is not None and target is not None and earliest <= target:
            cost = 0 if target == len(slots) - 1 else _fresh_bytes(plan, number)
            if cost <= hoisted_bytes and not (cost and _is_late(plan.items[number])):
                hoisted_bytes -= cost
                slots[target].items.append(number)
                slot_of[number] = target
                continue
        slot_of[number] = len(slots)
        if key is not None:
            open_slot[key] = len(slots)
        slots.append(LaunchGroup([number], key))
    return slots


def _is_late(item: Item) -> bool:
    """Whether running the item earlier would hold what it computes again for the sake of memory."""
    return isinstance(item, Kernel) and item.is_late


def _late_order(plan: Schedule, keys: Sequence[Hashable | None], before: Sequence[set[int]]) -> list[int]:
    """The items in an order in which small kernels, and views, stand where their results are first needed.

    With the first of a key come all of that key that can run by then.
    """
    sizes = _SizesOf(plan)
    order: list[int] = []
    waiting: dict[int, None] = {}
    partners: dict[Hashable, dict[int, None]] = {}
    views: dict[int, list[int]] = {}
    placed: set[int] = set()
    held = 0

    def place(number: int) -> None:
        nonlocal held
        for source in sorted(before[number]):
            if source in waiting:
                place(source)
        if number in placed:  # as a partner of one of its sources, or of theirs
            return
        placed.add(number)
        held -= sizes.held(number) if number in waiting else 0
        waiting.pop(number, None)
        order.append(number)
        for view in views.pop(number, ()):  # of what stands now; waiting, it would keep its readers apart
            if view in waiting and waiting.keys().isdisjoint(before[view]):
                place(view)
        key = keys[number]
        for partner in [] if key is None else list(partners.pop(key, ())):
            if partner in waiting and not _reaches(partner, key, keys, before, waiting):
                place(partner)
            elif partner in waiting:
                partners.setdefault(key, {})[partner] = None

    for number, item in enumerate(plan.items):
        is_view = isinstance(item, ViewNode)
        for source in before[number] if is_view else ():
            views.setdefault(source, []).append(number)
        if is_view or (keys[number] is not None and sizes.held(number) <= WAITING_KERNEL_BYTES):
            waiting[number] = None
            held += sizes.held(number)
            if not is_view:
                partners.setdefault(keys[number], {})[number] = None
        else:
            place(number)
        while held > WAITING_BYTES:
            place(next(iter(waiting)))
    while waiting:
        place(next(iter(waiting)))
    return order


def _reaches(
    number: int, key: Hashable, keys: Sequence[Hashable | None], before: Sequence[set[int]], waiting: Mapping[int, None]
) -> bool:
    """Whether an item must wait for another waiting one of this key: the two cannot share a launch."""
    todo = [source for source in before[number] if source in waiting]
    seen: set[int] = set()
    while todo:
        source = todo.pop()
        if source in seen:
            continue
        seen.add(source)
        if keys[source] == key:
            return True
        todo.extend(above for above in before[source] if above in waiting)
    return False


class _SizesOf:
    """Bytes that items keep alive."""

    def __init__(self, plan: Schedule) -> None:
        self.plan = plan
        self.roots = roots_of(plan)
        self.made = {name for item in plan.items for name in item_writes(item)} - self.roots.keys()

    def held(self, number: int) -> int:
        """What the item reads of the program's own temporaries; a view holds nothing by itself."""
        item = self.plan.items[number]
        if not isinstance(item, Kernel):
            return 0
        reads = {self.roots.get(buffer.name, buffer.name): buffer for buffer in item.reads}
        return sum(_bytes(buffer) for name, buffer in reads.items() if name in self.made)


def _bytes(buffer: Buffer) -> int:
    return int(hint(buffer.meta.numel)) * buffer.dtype.itemsize


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
    return sum(_bytes(buffer) for buffer in item.writes if buffer.name not in plan.donations)

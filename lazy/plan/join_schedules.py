"""Schedules a joined trace (forward and backward) as a whole, and splits that schedule at the cut into two programs.

A value that crosses the cut is a buffer like any other: the first program makes it, the second reads it. So there is
one schedule of the whole trace, and the checks of plan/layers/check.py hold for it.

Invariant: no item before the cut reads what one after it makes; both programs name what crosses alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torchlazy.autograd.halves import HELD, RESULT
from torchlazy.inductor import lowering, scheduler
from torchlazy.inductor.dependencies import extern_refs
from torchlazy.inductor.ir import Buffer, ExternNode, Kernel, LoopGraph, LoopNode, Node, ViewNode
from torchlazy.inductor.scheduler import Item, Schedule
from torchlazy.lazy.plan.join_traces import BUFFER, INPUT, SCALAR, BothHalves
from torchlazy.lazy.plan.layers.names import NotPeriodic
from torchlazy.lazy.plan.layers.slot_places import SlotPlaces
from torchlazy.lazy.trace.trace import CutTrace, compute_device
from torchlazy.prims import ops


def lower_both(halves: BothHalves, results: int, places: SlotPlaces) -> tuple[LoopGraph, LoopGraph]:
    """The loops of both halves; only buffers that cross have the same name in both. `results`: how many outputs of the
    first half are visible. NotPeriodic where something crosses that is no buffer of its own."""
    values: dict[fx.Node, Any] = {}
    first = lowering.lower(halves.first, donations=halves.early, values=places.lowered, partials=places.partials)
    made = {buffer.name: buffer for node in first.nodes for buffer in _outputs(node)}
    if len(set(first.outputs[results:])) != len(first.outputs) - results:
        raise NotPeriodic("what crosses is one buffer twice")
    for node in halves.second.nodes:
        if node.op != "placeholder" or not node.name.startswith((HELD, RESULT)):
            continue
        kind, offset = (HELD, results) if node.name.startswith(HELD) else (RESULT, 0)
        name = first.outputs[offset + int(node.name.removeprefix(kind))]
        meta = node.meta["val"]
        if name not in made or name in first.donations or made[name].meta != meta or made[name].offset:
            raise NotPeriodic(f"{node.name} is no buffer of its own")
        for user in node.users:
            if user.target is ops.convert:  # of a value held in half precision: not quite the value itself
                places.forget(user)
        node.name = name
    start = 1 + max(map(_number, made), default=-1)
    second = lowering.lower(
        halves.second, donations=halves.late, values=values, partials=places.partials, numbers_from=start
    )
    places.lowered.update(values)
    return first, second


def join_loops(first: LoopGraph, second: LoopGraph) -> LoopGraph:
    """The loops of the whole trace, for inspection only; its outputs are those of the second half alone."""
    return LoopGraph((), (), (*first.nodes, *second.nodes), second.outputs, first.donations | second.donations)


def schedule_both(first: LoopGraph, second: LoopGraph, results: int) -> Schedule:
    """The schedule of the whole trace: the first half's items, then the second's."""
    options = scheduler.ScheduleOptions()
    early, late = (scheduler.schedule(loops, options) for loops in (first, second))
    if early.outputs[results:] != first.outputs[results:]:
        raise NotPeriodic("what crosses was given another name")
    return Schedule(
        (*early.items, *late.items),
        (*early.decisions, *late.decisions),
        (*early.removed, *late.removed),
        (*early.outputs[:results], *late.outputs),
        early.donations | late.donations,
        cut=len(early.items),
    )


@dataclass(frozen=True)
class HalfSchedule:
    """What a program of one half is emitted from; `interface`: its inputs and scalars, without any loops."""

    schedule: Schedule
    interface: LoopGraph


def split_schedule(schedule: Schedule, trace: CutTrace, *, in_memory: bool) -> tuple[HalfSchedule, HalfSchedule]:
    """The two halves of a schedule of the whole joined trace; `in_memory`: scalars are inputs."""
    half, cut = trace.half, schedule.cut
    assert half is not None and cut is not None
    early, late = schedule.items[:cut], schedule.items[cut:]
    made = {buffer.name: buffer for item in early for buffer in _outputs(item)}
    shown, results = schedule.outputs[: half.outputs], schedule.outputs[half.outputs :]
    donated = {name: target for name, target in schedule.donations.items() if name not in made}
    read = dict.fromkeys([*(name for item in late for name in _names_read(item)), *results, *donated.values()])
    crossing = sorted((name for name in made if name in read), key=_number)
    if any(made[name].offset for name in crossing):
        raise NotPeriodic("what crosses is a view of something larger")
    held = tuple(name for name in crossing if name not in shown)
    given = partial(_interface, trace, in_memory=in_memory)
    overwritten = {name: target for name, target in schedule.donations.items() if name in made}
    gone = frozenset(schedule.removed)
    first = Schedule(early, (), _removed(early, gone), (*shown, *held), overwritten)
    second = Schedule(late, (), _removed(late, gone), results, donated)
    everything = given(lambda kind, number: number < (half.inputs if kind == INPUT else half.scalars))
    needed = given(lambda kind, number: f"{kind}{number}" in read)
    _check_reads(early, everything, made)
    crosses = tuple(Buffer(b.name, b.dtype, b.shape, b.strides, b.device) for b in map(made.__getitem__, crossing))
    return HalfSchedule(first, everything), HalfSchedule(second, replace(needed, inputs=(*crosses, *needed.inputs)))


def _check_reads(items: tuple[Item, ...], given: LoopGraph, made: dict[str, Buffer]) -> None:
    known = {*(buffer.name for buffer in given.inputs), *(name for name, _ in given.scalars), *made}
    strange = next((name for item in items for name in _names_read(item) if name not in known), "")
    if strange:
        raise NotPeriodic(f"{strange} is read before the cut, and given after it")


def _number(name: str) -> int:
    """Buffers are numbered in the order of the graph."""
    return int(name.removeprefix(BUFFER))


def _interface(trace: CutTrace, wanted: Callable[[str, int], bool], *, in_memory: bool) -> LoopGraph:
    metas = [(number, geometry.meta) for number, (_, geometry) in enumerate(trace.inputs) if wanted(INPUT, number)]
    inputs = [Buffer(f"{INPUT}{number}", m.dtype, m.shape, m.strides, m.device) for number, m in metas]
    scalars = [(f"{SCALAR}{n}", kind) for n, kind in enumerate(trace.scalar_kinds) if wanted(SCALAR, n)]
    if in_memory:
        device = compute_device(trace)
        dtypes = [(name, torch.float64 if kind is float else torch.int64) for name, kind in scalars]
        inputs += [Buffer(name, dtype, (), (), device) for name, dtype in dtypes]
        scalars = []
    return LoopGraph(tuple(inputs), tuple(scalars), (), ())


def _removed(items: tuple[Item, ...], gone: frozenset[str]) -> tuple[str, ...]:
    """The buffers of these items that never reach memory, by the names in the kernels' bodies."""
    kernels = (item for item in items if isinstance(item, Kernel))
    bodies = (dict.fromkeys(b.name for s in k.sweeps for x in s.statements for b in x.node.outputs) for k in kernels)
    return tuple(name for names in bodies for name in names if name in gone)


def _outputs(node: Node | Item) -> tuple[Buffer, ...]:
    if isinstance(node, Kernel):
        return node.writes
    if isinstance(node, ViewNode):
        return (node.output,)
    return node.outputs if isinstance(node, LoopNode) else tuple(b for b in node.outputs if b is not None)


def _names_read(item: Item) -> Iterator[str]:
    """Buffers, inputs and scalars."""
    if isinstance(item, Kernel):
        yield from (buffer.name for buffer in item.reads)
        yield from (name for name, _ in item.scalars)
    elif isinstance(item, ExternNode):
        yield from (ref.name for ref in extern_refs(item))
    else:
        yield item.source


__all__ = ["HalfSchedule", "join_loops", "lower_both", "schedule_both", "split_schedule"]

"""From the schedule of a shorter trace to the long trace's schedule and fallbacks, from which the program is emitted.

Invariant: a schedule is given only if plan/layers/check.py proves that it computes the whole trace; NotPeriodic says
why there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator

import torch
from torchlazy.inductor.fingerprint import EmitOnce
from torchlazy.inductor.ir import Buffer, ExternNode, LoopGraph, LoopNode, Node
from torchlazy.inductor.scheduler import Schedule
from torchlazy.lazy.plan.layers.check import check
from torchlazy.lazy.plan.layers.detect import find_runs
from torchlazy.lazy.plan.layers.items import found_period
from torchlazy.lazy.plan.layers.names import NotPeriodic
from torchlazy.lazy.plan.layers.shorten import ShortTrace, counted_by, elsewhere
from torchlazy.lazy.plan.layers.slot_places import BufferValue, SlotPlaces
from torchlazy.lazy.plan.layers.stamp import Repeater
from torchlazy.lazy.trace.trace import CutTrace, compute_device
from torchlazy.prims.fallback import Fallback

log = logging.getLogger("torchlazy.lazy")

_SHARE = 0.75
"""The share of loops that repeat, against the share of calls that are of layers: 0.94 to 0.96 (GPT, BERT, Llama), 1.98
for ResNet-152; 0.5 for GPT and Llama under autocast, whose backward repeats every few layers only."""


def check_loops(traces: ShortTrace, loops: LoopGraph) -> None:
    """Raises NotPeriodic where far fewer loops repeat than calls do: their schedule will not, and need not be made."""
    runs = find_runs([_kind_of(node) for node in loops.nodes], traces.least)
    found = sum(run.end - run.start for run in runs) / max(1, len(loops.nodes))
    layers = [traces.layers.layer(traces.slots[outs[0]]) for outs in traces.short_calls.calls.outs if outs]
    wanted = sum(layer is not None for layer in layers) / max(1, len(layers))
    if found < _SHARE * wanted:
        raise NotPeriodic(f"{found:.0%} of the loops repeat, {wanted:.0%} of the calls are of layers")


def _kind_of(node: Node) -> Hashable:
    """What distinguishes loops of one layer, without looking into them."""
    if isinstance(node, LoopNode):
        buffers = tuple([(one.dtype, one.shape, one.strides) for one in node.outputs])
        return node.reduction, node.ranges, node.reduce_ranges, buffers, node.origins
    return type(node), node.op if isinstance(node, ExternNode) else None


def first_that_repeats(
    traces: ShortTrace, schedule: Schedule, emit_once: EmitOnce, places: SlotPlaces
) -> tuple[ShortTrace, Schedule]:
    """The schedule of the long trace, and which of its layers the short one was found to be without."""
    reason: NotPeriodic | None = None
    held = places.by_buffer()
    for other in _countings(traces, schedule, emit_once, held):
        try:
            return other, repeated_schedule(other, schedule, emit_once, places, held)
        except NotPeriodic as again:
            log.debug("from layer %d of %d on: %s", other.first, other.period, again)
            reason = reason or again
    assert reason is not None
    raise reason


def _countings(
    traces: ShortTrace, schedule: Schedule, emit_once: EmitOnce, held: dict[str, BufferValue]
) -> Iterator[ShortTrace]:
    """The same two traces by other layers; first by as many as the schedule repeats with, where known."""
    period = found_period(traces, schedule, emit_once, held) if traces.period > 1 else 1
    if period not in (1, traces.period) and traces.can_count_by(period):
        other = counted_by(traces, period)
        yield other
        yield from elsewhere(other)
    yield traces
    yield from elsewhere(traces)


def repeated_schedule(
    traces: ShortTrace, schedule: Schedule, emit_once: EmitOnce, places: SlotPlaces, held: dict[str, BufferValue]
) -> Schedule:
    """The schedule of the long trace, from that of the short one; `places` followed the slots of the latter, and `held`
    is what its buffers hold."""
    repeater = Repeater(traces, schedule, emit_once, held)
    stamped = repeater.stamped()
    found = repeater.long_schedule(stamped)
    check(repeater, stamped, found, places)
    return found


def long_interface(trace: CutTrace, in_memory: bool = False) -> LoopGraph:
    """The inputs and scalars of a trace, as lowering names them, without any loops; `in_memory`: scalars as inputs."""
    metas = [geometry.meta for _, geometry in trace.inputs]
    inputs = tuple(Buffer(f"in{n}", m.dtype, m.shape, m.strides, m.device) for n, m in enumerate(metas))
    scalars = tuple((f"scalar{n}", kind) for n, kind in enumerate(trace.scalar_kinds))
    if in_memory:
        device = compute_device(trace)
        dtypes = [torch.float64 if kind is float else torch.int64 for _, kind in scalars]
        inputs += tuple(Buffer(name, t, (), (), device) for (name, _), t in zip(scalars, dtypes, strict=True))
        scalars = ()
    return LoopGraph(inputs, scalars, (), ())


def fallbacks_of(traces: ShortTrace, short: list[Fallback]) -> tuple[Fallback, ...]:
    """What stays extern in the long trace, from what does in the short one."""
    if not short:
        return ()
    told: dict[int, list[Fallback]] = {}
    waiting = list(reversed(short))
    for position, entry in enumerate(traces.short.entries):
        frame = _frame(traces.short, position)
        if waiting and (waiting[-1].op, waiting[-1].frame) == (str(entry.op), frame):
            told[position] = [waiting.pop()]
    if waiting:
        raise NotPeriodic(f"{waiting[-1].op} stays extern inside of another operator")
    at: dict[object, list[Fallback]] = {}
    for call, position in enumerate(traces.short_calls.entry):
        at[traces.short_calls.calls.keys[call]] = told.get(position, [])
    found: list[Fallback] = []
    done: set[int] = set()
    for call, position in enumerate(traces.long_calls.entry):
        if position not in done:
            done.add(position)
            frame = _frame(traces.long, position)
            known = at.get(traces.long_calls.calls.keys[call], [])
            found.extend(Fallback(f.op, f.reason, frame, f.by_choice) for f in known)
    return tuple(found)


def _frame(trace: CutTrace, position: int) -> str:
    return trace.frames[position] if position < len(trace.frames) else ""

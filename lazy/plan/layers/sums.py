"""Sums over all layers whose partial sums nothing else reads, kept out of the layers.

An example is the gradient of what each layer of a decoder reads of the encoder. A kernel fuses the whole sum, or as
many operands as a kernel may have, regardless of where layers end. So such a sum is of no layer: the shorter trace has
all of it, with stand-ins for the operands of layers that are left out.

Invariant: the order of items changes, never what they compute; plan/layers/check.py decides whether it is legal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torchlazy.inductor.grouping import item_reads
from torchlazy.inductor.ir import Kernel
from torchlazy.inductor.scheduler import Item, Schedule
from torchlazy.lazy.plan.layers.detect import Calls, Layers, Run
from torchlazy.lazy.plan.layers.names import NotPeriodic, Stamped

_SUM = torch.ops.aten.add.Tensor


def without_sums(calls: Calls, maker: Mapping[int, tuple[int, int]], layers: Layers) -> Layers:
    """The layers without such sums, and without the views that only they read. `maker`: the call that makes a value."""
    keys, refs, outs = calls.keys, calls.refs, calls.outs
    found: list[tuple[int, Run]] = []
    for run in layers.runs:
        middle = run.start + (run.count // 2) * run.period
        sums = (call for call in range(middle, middle + run.period) if keys[call][0] is _SUM)  # type: ignore[index]
        found.extend((call, run) for call in sums if outs[call][0] in refs[call + run.period])
    if not found:
        return layers
    readers = Counter(chain.from_iterable(refs))
    outside: list[int] = []
    for call, run in found:
        if readers[outs[call][0]] == 1:
            outside.extend(range(run.start + (call - run.start) % run.period, run.end, run.period))
    layers.sums = frozenset(outs[call][0] for call in outside)
    seen = set(outside)
    for call in outside:  # grows by the views that only sums read
        for value in refs[call]:
            made_by, _ = maker.get(value, (None, 0))
            if made_by is not None and made_by not in seen and readers[value] == 1 and _is_view(keys[made_by][0]):  # type: ignore[index]
                seen.add(made_by)
                outside.append(made_by)
    for call in outside:
        layers.of_call[call] = layers.run_of_call[call] = None
        for value in outs[call]:
            place_of = layers.of_value.pop(value, None)
            if place_of is not None:
                del layers.values[place_of]
    return layers


def _is_view(op: Any) -> bool:
    results = op._schema.returns if isinstance(op, torch._ops.OpOverload) else ()
    return any(result.alias_info is not None and not result.alias_info.is_write for result in results)


def with_sums_late(schedule: Schedule, names: set[str]) -> tuple[Schedule, frozenset[int]]:
    """The schedule with kernels that make nothing but such a sum, by name, moved to where it is read, so that they do
    not stand between layers; and where they are now."""
    late: dict[str, list[Item]] = {}
    order: list[Item] = []
    sums: list[int] = []
    for item in schedule.items if names else ():
        ready = [one for name in item_reads(item) for one in late.pop(name, ())]
        if isinstance(item, Kernel) and len(item.writes) == 1 and item.writes[0].name in names:
            late[item.writes[0].name] = [*ready, item]
        else:
            sums.extend(range(len(order), len(order) + len(ready)))
            order += [*ready, item]
    if not sums:
        return schedule, frozenset()
    if late or schedule.cut is not None:
        raise NotPeriodic("a sum over layers is an output, or crosses the cut")
    return replace(schedule, items=tuple(order)), frozenset(sums)


def with_sums_early(stamped: Sequence[Stamped], sums: frozenset[int]) -> list[Stamped]:
    """Items of the long schedule with those sums as early as all of their operands are there."""
    made_at: dict[str, int] = {}
    for place, one in enumerate(stamped):
        made_at |= dict.fromkeys(one.outs, place)
    after: dict[int, list[Stamped]] = {}
    for one in stamped:
        if one.item in sums:
            place = max(made_at.get(name, 0) for name in one.refs)
            made_at |= dict.fromkeys(one.outs, place)
            after.setdefault(place, []).append(one)
    found: list[Stamped] = []
    for place, one in enumerate(stamped):
        if one.item not in sums:
            found.append(one)
        found.extend(after.get(place, ()))
    return found

"""Replays without Python: a template that is one program which writes nothing, as the native library runs it.

Invariant: what it gives is what `Replay.run` would give. It does nothing where it is not sure, and where the program
raises: the replay in Python does it again, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.compiled.replay.replay import Replay
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.numbers.expr import evaluator
from torchlazy.lazy.plan.loaded import Compiled
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.runtime.executor import Executable

Row = tuple[Any, ...]


NOT_YET = object()


@dataclass(frozen=True, eq=False)
class NativeReplay:
    """A `ReplayedCall`, and its program."""

    call: Any
    compiled: Compiled


class _Unfit(Exception):
    """The replay needs Python."""


def native_replay(library: Any, replay: Replay, check: Any, holds: Any) -> NativeReplay | object | None:
    """The replay of calls that fit `check` where `holds()`; None where it needs Python, `NOT_YET` before its program is
    there."""
    segment = _only_segment(replay)
    if segment is None or not replay.holds_always:
        return None
    compiled = replay.program_of(segment)
    if compiled is None:
        return NOT_YET
    if type(compiled.run) is not Executable or compiled.run.native is None:
        return None
    try:
        inputs = list(_inputs(segment))
        results = list(_results(replay.template, segment))
    except _Unfit:
        return None
    scalars = evaluator(segment.scalars)([])
    return NativeReplay(library.ReplayedCall(check, holds, compiled.run.native, scalars, inputs, results), compiled)


def _only_segment(replay: Replay) -> t.Segment | None:
    template, steps = replay.template, replay.steps.steps
    if len(steps) != 1 or type(steps[0]) is not t.Segment:
        return None
    has_more = template.checks or template.effects or template.versions or template.sources or template.hosts
    (segment,) = steps
    writes = segment.trace.donations or segment.trace.writes
    return None if has_more or writes else segment


def _inputs(segment: t.Segment) -> Iterator[Row]:
    for memory, (_, geom) in zip(segment.inputs, segment.trace.inputs, strict=True):
        if geom.bits or geom.offset:
            raise _Unfit
        if type(memory) is t.FromArgument:
            yield memory.leaf, None, _layout(geom)
        elif type(memory) is t.FromState and memory.storage.poison is None and memory.storage.real is not None:
            yield -1, memory.storage.real, _layout(geom)
        else:
            raise _Unfit


def _results(template: t.CallTemplate, segment: t.Segment) -> Iterator[Row]:
    outputs = {target.place: n for n, target in enumerate(segment.targets) if type(target) is t.FromStep}
    if len(outputs) < len(segment.targets):
        raise _Unfit
    for result in template.results:
        if type(result) is t.SameArgument:
            yield "argument", result.leaf
        elif type(result) is t.SameObject:
            yield "object", result.value
        elif type(result) is t.TensorResult and type(result.memory) is t.FromStep:
            number = outputs.pop(result.memory.place, None)
            if number is None or not _is_plain(result, segment.trace.outputs[number][1]):
                raise _Unfit
            yield "output", number, _layout(result.geometry), result.geometry.offset, result.is_marked
        else:
            raise _Unfit


def _is_plain(result: t.TensorResult, made: Geometry) -> bool:
    geom = result.geometry
    return (
        not (result.requires_grad or result.freed or result.is_detached or geom.bits)
        and result.base is None
        and geom.device.type == "cpu"
        and geom.dtype == made.dtype
        and result.is_inference == torch.is_inference_mode_enabled()
    )


def _layout(geom: Geometry) -> Row:
    return list(geom.shape), list(geom.strides), geom.dtype

"""Whether the memory that a template's programs work on has the sizes that they expect, at uncaptured sizes.

Invariant: only memory that is there before the call is looked at, and what earlier steps of the template make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.trace.geometry import Geometry


def memory_misfit(template: t.CallTemplate, leaves: Sequence[Any], recorder: Recorder) -> str:
    """What of the memory is not of the size that the programs expect; empty where all of it is."""
    places: dict[int, Geometry] = {}

    def base(memory: t.Memory) -> Geometry | None:
        if isinstance(memory, t.FromStep):
            return places.get(memory.place)
        if isinstance(memory, t.FromState):
            return memory.storage.base
        tensor = memory.tensor(leaves)
        if tensor is None:
            return None
        storage = tensor._storage_ if isinstance(tensor, LazyTensor) else recorder.storage_of_plain(tensor)
        return storage.base

    for step in template.steps:
        inputs: list[tuple[t.Memory, Geometry]] = []
        if isinstance(step, t.Segment):
            pairs = zip(step.inputs, step.trace.inputs, strict=True)
            inputs = [(memory, geom) for memory, (_, geom) in pairs]
        elif isinstance(step, t.JointRun):
            wanted = zip(step.joint.forward_inputs, step.joint.forward.inputs, strict=True)
            inputs = [(step.inputs[number][0], geom) for number, (_, geom) in wanted]
        for memory, geom in inputs:
            found = base(memory)
            if found is not None and (found.meta != geom.meta or found.strides != geom.strides):
                return f"memory of {found.meta} is where a program expects {geom.meta}"
        if isinstance(step, t.Segment):
            for target, (_, geom) in zip(step.targets, step.trace.outputs, strict=True):
                if isinstance(target, t.FromStep):
                    places[target.place] = geom
                else:
                    found = base(target)
                    if found is not None and found.span != geom.span:
                        return f"memory of {found.meta} would become {geom.meta}"
    everything = (*template.results, *(r for effect in template.effects for r in effect.results))
    for result in everything:
        if isinstance(result, t.TensorResult):
            found = base(result.memory)
            if found is not None and result.geometry.span * result.geometry.dtype.itemsize > found.nbytes:
                return f"a result of {result.geometry.meta} is larger than its memory"
    return ""


__all__ = ["memory_misfit"]

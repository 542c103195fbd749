"""Recovery after a compiled program raised: eager's own error, and every value that can still be computed.

In a captured call the state is left as eager leaves it: with the writes before the operator that failed, and no others.

Invariant: memory that the program may already have overwritten is never read as if it held its old value.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchlazy.lazy.run.interpreter import Value, evaluate_slots, into_donated, run_entries
from torchlazy.lazy.trace.trace import CutTrace, slots_in
from torchlazy.runtime.executor import Executable
from torchlazy.runtime.program.program import Allocate, ForeachLaunch, Launch, Program, Reinterpret, Step
from torchlazy.runtime.program.steps import names_read


def values_after_failure(
    run: Executable,
    trace: CutTrace,
    error: Exception,
    inputs: Sequence[weakref.ref[torch.Tensor]],
    scalars: Sequence[Any],
) -> list[Value]:
    """The outputs of `trace`, of which `run` is the compiled form, computed again operator by operator.

    The program's error stands for what depends on an input that is freed or may be overwritten; an output donated to
    such memory is the error too, and the memory stays as the program left it.
    """
    program = run.program
    begun, held = run.where_failed(error) or (None, {})
    overwritten = set(range(len(inputs))) if begun is None else _overwritten(program, begun)
    values: list[Value] = []
    for position, ((name, _), ref) in enumerate(zip(program.inputs, inputs, strict=True)):
        found = ref()
        value = found if found is not None else held.get(name)
        values.append(error if position in overwritten or not isinstance(value, torch.Tensor) else value)
    error.__traceback__ = None  # its frames would keep the program's values alive
    left = _left_in_state(trace, values, error, scalars)
    if left is not None:
        return left
    results = run_entries(trace, values, scalars)
    lost = {output for output, given in trace.donations if given in overwritten}
    return [error if position in lost else value for position, value in enumerate(results)]


def values_left(
    trace: CutTrace, results: list[Value], inputs: Sequence[weakref.ref[torch.Tensor]], scalars: Sequence[Any]
) -> list[Value]:
    """`results` of a run operator by operator, with the state as eager leaves it where an operator failed."""
    failure = next((value for value in results if isinstance(value, BaseException)), None)
    if failure is None or not trace.writes:
        return results
    replaced = {given for output, given in trace.donations if not isinstance(results[output], BaseException)}
    lost = RuntimeError("torchlazy: this value was replaced before the operator that failed")
    memory = [ref() for ref in inputs]
    values: list[Value] = [
        lost if position in replaced or value is None else value for position, value in enumerate(memory)
    ]
    left = _left_in_state(trace, values, lost, scalars)
    if left is None:
        return results
    merged = [
        old if isinstance(new, BaseException) or not isinstance(old, BaseException) else new
        for old, new in zip(results, left, strict=True)
    ]
    if not any(isinstance(value, BaseException) for value in merged):
        raise failure
    return merged


def _left_in_state(
    trace: CutTrace, inputs: Sequence[Value], error: Exception, scalars: Sequence[Any]
) -> list[Value] | None:
    """The outputs, of which those that are state hold what stood before the first operator that fails; `error` stands
    for inputs that are lost. None where the trace does not list its writes, or nothing fails this time."""
    if not trace.writes or any(entry.op.namespace == "_c10d_functional" for entry in trace.entries):
        return None
    numbers = {found.number for entry in trace.entries for found in slots_in(entry.outputs)}
    found = evaluate_slots(trace, inputs, scalars, numbers)
    failed = _first_failure(trace, found, error)
    if failed is None:
        return None
    place, reason = failed
    found |= {slot.number: value for (slot, _), value in zip(trace.inputs, inputs, strict=True)}
    memory = dict(trace.donations)
    standing: dict[int, Any] = {output: inputs[memory[output]] for _, output, _ in trace.writes if output in memory}
    standing |= {output: found[value.number] for count, output, value in trace.writes if count <= place}
    results: list[Value] = []
    for output, (slot, geom) in enumerate(trace.outputs):
        value = standing.get(output, found[slot.number])  # it may be lost, as any other
        given = inputs[memory[output]] if output in memory else None
        if isinstance(value, torch.Tensor) and value is not given:
            value = torch.empty_strided(geom.shape, geom.strides, dtype=geom.dtype, device=value.device).copy_(value)
        results.append(error if given is error else value)
    results = into_donated(results, {output: inputs[given] for output, given in trace.donations})
    if not any(isinstance(value, BaseException) for value in results):
        raise reason  # there is only state among the outputs, and it is as it should be
    return results


# Parts of the names of operators that raise for values of their operands.
_RAISING = ("index", "embedding", "gather", "scatter", "take", "checked", "linalg", "nll_loss")


def _first_failure(trace: CutTrace, found: Mapping[int, Value], lost: Exception) -> tuple[int, BaseException] | None:
    """The first entry that fails, and its error; else the first lost one whose operator may raise for its values."""
    suspect: tuple[int, BaseException] | None = None
    for position, entry in enumerate(trace.entries):
        for made in slots_in(entry.outputs):
            value = found[made.number]
            if isinstance(value, BaseException) and value is not lost:
                return position, value
            if value is lost and suspect is None and any(part in entry.op.name() for part in _RAISING):
                suspect = position, lost
    return suspect


def _overwritten(program: Program, begun: Sequence[Step]) -> set[int]:
    """Positions of the donated inputs that a kernel among the steps that have begun may have written.

    A kernel writes a donated input under the name of the output, or of the value that reuses its memory.
    """
    launches = [step for step in begun if isinstance(step, Launch | ForeachLaunch)]
    launched = {name for step in launches for name in names_read(step)}
    root_of = {program.inputs[position][0]: position for _, position in program.donations}
    written = {program.outputs[output] for output, _ in program.donations}
    found: set[int] = set()
    for step in program.steps:
        if not isinstance(step, (Allocate, Reinterpret)):
            continue
        source = step.reuse if isinstance(step, Allocate) else step.source
        if source in root_of:
            root_of[step.name] = root_of[source]
            if step.name in launched and (isinstance(step, Allocate) or step.name in written):
                found.add(root_of[source])
    return found

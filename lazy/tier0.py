"""Tier 0: run the recorded ATen operators one by one, at once, with eager's numerics.

Invariant: every output is memory of its own, or the memory that it was donated, with exactly the strides promised; what
failed is the error itself, and outputs that do not depend on it still have their value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torchlazy.lazy.fx_graph import needed_entries
from torchlazy.lazy.geometry import Geometry
from torchlazy.lazy.trace import Complex, CutTrace, Float, ScalarSlot, Slot, operands, slots_in

Value = torch.Tensor | BaseException


def run_entries(trace: CutTrace, inputs: Sequence[Value], scalars: Sequence[Any]) -> list[Value]:
    """The outputs of `trace`, in order. Empties a list of inputs, so that memory goes back once it is read no more.

    An error in the place of an input stands for a value that is lost: what depends on it is that error.
    """
    values: list[Any] = [None] * len(trace.geometries)
    last_use: dict[int, int] = {}
    for position, entry in enumerate(trace.entries):
        for found in operands(entry):
            last_use[found.number] = position
    for number, _ in trace.outputs:
        last_use[number.number] = len(trace.entries)
    needed = needed_entries(trace)
    for (number, _), value in zip(trace.inputs, inputs, strict=True):
        if number.number in last_use:
            values[number.number] = value
    donated = {output: inputs[given] for output, given in trace.donations}
    owned_by_inputs = {value.untyped_storage()._cdata for value in inputs if isinstance(value, torch.Tensor)}
    if isinstance(inputs, list):
        inputs.clear()
    _run(trace, values, scalars, needed, last_use)
    return into_donated(_own_memory(trace, values, owned_by_inputs), donated)


def evaluate_slots(
    trace: CutTrace, inputs: Sequence[Value], scalars: Sequence[Any], wanted: Iterable[int]
) -> dict[int, Value]:
    """The values of these slots, which may share memory with each other and with the inputs. Writes to nothing."""
    values: list[Any] = [None] * len(trace.geometries)
    for (number, _), value in zip(trace.inputs, inputs, strict=True):
        values[number.number] = value
    numbers = set(wanted)
    last = max(
        (
            position
            for position, entry in enumerate(trace.entries)
            if any(found.number in numbers for found in slots_in(entry.outputs))
        ),
        default=-1,
    )
    forever = dict.fromkeys(range(len(values)), len(trace.entries))
    _run(trace, values, scalars, set(range(last + 1)), forever)
    return {number: values[number] for number in numbers}


def _run(
    trace: CutTrace,
    values: list[Any],
    scalars: Sequence[Any],
    needed: frozenset[int] | set[int],
    last_use: dict[int, int],
) -> None:
    """Run the needed entries on `values`, by slot; a value goes after its last use."""

    def value_of(argument: Any) -> Any:
        kind = type(argument)
        if kind is Slot:
            value = values[argument.number]
            if isinstance(value, BaseException):
                raise _Poisoned(value)
            return value
        if kind is tuple:
            return [value_of(item) for item in argument]
        if kind is ScalarSlot:
            return scalars[argument.number]
        if kind is Float:
            return argument.value
        if kind is Complex:
            return complex(argument)
        return argument

    for position, entry in enumerate(trace.entries):
        if position not in needed:
            continue
        try:
            args = [value_of(a) for a in entry.args]
            if entry.op in _BY_ADDRESS or entry.op in _BY_STRIDES:
                geom = trace.geometries[entry.args[0].number]
                if entry.op in _BY_ADDRESS or args[0].stride() != geom.strides:
                    args[0] = _laid_out(args[0], geom)
            result = entry.op(*args, **{name: value_of(v) for name, v in entry.kwargs})
        except _Poisoned as poisoned:
            result = poisoned.error
        except Exception as error:
            result = error.with_traceback(None)  # its frames would keep every value of this run alive
        _store(entry.outputs, result, values)
        for found in operands(entry):
            if last_use[found.number] == position:
                values[found.number] = None
        for found in slots_in(entry.outputs):
            if found.number not in last_use:
                values[found.number] = None


# They count in memory, from the start of a storage: their operand, a storage's whole value, must lie as was promised.
_BY_ADDRESS = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default})
# These refuse strides that they cannot describe; a kernel may return others than its fake told the recorder.
_BY_STRIDES = frozenset({torch.ops.aten.view.default, torch.ops.aten.view.dtype})


def _laid_out(value: torch.Tensor, geom: Geometry) -> torch.Tensor:
    """`value` in other memory where an operator returned other strides, or an alias (`_unsafe_view` of a slice)."""
    if value.stride() == geom.strides and value.storage_offset() == 0:
        return value
    return torch.empty_strided(geom.shape, geom.strides, dtype=geom.dtype, device=geom.compute).copy_(value)


class _Poisoned(Exception):
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _store(outputs: Any, result: Any, values: list[Any]) -> None:
    if type(outputs) is Slot:
        values[outputs.number] = result
    elif type(outputs) is tuple:
        for position, item in enumerate(outputs):
            _store(item, result if isinstance(result, BaseException) else result[position], values)


def _own_memory(trace: CutTrace, values: list[Any], taken: set[int]) -> list[Value]:
    results: list[Value] = []
    for number, geom in trace.outputs:
        value = values[number.number]
        if isinstance(value, BaseException):
            results.append(value)
            continue
        memory = value.untyped_storage()
        whole = memory.nbytes() == geom.nbytes and value.storage_offset() == 0
        if value.stride() != geom.strides or memory._cdata in taken or not whole:
            own = torch.empty_strided(geom.shape, geom.strides, dtype=geom.dtype, device=geom.compute)
            value = own.copy_(value)
        taken.add(value.untyped_storage()._cdata)
        results.append(value)
    return results


def into_donated(results: list[Value], donated: Mapping[int, Value]) -> list[Value]:
    """Memory that a value replaces keeps its address, as in eager; all values were moved out of the inputs before."""
    for position, memory in donated.items():
        value = results[position]
        if isinstance(value, torch.Tensor) and isinstance(memory, torch.Tensor):
            if memory.shape != value.shape:  # a whole storage may be held as one dimension
                memory = memory.as_strided(value.shape, value.stride(), memory.storage_offset())
            results[position] = memory.copy_(value)
    return results

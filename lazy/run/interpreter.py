"""Tier 0: runs the recorded ATen operators one by one, with eager's numerics.

Invariant: every output is memory of its own, or the memory that it was donated, with exactly the strides that the trace
states; what failed is the error itself, and outputs that do not depend on it still have their value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.to_fx import needed_entries
from torchlazy.lazy.trace.trace import Complex, CutTrace, Float, ScalarSlot, Slot, operands, slots_in
from torchlazy.runtime.program.steps import CALLED_AS

Value = torch.Tensor | BaseException
Move = tuple[int, int]  # an entry's position, and the output that goes to donated memory behind it


def run_entries(
    trace: CutTrace, inputs: Sequence[Value], scalars: Sequence[Any], moves: list[Move] | None = None
) -> list[Value]:
    """The outputs of `trace`, in order. Empties a list of inputs, so that memory is freed after its last read.

    Where the trace lists its writes and an operator fails, memory that was not yet replaced stays as it is, and what
    would replace it is the error. An error in the place of an input stands for a value that is lost: what depends on it
    is that error. `moves` gets which outputs went to donated memory early.
    """
    frame = Frame(trace, inputs, last_uses(trace))
    early = _EarlyWrites(frame, [] if moves is None else moves)
    return frame.results(_run(trace, frame.values, scalars, needed_entries(trace), frame.last_use, early))


def last_uses(trace: CutTrace) -> dict[int, int]:
    """By number of a slot, the position of the last entry that needs its value; that behind all for an output."""
    found: dict[int, int] = {}
    needed = needed_entries(trace)
    for position, entry in enumerate(trace.entries):
        if position in needed:
            found.update((operand.number, position) for operand in operands(entry))
    return found | {number.number: len(trace.entries) for number, _ in trace.outputs}


class Frame:
    """What a run of a trace operator by operator begins with and ends with. Empties a list of inputs."""

    def __init__(self, trace: CutTrace, inputs: Sequence[Value], last_use: Mapping[int, int]) -> None:
        self.trace, self.last_use = trace, last_use
        self.values: list[Any] = [None] * len(trace.geometries)  # by slot
        for (number, _), value in zip(trace.inputs, inputs, strict=True):
            if number.number in last_use:
                self.values[number.number] = value
        self.donated = {output: inputs[given] for output, given in trace.donations}
        self.written: dict[int, torch.Tensor] = {}  # outputs that are in their memory
        self._taken = {value.untyped_storage()._cdata for value in inputs if isinstance(value, torch.Tensor)}
        if isinstance(inputs, list):
            inputs.clear()

    def move(self, output: int) -> None:
        """The value of this output into the memory that it was donated, which nothing reads any more."""
        number, geom = self.trace.outputs[output]
        memory: Any = self.donated[output]
        if memory.shape != geom.shape:  # a whole storage may be held as one flat dimension
            memory = memory.as_strided(geom.shape, geom.strides, memory.storage_offset())
        self.values[number.number] = self.written[output] = memory.copy_(self.values[number.number])

    def results(self, failure: BaseException | None) -> list[Value]:
        """The outputs, once all operators have run; `failure`: the first error."""
        trace, values, written = self.trace, self.values, self.written
        if failure is not None and trace.writes:
            for output in self.donated.keys() - written.keys():
                values[trace.outputs[output][0].number] = failure
        results = _own_memory(trace, values, self._taken, written)
        return into_donated(results, {output: m for output, m in self.donated.items() if output not in written})


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


def run_rest(frame: Frame, scalars: Sequence[Any], start: int) -> BaseException | None:
    """Run the entries from `start` on, after those before it have run. Returns the first error."""
    needed = {position for position in needed_entries(frame.trace) if position >= start}
    return _run(frame.trace, frame.values, scalars, needed, frame.last_use)


def _run(
    trace: CutTrace,
    values: list[Any],
    scalars: Sequence[Any],
    needed: frozenset[int] | set[int],
    last_use: Mapping[int, int],
    early: _EarlyWrites | None = None,
) -> BaseException | None:
    """Run the needed entries on `values`, by slot; a value is freed after its last use. Returns the first error."""
    failure: BaseException | None = None
    for position, entry in enumerate(trace.entries):
        if position not in needed:
            continue
        args: list[Any] | None
        try:
            args = [value_of(a, values, scalars) for a in entry.args]
            lays_out = LAYS_OUT.get(entry.op)
            if lays_out is not None:
                args[0] = lays_out(args[0], trace.geometries[entry.args[0].number])
            result = CALLED_AS.get(entry.op, entry.op)(
                *args, **{name: value_of(v, values, scalars) for name, v in entry.kwargs}
            )
        except _Poisoned as poisoned:
            result = poisoned.error
        except Exception as error:
            result = error.with_traceback(None)  # its frames would keep every value of this run alive
            failure = failure or error
            early = None if trace.writes else early
        _store(entry.outputs, result, values)
        args = result = None
        made = slots_in(entry.outputs)
        if early is not None:
            early.made(position, [found.number for found in made])
        gone = [found.number for found in operands(entry) if last_use[found.number] == position]
        gone += [found.number for found in made if found.number not in last_use]
        if early is not None:
            early.gone(position, gone)
        for number in gone:
            values[number] = None
    return failure


def value_of(argument: Any, values: Sequence[Any], scalars: Sequence[Any]) -> Any:
    """An argument of an entry as its operator expects it. Not a closure: a recursive closure would be a reference cycle
    that keeps the run's values until the next garbage collection."""
    kind = type(argument)
    if kind is Slot:
        value = values[argument.number]
        if isinstance(value, BaseException):
            raise _Poisoned(value)
        return value
    if kind is tuple:
        return [value_of(item, values, scalars) for item in argument]
    if kind is ScalarSlot:
        return scalars[argument.number]
    if kind is Float:
        return argument.value
    if kind is Complex:
        return complex(argument)
    return argument


class _EarlyWrites:
    """New values of donated memory, moved there as soon as no entry reads the old one any more.

    Otherwise old and new state would exist side by side at the end: parameters and optimizer states twice, where eager
    updates them in place.
    """

    def __init__(self, frame: Frame, moves: list[Move]) -> None:
        """`moves` gets each move, and behind which entry it is."""
        self._frame, self._moves = frame, moves
        trace = self._trace = frame.trace
        self._values = frame.values
        self._memory: dict[int, int] = {}  # by storage: the output that goes there
        self._outputs: dict[int, list[int]] = {}  # by slot, the storages that its value goes to
        self._alive: dict[int, set[int]] = {}  # by storage, the slots whose values are on it
        for output, memory in frame.donated.items():
            if isinstance(memory, torch.Tensor):
                key = memory.untyped_storage()._cdata
                if key in self._memory:  # two views of one storage
                    self._memory.clear()
                    self._outputs.clear()
                    break
                self._memory[key] = output
                self._outputs.setdefault(trace.outputs[output][0].number, []).append(key)
        self._alive = {key: set() for key in self._memory}
        self.made(-1, [number.number for number, _ in trace.inputs])

    def made(self, position: int, slots: Sequence[int]) -> None:
        """These slots have got their values."""
        if not self._memory:
            return
        for slot in slots:
            value = self._values[slot]
            if isinstance(value, torch.Tensor):
                alive = self._alive.get(value.untyped_storage()._cdata)
                if alive is not None:
                    alive.add(slot)
        self._write(position, [key for slot in slots for key in self._outputs.get(slot, ())])

    def gone(self, position: int, slots: Sequence[int]) -> None:
        """The values of these slots are read no more, and about to be freed."""
        if not self._memory:
            return
        free = []
        for slot in slots:
            value = self._values[slot]
            if isinstance(value, torch.Tensor):
                key = value.untyped_storage()._cdata
                alive = self._alive.get(key)
                if alive is not None:
                    alive.discard(slot)
                    if not alive:
                        free.append(key)
        self._write(position, free)

    def _write(self, position: int, keys: Sequence[int]) -> None:
        for key in keys:
            output = self._memory[key]
            number = self._trace.outputs[output][0].number
            if self._alive[key] or output in self._frame.written or not isinstance(self._values[number], torch.Tensor):
                continue
            self._frame.move(output)
            self._moves.append((position, output))
            self._alive[key].add(number)


def _laid_out(value: torch.Tensor, geom: Geometry) -> torch.Tensor:
    """`value` in other memory where an operator returned other strides, or an alias (`_unsafe_view` of a slice)."""
    if value.stride() == geom.strides and value.storage_offset() == 0:
        return value
    return torch.empty_strided(geom.shape, geom.strides, dtype=geom.dtype, device=geom.compute).copy_(value)


def _with_strides(value: torch.Tensor, geom: Geometry) -> torch.Tensor:
    return value if value.stride() == geom.strides else _laid_out(value, geom)


LAYS_OUT: Mapping[Any, Callable[[torch.Tensor, Geometry], torch.Tensor]] = {
    # They index memory from the start of a storage: their operand, a storage's whole value, must have the recorded
    # layout.
    torch.ops.aten.as_strided.default: _laid_out,
    torch.ops.aten.as_strided_scatter.default: _laid_out,
    # These refuse strides that they cannot describe; a kernel may return others than its fake tensor rule stated.
    torch.ops.aten.view.default: _with_strides,
    torch.ops.aten.view.dtype: _with_strides,
}
"""What gives an operator's first argument the layout that was recorded, where the operator depends on it."""


class _Poisoned(Exception):
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _store(outputs: Any, result: Any, values: list[Any]) -> None:
    if type(outputs) is Slot:
        values[outputs.number] = result
    elif type(outputs) is tuple:
        for position, item in enumerate(outputs):
            _store(item, result if isinstance(result, BaseException) else result[position], values)


def _own_memory(
    trace: CutTrace, values: list[Any], taken: set[int], written: Mapping[int, torch.Tensor]
) -> list[Value]:
    """The outputs, each in memory of its own; those in `written` are in place already."""
    results: list[Value] = []
    last = {number.number: position for position, (number, _) in enumerate(trace.outputs)}
    for position, (number, geom) in enumerate(trace.outputs):
        value = written.get(position, values[number.number])
        if position in written or isinstance(value, BaseException):
            results.append(value)
            continue
        if value is None:
            results.append(RuntimeError(f"torchlazy: an operator gave nothing where {geom.meta} was recorded"))
            continue
        memory = value.untyped_storage()
        whole = memory.nbytes() == geom.nbytes and value.storage_offset() == 0
        if value.stride() != geom.strides or memory._cdata in taken or not whole:
            own = torch.empty_strided(geom.shape, geom.strides, dtype=geom.dtype, device=geom.compute)
            value = own.copy_(value)
            if last[number.number] == position:
                values[number.number] = memory = None  # else all outputs would be there twice
        elif value._is_view() and not (value.is_conj() or value.is_neg()):  # autograd would refuse writes to it
            value = value.new_empty(0).set_(memory, 0, value.shape, value.stride())
        taken.add(value.untyped_storage()._cdata)
        results.append(value)
    return results


def into_donated(results: list[Value], donated: Mapping[int, Value]) -> list[Value]:
    """Memory that a value replaces keeps its address, as in eager; all values were moved out of the inputs before."""
    for position, memory in donated.items():
        value = results[position]
        if isinstance(value, torch.Tensor) and isinstance(memory, torch.Tensor):
            if memory.shape != value.shape:  # a whole storage may be held as one flat dimension
                memory = memory.as_strided(value.shape, value.stride(), memory.storage_offset())
            results[position] = memory.copy_(value)
    return results

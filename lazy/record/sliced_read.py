"""Sliced reads: one number is read on the host by running only the operators that lead to it, without a cut.

Libraries look at masks before they compute ("is anything padded here?"). A cut at such a read makes two programs of
one, and a compiled call whose results need gradients could not be replayed after it.

A loop that reads a value which it carries along ("are all sequences finished?") is cut at each read, as usual: else it
would become one trace of as many iterations as there were.

Invariant: the number is the one that a cut would have given, and nothing that was recorded changes. The operators run
one by one, on the memory that the running trace has as its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.trace import user_frames
from torchlazy.lazy.trace.geometry import Geometry, base_of
from torchlazy.lazy.trace.storage import LazyStorage, storage_of
from torchlazy.lazy.trace.trace import CutTrace, Entry, ScalarSlot, Slot, operands, scalar_slot, slot, slots_in

if TYPE_CHECKING:
    from torchlazy.lazy.record.recorder import Recorder
    from torchlazy.lazy.record.tensor import LazyTensor

APART = " apart"  # ends the cause of such a read
_MAX_ENTRIES = 48
_MAX_LOOPS = 256
_MAX_NUMEL = 1 << 20  # elements that the operators compute in all: the program may compute them again
# None of them raises because of a value.
_CHEAP = frozenset(
    {
        "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and",
        "bitwise_or", "bitwise_xor", "bitwise_not", "all", "any", "_is_all_true", "_is_any_true", "sum", "max", "min",
        "amax", "amin", "isnan", "isinf", "abs", "neg", "sign", "floor", "ceil", "round", "add", "sub", "rsub", "mul",
        "div", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "cumsum", "_to_copy",
        "clone", "copy", "as_strided", "select", "slice", "view", "_unsafe_view", "unsqueeze", "squeeze", "expand",
        "permute", "t", "transpose", "unbind", "split", "alias", "diagonal",
        "as_strided_scatter", "ones", "zeros", "full", "arange", "scalar_tensor", "new_ones", "new_zeros", "new_full",
        "ones_like", "zeros_like", "full_like", "fill", "constant_pad_nd", "cat", "repeat", "flip", "roll", "tril",
        "triu", "argmax", "argmin", "count_nonzero", "mean",
    }
)  # fmt: skip
# They raise for positions out of range. In a replay everything before must have happened by then: they are in a slice
# only where nothing has been written that could be seen from outside.
_REFUSING = frozenset({"index", "index_put", "index_select", "gather", "scatter", "embedding"})
_APART = _CHEAP | _REFUSING


@dataclass(frozen=True)
class SlicedTrace:
    """The operators that lead to one number as a trace of its own; `inputs` and `scalars`: positions among the running
    trace's, `first`: that of its first entry there."""

    trace: CutTrace
    inputs: tuple[int, ...]
    scalars: tuple[int, ...]
    first: int
    refuses: bool  # whether an operator may raise because of its values


class Lines:
    """The user's lines with sliced reads: where in the running trace each read last, and which are in a loop."""

    def __init__(self) -> None:
        self._epoch = -1
        self._read_at: dict[str, int] = {}
        self._in_a_loop: set[str] = set()

    def is_in_a_loop(self, recorder: Recorder, frame: str, found: SlicedTrace) -> bool:
        """Whether the number at this line depends on something recorded before the line's last read in this trace.

        Loops are remembered, so that later traces end at their first read; but not within a captured call, which must
        behave the same at each capture.
        """
        if self._epoch != recorder.epoch:
            self._epoch, self._read_at = recorder.epoch, {}
        before = self._read_at.get(frame, 0)
        self._read_at[frame] = len(recorder.entries)
        if recorder.capture is not None:
            return found.first < before
        if found.first < before and len(self._in_a_loop) < _MAX_LOOPS:
            self._in_a_loop.add(frame)
        return found.first < before or frame in self._in_a_loop


@dataclass(frozen=True)
class Reading:
    """The number, and a storage of its own that holds it."""

    value: Any
    storage: LazyStorage


def read_apart(recorder: Recorder, tensor: LazyTensor, cause: str) -> Reading | None:
    """The one value of a pending tensor without a cut; None where more than a few cheap operators lead to it."""
    storage = tensor._storage_
    if not storage.dirty or storage.epoch != recorder.epoch or tensor._geometry.numel != 1 or recorder.busy:
        return None
    wanted = recorder.read(tensor)
    path = recorder.path
    if path is None:
        found = slice_to(recorder, wanted)
    elif wanted.number in path.reads:
        found = path.reads[wanted.number]
    else:
        found = path.reads[wanted.number] = slice_to(recorder, wanted)
    capture = recorder.capture
    if found is None or (capture is None and len(recorder.entries) == len(found.trace.entries)):
        return None  # nothing else is pending that a cut would separate from what follows
    if capture is not None and (found.refuses or not capture.needs_gradients) and _has_written(recorder):
        # A replay's program that raises has no effects: what comes before it needs a program of its own, except where
        # gradients need one program for all.
        return None
    frame = user_frames.user_frame()
    if recorder.lines.is_in_a_loop(recorder, frame, found):
        return None
    if (recorder.gate is not None and recorder.gate(cause)) or (capture is not None and not capture.lets_cut(cause)):
        return None
    cause += APART
    memory: list[Any] = [recorder.inputs[position][1].real for position in found.inputs]
    with recorder.apart():
        value = recorder.interpret(found.trace, memory, [recorder.scalars[number] for number in found.scalars])[0]
        if isinstance(value, BaseException):  # a cut gives each value its own error
            return None
        number = value.item()
    recorder.on_cut(cause, frame, len(found.trace.entries))
    made = storage_of(found.trace.outputs[0][1], value)
    if capture is not None:
        capture.sliced_segment(found, made, cause, frame)
    return Reading(number, made)


def slice_to(recorder: Recorder, wanted: Slot) -> SlicedTrace | None:
    """The trace that leads to a slot of the running trace; None if an operator is expensive or there are too many."""
    inputs = {number.number: position for position, (number, _) in enumerate(recorder.inputs)}
    positions: set[int] = set()
    read: set[int] = set()
    pending, made = [wanted.number], 0
    while pending:
        number = pending.pop()
        if number in inputs:
            read.add(number)
            continue
        position = _maker(recorder.entries, number)
        if position in positions:
            continue
        if position is None or len(positions) == _MAX_ENTRIES:
            return None
        entry = recorder.entries[position]
        made += sum(recorder.geometries[out.number].numel for out in slots_in(entry.outputs))
        if made > _MAX_NUMEL or entry.op.overloadpacket.__name__ not in _APART or _may_raise(entry):
            return None
        positions.add(position)
        pending += [found.number for found in operands(entry)]
    if not positions:
        return None  # written with an input's value (`a.copy_(b)`): no operator leads to it
    return _renumbered(recorder, wanted, sorted(positions), {number: inputs[number] for number in sorted(read)})


def _has_written(recorder: Recorder) -> bool:
    """Whether the running trace writes to memory that was there before."""
    written = (storage() for storage in recorder._written)
    return any(storage is not None and storage.dirty and storage.real is not None for storage in written)


def _may_raise(entry: Entry) -> bool:
    """Whether its options make it raise for some values: a divisor of 0."""
    return "rounding_mode" in dict(entry.kwargs)


def _maker(entries: Sequence[Entry], number: int) -> int | None:
    """The position of the entry that makes a slot: slots are numbered in the order of the entries, inputs between."""
    for position in range(min(number, len(entries) - 1), -1, -1):
        outputs = entries[position].outputs
        made = [outputs.number] if type(outputs) is Slot else [out.number for out in slots_in(outputs)]
        if number in made:
            return position
        if made and made[-1] < number:
            return None
    return None


def _renumbered(recorder: Recorder, wanted: Slot, positions: list[int], inputs: dict[int, int]) -> SlicedTrace:
    """The entries as a separate trace: slots and scalars numbered from zero, the wanted value as its output."""
    slots: dict[int, Slot] = {}
    scalars: dict[int, ScalarSlot] = {}
    geometries: list[Geometry] = []

    def new(number: int) -> Slot:
        geometries.append(recorder.geometries[number])
        return slots.setdefault(number, slot(len(slots)))

    def renamed(value: Any) -> Any:
        if type(value) is Slot:
            return slots[value.number]
        if type(value) is ScalarSlot:
            return scalars.setdefault(value.number, scalar_slot(len(scalars), value.kind))
        return tuple(map(renamed, value)) if type(value) is tuple else value

    def made(outputs: Any) -> Any:
        return new(outputs.number) if type(outputs) is Slot else outputs and tuple(map(made, outputs))

    given = tuple((new(number), recorder.geometries[number]) for number in inputs)
    entries = []
    for position in positions:
        entry = recorder.entries[position]
        args, kwargs = renamed(entry.args), tuple((name, renamed(value)) for name, value in entry.kwargs)
        entries.append(Entry(entry.op, args, kwargs, made(entry.outputs)))
    result, geom = slots[wanted.number], recorder.geometries[wanted.number]
    if geom.offset:  # a view of more: in this trace it begins its own memory
        geom = base_of(geom)
        geometries.append(geom)
        source, result = result, slot(len(slots))
        entries.append(Entry(torch.ops.aten.clone.default, (source,), (), result))
    kinds = tuple(found.kind for found in scalars.values())
    trace = CutTrace(tuple(entries), tuple(geometries), given, kinds, ((result, geom),), ())
    refuses = any(entry.op.overloadpacket.__name__ in _REFUSING for entry in entries)
    return SlicedTrace(trace, tuple(inputs.values()), tuple(scalars), positions[0], refuses)


__all__ = ["APART", "Lines", "Reading", "SlicedTrace", "read_apart"]

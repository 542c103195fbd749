"""The recorded trace: a flat list of functional operators over numbered slots.

Invariant: entries are functional (no mutation, no `out=`), every slot is written once and before it is read, and an
entry holds only hashable constants, so that the tuple of entries is the structure by which programs are looked up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torchlazy.lazy.trace.geometry import Geometry


class Slot:
    """The name of one value of a trace; interned, so that equality is identity."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"


class ScalarSlot:
    """A Python number of the program that is an input of each run, not part of the structure."""

    __slots__ = ("kind", "number")

    def __init__(self, number: int, kind: type) -> None:
        self.number = number
        self.kind = kind

    def __repr__(self) -> str:
        return f"${self.number}"


_SLOTS: list[Slot] = []
_SCALARS: dict[tuple[int, type], ScalarSlot] = {}


def slot(number: int) -> Slot:
    """The interned slot with this number."""
    while len(_SLOTS) <= number:
        _SLOTS.append(Slot(len(_SLOTS)))
    return _SLOTS[number]


def scalar_slot(number: int, kind: type) -> ScalarSlot:
    """The interned scalar slot with this number and kind."""
    return _SCALARS.setdefault((number, kind), ScalarSlot(number, kind))


class Float:
    """A float constant compared by its bits: 0.0 and -0.0 differ, nan equals itself, 1.0 is not 1."""

    __slots__ = ("bits", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.bits = value.hex()

    def __eq__(self, other: object) -> bool:
        return type(other) is Float and other.bits == self.bits

    def __hash__(self) -> int:
        return hash(self.bits)

    def __repr__(self) -> str:
        return repr(self.value)


def plain_constant(value: Any) -> Any:
    """The value, a Float as the Python float that it stands for: a Float equals no plain 0.0."""
    return value.value if type(value) is Float else value


class Complex(complex):
    """A complex constant compared by its bits, as a Float is: signs of zeros decide the side of a branch cut."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is Complex and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash((self.real.hex(), self.imag.hex()))


class Entry(NamedTuple):
    """One operator call. `args` and `kwargs` hold Slots, ScalarSlots, constants and tuples of those.

    `outputs` mirrors the result's structure: a Slot, None, or a tuple of those.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: Any


@dataclass(frozen=True)
class Half:
    """Which half of a trace a program runs: what is before a cut, or what is after it.

    `entries`, `inputs`, `scalars` and `outputs` are how many of the trace's are before the cut.
    """

    is_second: bool
    entries: int
    inputs: int
    scalars: int
    outputs: int


class Signature(tuple[Any, ...]):
    """A trace's structure. Its hash is cached: it has thousands of parts, and is looked up at each cut."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


@dataclass(frozen=True)
class CutTrace:
    """A trace as it stood at a cut: everything that is needed to run or compile it.

    `donations` maps a position in `outputs` to a position in `inputs` whose memory has no reader after the run.
    `left_at` is where the recorder left the traces that it knew: the operator's position and the user's line.
    """

    entries: tuple[Entry, ...]
    geometries: tuple[Geometry, ...]  # by slot number
    inputs: tuple[tuple[Slot, Geometry], ...]
    scalar_kinds: tuple[type, ...]
    outputs: tuple[tuple[Slot, Geometry], ...]
    donations: tuple[tuple[int, int], ...]
    frames: tuple[str, ...] = ()
    left_at: tuple[int, str] | None = field(default=None, compare=False)
    half: Half | None = None  # of two traces joined (plan/join_traces.py): which one's program this is
    # Of a captured call, each write to a storage among the outputs: how many entries were recorded before it, the
    # output's position, and the slot of the value. After a failure they give the state that eager would have left.
    writes: tuple[tuple[int, int, Slot], ...] = field(default=(), compare=False)

    @cached_property
    def needed(self) -> frozenset[int]:
        """Positions of the entries that some output depends on."""
        wanted = {number.number for number, _ in self.outputs}
        needed: set[int] = set()
        for position in range(len(self.entries) - 1, -1, -1):
            entry = self.entries[position]
            outputs = entry.outputs
            if type(outputs) is Slot:
                if outputs.number not in wanted:
                    continue
            elif not any(found.number in wanted for found in slots_in(outputs)):
                continue
            needed.add(position)
            for found in operands(entry):
                wanted.add(found.number)
        return frozenset(needed)

    @cached_property
    def device(self) -> str:
        """See `compute_device`."""
        return _device_of(self)

    @cached_property
    def has_backward(self) -> bool:
        """Whether it contains an operator of a backward."""
        return any("backward" in op.name() for op in {entry.op for entry in self.entries})

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of all outputs, donated ones included."""
        return sum(base.nbytes for _, base in self.outputs)

    def share_signature(self, known: Signature) -> None:
        """Use the equal signature `known` as this trace's: later comparisons are by identity."""
        self._last_signature[1] = known

    def signature(self) -> Signature:
        """The structure: what two traces must share to run the same program.

        The geometries follow from the rest, except for arguments that are equal but not the same: 1, True and 1+0j.
        """
        default = torch.get_default_dtype()
        if self._last_signature[0] is not default:
            self._last_signature[:] = default, self._signature(default)
        return self._last_signature[1]  # type: ignore[no-any-return]

    @cached_property
    def _last_signature(self) -> list[Any]:
        return [None, None]

    def _signature(self, default: torch.dtype) -> Signature:
        parts = (
            tuple((entry.op, entry.args, entry.kwargs) for entry in self.entries),
            self.geometries,
            self.inputs,
            self.scalar_kinds,
            self.outputs,
            self.donations,
            default,
            self.half,
        )
        return Signature(parts)


def slots_in(value: Any) -> list[Slot]:
    """Every slot inside an argument or output structure, in order."""
    found: list[Slot] = []
    if type(value) is Slot:
        found.append(value)
    elif type(value) is tuple:
        _collect(value, found)
    return found


def operands(entry: Entry) -> list[Slot]:
    """Every slot that an entry reads, in order."""
    found: list[Slot] = []
    _collect(entry.args, found)
    if entry.kwargs:
        _collect(entry.kwargs, found)
    return found


def _collect(items: tuple[Any, ...], found: list[Slot]) -> None:
    for item in items:
        kind = type(item)
        if kind is Slot:
            found.append(item)
        elif kind is tuple:
            _collect(item, found)


def compute_device(trace: CutTrace) -> str:
    """The device that the trace computes on: an accelerator if any value is on one."""
    return trace.device


def _device_of(trace: CutTrace) -> str:
    devices = {geom.compute for _, geom in trace.outputs} | {geom.compute for _, geom in trace.inputs}
    return next((device for device in sorted(devices) if device != "cpu"), "cpu")


def format_trace(trace: CutTrace) -> str:
    """The trace as text: one operator a line, with the metadata of its results and the user's line."""
    lines = [f"{number} = input {geom.meta} strides={geom.strides}" for number, geom in trace.inputs]
    for position, entry in enumerate(trace.entries):
        arguments = [repr(a) for a in entry.args] + [f"{name}={value!r}" for name, value in entry.kwargs]
        metas = ", ".join(str(trace.geometries[s.number].meta) for s in slots_in(entry.outputs))
        frame = trace.frames[position] if position < len(trace.frames) else ""
        lines.append(
            f"{entry.outputs} = {entry.op}({', '.join(arguments)})  : {metas}" + (f"  # {frame}" if frame else "")
        )
    given = {out: position for out, position in trace.donations}
    for position, (number, geom) in enumerate(trace.outputs):
        into = f"  into the memory of input {trace.inputs[given[position]][0]}" if position in given else ""
        lines.append(f"return {number} : {geom.meta} strides={geom.strides}{into}")
    return "\n".join(lines)

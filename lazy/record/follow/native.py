"""Records for native compiled steps: what the C++ function compares each step's call with and makes results from.

A record is a tuple: its form, the operator as the program calls it, the step, the arguments that make the tensor, the
geometry of the result (of a new value: of its storage), the result's slot, the geometry that the first argument must
have where the step depends on its memory, the slots of the written arguments afterwards, the names of named arguments,
the numbers that the call needs; then two items for each argument, what it must be and further facts. The form is bytes,
the first for what the step makes, then one for each argument, the named ones last:

    N a new value      n several of these     T a tensor with this slot
    V a view           v several of these     E a tensor whose memory becomes an input: its slot, its geometry
    W the first        w nothing              t, e the same, over its whole storage, and written to
      argument                                x a view with this slot that is written to: its geometry, that of its
                                                memory, the slot of that
                                              Y, y a view that is read from its memory first, which becomes an input
                                                or has this slot: its geometry, that of its memory, its slot then
    l, m  w and u, to tensors of the first
       argument, whose versions rise
    u  nothing, and no two arguments share    z the same view as the first argument, which is written to
       memory                                 A any tensor   G one of this geometry   H one of it, whose value is known
    =  a twin of the first argument           S a varying number: its place among the trace's, and the operator's plan
                                              I this very object   N this whole number or name   F this float
                                              L this list of whole numbers   D this device, then the one behind it
                                              [ the items of a list follow   ] the end of the list
                                              | named arguments follow

Where there are several results, the arguments that make them, their geometries and their slots are tuples. A view that
is written to has two slots: its own, and that of its memory.

Invariant: a native step by a record (runtime/native/compiled_step.py) records exactly what `Follower.follow` would, or
nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.record.follow.native_copies import is_same, prototype_of, tensor_copies
from torchlazy.lazy.record.follow.path import (
    NEW,
    NEW_MANY,
    VIEW,
    VIEW_MANY,
    WRITE,
    WRITE_LIST,
    PathStart,
    PathStep,
    Unread,
)
from torchlazy.lazy.record.tensor import (
    LAZY,
    LazyTensor,
    is_inference_mode,
    make_tensor,
    making,
    unknown,
    writes_with_grad,
)
from torchlazy.lazy.torch_private.dispatch import version_incrementer
from torchlazy.lazy.trace.geometry import Geometry, base_of, geometry
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import Float, ScalarSlot, Slot, slots_in
from torchlazy.runtime.native.compiled_step import OBJECTS, PLACES, is_coming, native_walk
from torchlazy.runtime.native.tensor_copies import TensorCopies

if TYPE_CHECKING:
    from torchlazy.lazy.record.follow.follower import Follower

_COUNTED = {b"w": b"l", b"u": b"m"}  # torch does not count writes to tensors in lists
_MAKES = {NEW: b"N", NEW_MANY: b"n", VIEW: b"V", VIEW_MANY: b"v", WRITE: b"W", WRITE_LIST: b"w"}
_FORMS = {"tensor": b"T", "is": b"I", "number": b"N", "float": b"F", "list": b"L"}
_WORD = 8
_NAMED = object()  # stands before named arguments
_BY_IDENTITY = (torch.dtype, torch.layout, torch.memory_format, bool, type(None))


class NativeSteps:
    """The native step function of one recorder. `walk` and `detach` are what torch calls; `is_coming`: they are still
    being compiled."""

    def __init__(self, rec: Follower, general_detach: Callable[..., Any]) -> None:
        self.walk: Callable[..., Any] | None = None
        self.copies: TensorCopies | None = None
        self.detach = self.general_detach = general_detach
        places = _places()
        self.is_coming = places is not None and is_coming()
        if places is None or self.is_coming:
            return
        known: dict[str, Any] = {
            "none": None, "yes": True, "no": False, "zero": 0, "one": 1, "tuple_type": tuple, "list_type": list,
            "dict_type": dict, "int_type": int, "float_type": float, "tensor_type": LazyTensor,
            "storage_type": LazyStorage, "is_scalar": rec.is_scalar,
            "general": rec.general, "general_detach": general_detach, "state": rec.__dict__, "made": rec.made,
            "make_tensor": make_tensor, "unknown": unknown(), "is_grad_enabled": torch.is_grad_enabled,
            "is_inference": is_inference_mode, "writes_with_grad": writes_with_grad,
            "tensor_is_inference": torch.Tensor.is_inference, "make_otherwise": _make_otherwise,
            "enter_numbers": rec.enter_numbers, "general_drawn": rec.general_drawn,
            "raise_versions": version_incrementer(),
            "add_prototype": self.add_prototype,
        }  # fmt: skip
        names = {"trace_epoch": "epoch", "storage": "_storage_", "geometry": "_geometry", "slot": "_slot"}
        names |= {"epoch": "_epoch", "seen": "_seen"}
        # The very names that Python has for attributes, so that they are found by identity.
        own = {name: name for name in (*rec.__dict__, *unknown(), "real", "poison")}
        objects = [known[name] if name in known else own[names.get(name, name)] for name in OBJECTS]
        copies = tensor_copies()
        found = native_walk(objects, [places[name] for name in PLACES], copies)
        if found is not None and found.copy is not None:
            assert copies is not None
            if all(is_same(found.copy, geom, copies) for geom in _samples()):
                self.copies = copies
            else:
                found = native_walk(objects, [places[name] for name in PLACES], None)
        if found is not None:
            self.walk, self.detach = found.walk, found.detach

    def record_of(
        self, before: PathStep | PathStart, step: PathStep, geometries: Sequence[Geometry]
    ) -> tuple[Any, ...] | None:
        """`record_of`; the step's results can then be made by copying."""
        record = record_of(before, step, geometries)
        if record is not None:
            for geom in record[4] if type(record[4]) is tuple else (record[4],):
                if type(geom) is Geometry:
                    self.add_prototype(geom)
        return record

    def add_prototype(self, geom: Geometry) -> None:
        """From now on tensors of this geometry are made by copying."""
        if self.copies is not None and not geom.prototype and not geom.bits:
            geom.prototype = prototype_of(geom, self.copies).for_native()


def _samples() -> list[Geometry]:
    """Geometries of all kinds."""
    facts = [((), ()), ((2, 3), (3, 1)), ((3, 2), (1, 3)), ((0, 4), (4, 1)), ((2,) * 7, (0,) * 7)]
    return [
        geometry(shape, strides, offset, dtype, LAZY, "cpu")
        for shape, strides in facts
        for offset, dtype in ((0, torch.float32), (5, torch.int64))
    ]


def _places() -> dict[str, int] | None:
    """The offsets, in bytes, of the `__slots__` that native code reads; None where they are not found."""
    marker = object()
    if ctypes.c_int64.from_address(id(marker) + _WORD).value != id(object):
        return None  # an object's class is not at the usual offset
    place, geometry, storage = PathStart(None), Geometry(), LazyStorage()
    wanted: dict[str, tuple[Any, str]] = {name: (place, name) for name in ("record", "idle")}
    wanted |= {name: (storage, name) for name in ("base", "dirty", "version")}
    wanted |= {"storage_epoch": (storage, "epoch"), "storage_slot": (storage, "slot")}
    wanted |= {name: (geometry, name) for name in ("making", "compute", "prototype")}
    found: dict[str, int] = {}
    for name, (owner, attribute) in wanted.items():
        count = type(owner).__basicsize__ // _WORD
        setattr(owner, attribute, marker)
        words = list((ctypes.c_int64 * count).from_address(id(owner)))
        setattr(owner, attribute, None)
        if words.count(id(marker)) != 1:
            return None
        found[name] = _WORD * words.index(id(marker))
    return found


def record_of(before: PathStep | PathStart, step: PathStep, geometries: Sequence[Geometry]) -> tuple[Any, ...] | None:
    """The record of the compiled step from `before` to `step`; None where the general way must be taken.

    `geometries` are those of the path's values.
    """
    described: list[tuple[bytes, Any, Any]] = []
    for argument in (*step.args, *([_NAMED] if step.named else ()), *(value for _, value in step.named)):
        if not _describe(argument, step, before.end, geometries, described):
            return None
    if step.reads and not _describe_reads(step, described):
        return None
    inputs = [want.number for form, want, _ in described if form in (b"E", b"Y")]
    if step.reads:
        values = [slot.number for entry in step.entries for slot in slots_in(entry.outputs)]
        if sorted(inputs) != inputs or sorted(inputs + values) != list(range(before.end, step.end)):
            return None
    elif inputs != list(range(before.end, step.number)):
        return None  # other values in between, or one input for two arguments, are left to the general way
    if all(form not in b"TEDG" for form, _, _ in described):
        return None
    if any(made.device != LAZY for made in step.flat):
        return None
    if step.kind in (VIEW, VIEW_MANY, WRITE) and (not described or described[0][0] not in b"TE"):
        return None
    made: tuple[Any, ...] = (step.making, step.base if step.kind == NEW else step.results, step.outputs)
    if step.kind in (NEW_MANY, VIEW_MANY, WRITE_LIST):
        if type(step.outputs) is not tuple or any(type(o) is not Slot and o is not None for o in step.outputs):
            return None
        results = [base_of(g) if step.kind == NEW_MANY and type(g) is Geometry else g for g in step.results]
        makings = [(g.making or making(g)) if type(g) is Geometry else None for g in results]
        made = (tuple(makings), tuple(results), step.outputs)
    written = _written(step, described, geometries)
    if written is None:
        return None
    for write in step.writes:
        for position in write.alike:  # same as the first argument: no list may be among the arguments
            if write.position or described[position][0] != b"T" or any(form == b"[" for form, _, _ in described):
                return None
            described[position] = b"z", *described[position][1:]
    for place, _, window in written:
        form, want, extra = described[place]
        described[place] = (form.lower(), want, extra) if window is None else (b"x", want, window)
    makes = b"u" if step.is_whole and step.kind == WRITE_LIST else _MAKES[step.kind]
    if step.plan.is_list_write:
        if makes not in _COUNTED:
            return None
        makes = _COUNTED[makes]
    form = makes + b"".join(kind for kind, _, _ in described)
    flat = [item for _, want, extra in described for item in (want, extra)]
    slots = tuple([slot for _, slot, _ in written]) or None
    names = tuple([name for name, _ in step.named]) or None
    return (form, step.op, step, *made, step.source, slots, names, step.numbers or None, *flat)


def idle_record_of(op: Any, args: Sequence[Any], geometry: Geometry) -> tuple[Any, ...] | None:
    """The record of a call that returns its first argument, of this geometry, and records nothing; None: no record.

    `args` are the arguments in the form of entries.
    """
    described: list[tuple[bytes, Any, Any]] = [(b"H", None, geometry)]
    for argument in args[1:]:
        kind = kind_of(argument)
        if not kind or kind == "tensor":
            return None
        described.append((_FORMS[kind], constant_of(argument, kind), None))
    form = b"=" + b"".join(kind for kind, _, _ in described)
    flat = [item for _, want, extra in described for item in (want, extra)]
    return (form, op, *[None] * 8, *flat)


def _describe(
    argument: Any, step: PathStep, end: int, geometries: Sequence[Geometry], described: list[tuple[bytes, Any, Any]]
) -> bool:
    """Add what an argument must be to the record; False where that cannot be described."""
    kind = kind_of(argument)
    if kind == "tensor" and argument.number >= end:
        described.append((b"E", argument, geometries[argument.number]))
        return geometries[argument.number].device == LAZY
    if kind:
        described.append((_FORMS[kind], constant_of(argument, kind), None))
        return True
    if argument is _NAMED:
        described.append((b"|", None, None))
        return True
    if type(argument) is ScalarSlot:
        described.append((b"S", argument, step.plan))
        return argument.kind is float
    if type(argument) is Unread:
        described.append((b"A" if argument.geometry is None else b"G", None, argument.geometry))
        return True
    if type(argument) is torch.device:
        described.append((b"D", argument, step.compute))
        return argument == LAZY and step.compute is not None
    if type(argument) is not tuple or any(type(item) is tuple for item in argument):
        return False
    described.append((b"[", None, None))
    fine = all(_describe(item, step, end, geometries, described) for item in argument)
    described.append((b"]", None, None))
    return fine


def _written(
    step: PathStep, described: Sequence[tuple[bytes, Any, Any]], geometries: Sequence[Geometry]
) -> list[tuple[int, Any, Any]] | None:
    """The written tensors: their places in the record, their slots afterwards, and what views must be; None: not
    known."""
    if step.is_whole:
        return _written_whole(step, described, geometries)
    if step.kind == WRITE:
        places, slots, results = [0], [step.outputs], [step.results]
    elif step.kind == WRITE_LIST:  # a list comes first
        length = len(step.outputs)
        if described[0][0] != b"[" or len(described) <= length + 1 or described[length + 1][0] != b"]":
            return None
        places, slots, results = list(range(1, length + 1)), list(step.outputs), list(step.results)
    else:
        return []
    if any(described[place][0] not in (b"T", b"E") for place in places):
        return None
    if any(geometries[described[place][1].number] is not geom for place, geom in zip(places, results, strict=True)):
        return None
    return [(place, value, None) for place, value in zip(places, slots, strict=True)]


def _written_whole(
    step: PathStep, described: Sequence[tuple[bytes, Any, Any]], geometries: Sequence[Geometry]
) -> list[tuple[int, Any, Any]] | None:
    """The same for the step of a composite call."""
    place_of = _places_of(described)
    found: list[tuple[int, Any, Any]] = []
    for write in step.writes:
        place = place_of[write.position, write.item]
        form, want, _ = described[place]
        if write.window is not None and form == b"T":
            found.append((place, (write.value, write.whole), (write.window, write.base, write.before)))
            continue
        if write.window is not None or form not in (b"T", b"E"):
            return None
        if geometries[want.number] is not geometries[write.value.number]:
            return None
        found.append((place, write.value, None))
    return found


def _describe_reads(step: PathStep, described: list[tuple[bytes, Any, Any]]) -> bool:
    """Describe views that are read first, instead of by their slots, which they get only then; False: impossible."""
    place_of = _places_of(described)
    for read in step.reads:
        place = place_of[read.position, read.item]
        if read.window.device != LAZY or described[place][1] is not read.value:
            return False
        described[place] = (b"Y" if read.enters else b"y", read.whole, (read.window, read.base, read.value))
    return True


def _places_of(described: Sequence[tuple[bytes, Any, Any]]) -> dict[tuple[int, int], int]:
    """An argument's place in the record, by its position and, in a list, its index there (else -1)."""
    place_of: dict[tuple[int, int], int] = {}
    position, item = -1, -1
    for place, (form, _, _) in enumerate(described):
        if form == b"]":
            item = -1
        elif item >= 0:
            place_of[position, item] = place
            item += 1
        else:
            position += 1
            place_of[position, -1] = place
            item = 0 if form == b"[" else -1
    return place_of


def _make_otherwise(made: tuple[Any, ...]) -> torch.Tensor:
    """Under inference_mode an ordinary tensor; else an inference tensor."""
    with torch.inference_mode(not is_inference_mode()):
        tensor: torch.Tensor = make_tensor(*made)
        return tensor


def kind_of(argument: Any) -> str:
    """The kind of check that compares an argument with an entry's; "" where compiled steps have none."""
    if type(argument) is Slot:
        return "tensor"
    if isinstance(argument, _BY_IDENTITY):
        return "is"
    if type(argument) in (int, str):
        return "number"
    if type(argument) is Float:
        return "float"
    if type(argument) is tuple and all(type(item) is int for item in argument):
        return "list"
    return ""


def constant_of(argument: Any, kind: str) -> Any:
    """What the program passes where the entry has `argument`: a number for a Float, a list for a tuple."""
    return list(argument) if kind == "list" else argument.value if type(argument) is Float else argument

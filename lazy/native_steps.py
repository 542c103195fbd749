"""What the native walk is told of a recorder, and of each step of a path: tuples that it compares with and makes from.

A record is a tuple: its form, the operator as the program calls it, the step, with what the tensor is made, the
geometry of the result (of a new value: of its storage), the result's slot, the geometry that the first argument must
have where the step is about its memory; then two items for each argument, what it must be and what else is known of it.
The form is bytes, the first for what the step makes, then one for each argument:

    N a new value      T a tensor that holds this slot
    V a view           E a tensor whose memory becomes an input of the trace: the slot that it gets, its geometry
    W a write          I this very object   N this number or name   L this list of whole numbers

Invariant: a walk by a record (runtime/native_walk.py) records exactly what `Follower.follow` would, or nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.follow import NEW, VIEW, WRITE, Standing, Step
from torchlazy.lazy.geometry import Geometry
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.tensor import LAZY, LazyTensor, is_inference_mode, make_tensor, unknown, writes_with_grad
from torchlazy.lazy.trace import Float, Slot
from torchlazy.runtime.native_walk import OBJECTS, PLACES, functions_for

if TYPE_CHECKING:
    from torchlazy.lazy.follower import Follower

_MAKES = {NEW: b"N", VIEW: b"V", WRITE: b"W"}
_FORMS = {"tensor": b"T", "is": b"I", "number": b"N", "list": b"L"}
_MOST_ARGUMENTS = 16
_WORD = 8


class NativeSteps:
    """The native walk of one recorder. `walk` and `detach` are what torch calls."""

    def __init__(self, rec: Follower, general_detach: Callable[..., Any]) -> None:
        self.walk: Callable[..., Any] | None = None
        self.detach = self.general_detach = general_detach
        places = _places()
        if places is None:
            return
        known: dict[str, Any] = {
            "none": None, "yes": True, "no": False, "zero": 0, "one": 1, "tuple_type": tuple, "list_type": list,
            "dict_type": dict, "int_type": int, "tensor_type": LazyTensor, "storage_type": LazyStorage,
            "general": rec.general, "general_detach": general_detach, "state": rec.__dict__, "made": rec.made,
            "make_tensor": make_tensor, "unknown": unknown(), "is_grad_enabled": torch.is_grad_enabled,
            "is_inference": is_inference_mode, "writes_with_grad": writes_with_grad,
        }  # fmt: skip
        names = {"trace_epoch": "epoch", "storage": "_storage_", "geometry": "_geometry", "slot": "_slot"}
        names |= {"epoch": "_epoch", "seen": "_seen"}
        # The very names that Python has for attributes, so that they are found by identity.
        own = {name: name for name in (*rec.__dict__, *unknown(), "real", "poison")}
        objects = [known[name] if name in known else own[names.get(name, name)] for name in OBJECTS]
        found = functions_for(objects, [places[name] for name in PLACES])
        if found is not None:
            self.walk, self.detach = found


def _places() -> dict[str, int] | None:
    """Where objects have the slots that are read natively, in bytes; None where they are not found."""
    marker = object()
    if ctypes.c_int64.from_address(id(marker) + _WORD).value != id(object):
        return None  # an object does not name its class at the usual place
    place, geometry, storage = Standing(None), Geometry(), LazyStorage()
    wanted: dict[str, tuple[Any, str]] = {"record": (place, "record")}
    wanted |= {name: (storage, name) for name in ("base", "dirty", "version")}
    wanted |= {"storage_epoch": (storage, "epoch"), "storage_slot": (storage, "slot")}
    wanted |= {name: (geometry, name) for name in ("making", "compute")}
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


def record_of(
    before: Step | Standing, step: Step, kinds: Sequence[str], geometries: Sequence[Geometry]
) -> tuple[Any, ...] | None:
    """The record of the walk from `before` to `step`, whose arguments are of these kinds; None where there is none.

    `geometries` are those of the path's values.
    """
    if len(kinds) > _MOST_ARGUMENTS:
        return None
    form = _MAKES[step.kind]
    told: list[Any] = []
    inputs: list[Slot] = []
    for position, (argument, kind) in enumerate(zip(step.args, kinds, strict=True)):
        if kind == "tensor" and argument.number >= before.end:
            if argument in inputs or (step.kind == WRITE and position == 0):
                return None
            geometry = geometries[argument.number]
            if geometry.device != LAZY:
                return None
            inputs.append(argument)
            form += b"E"
            told += (argument, geometry)
            continue
        form += _FORMS[kind]
        told += (constant_of(argument, kind), None)
    if [value.number for value in inputs] != list(range(before.end, step.number)):
        return None  # what else came in between is for the general way to say
    result = step.base if step.kind == NEW else step.results
    return (form, step.op, step, step.making, result, step.outputs, step.source, *told)


def constant_of(argument: Any, kind: str) -> Any:
    """What the program gives where the entry has `argument`: a number for a Float, a list for a tuple."""
    return list(argument) if kind == "list" else argument.value if type(argument) is Float else argument

"""Serialized traces: canonical text, which names a trace across processes, and JSON, which hands it to another process.

Invariant: traces with equal canonical texts run the same program, whatever processes recorded them.
`from_json(to_json(trace))` equals `trace`, with the same interned slots and geometries; reading calls nothing that the
text names.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

import torch
from torchlazy.lazy.trace.geometry import Geometry, geometry
from torchlazy.lazy.trace.trace import Complex, CutTrace, Entry, Float, Half, ScalarSlot, Slot, scalar_slot, slot
from torchlazy.runtime.collector import paused_collector
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.program.steps import resolve_overload

_KINDS: dict[str, type] = {"float": float, "int": int, "bool": bool, "complex": complex}
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def canonical_text(trace: CutTrace) -> str:
    """The structure of the trace, without the user's lines; about 2 ms for 700 operators."""
    numbers, texts = _numbered_geometries(trace)
    entries = [(str(entry.op), entry.args, entry.kwargs, entry.outputs) for entry in trace.entries]
    return "\n".join(
        (
            repr(entries),
            repr(texts),
            repr([numbers[geom] for geom in trace.geometries]),
            repr([(number, numbers[geom]) for number, geom in trace.inputs]),
            repr([kind.__name__ for kind in trace.scalar_kinds]),
            repr([(number, numbers[geom]) for number, geom in trace.outputs]),
            repr(trace.donations),
            *(() if trace.half is None else (repr(trace.half),)),
        )
    )


def _numbered_geometries(trace: CutTrace) -> tuple[dict[Geometry, int], list[tuple[Any, ...]]]:
    """Each geometry's number in the order of first use, and the facts of each."""
    numbers: dict[Geometry, int] = {}
    for geom in trace.geometries:
        numbers.setdefault(geom, len(numbers))
    for _, geom in (*trace.inputs, *trace.outputs):
        numbers.setdefault(geom, len(numbers))
    return numbers, [
        (geom.shape, geom.strides, geom.offset, _name(geom.dtype), str(geom.device), geom.compute) for geom in numbers
    ]


@paused_collector()  # a collection in the midst of so many small objects costs more than the text
def to_json(trace: CutTrace) -> str:
    """The trace as JSON; ProgramError for a constant that has no form there."""
    numbers, texts = _numbered_geometries(trace)
    return json.dumps(
        {
            "entries": [
                [
                    str(entry.op),
                    _encode(entry.args),
                    [[name, _encode(value)] for name, value in entry.kwargs],
                    _encode(entry.outputs),
                ]
                for entry in trace.entries
            ],
            "geometries": texts,
            "slots": [numbers[geom] for geom in trace.geometries],
            "inputs": [[number.number, numbers[geom]] for number, geom in trace.inputs],
            "scalars": [kind.__name__ for kind in trace.scalar_kinds],
            "outputs": [[number.number, numbers[geom]] for number, geom in trace.outputs],
            "donations": trace.donations,
            "frames": trace.frames,
            "half": None if trace.half is None else astuple(trace.half),
        }
    )


def from_json(text: str) -> CutTrace:
    """The trace that `to_json` wrote; ProgramError if an operator does not exist in this process."""
    data = json.loads(text)
    kinds = tuple(_KINDS[name] for name in data["scalars"])
    geometries = [
        geometry(tuple(shape), tuple(strides), offset, getattr(torch, dtype), torch.device(device), compute)
        for shape, strides, offset, dtype, device, compute in data["geometries"]
    ]
    entries = tuple(
        Entry(
            resolve_overload(op),
            _decode(args, kinds),
            tuple((name, _decode(value, kinds)) for name, value in kwargs),
            _decode(outputs, kinds),
        )
        for op, args, kwargs, outputs in data["entries"]
    )
    return CutTrace(
        entries=entries,
        geometries=tuple(geometries[number] for number in data["slots"]),
        inputs=tuple((slot(number), geometries[geom]) for number, geom in data["inputs"]),
        scalar_kinds=kinds,
        outputs=tuple((slot(number), geometries[geom]) for number, geom in data["outputs"]),
        donations=tuple((output, given) for output, given in data["donations"]),
        frames=tuple(data["frames"]),
        half=None if data["half"] is None else Half(*data["half"]),
    )


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind is Slot:
        return {"v": value.number}
    if kind is tuple:
        return [_encode(item) for item in value]
    if value is None or kind is int or kind is bool or kind is str:
        return value
    if kind is ScalarSlot:
        return {"s": value.number}
    if kind is Float:
        return {"f": value.bits}
    if kind is Complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    if kind is torch.device:
        return {"d": str(value)}
    if isinstance(value, _TORCH_CONSTANTS):
        return {"t": _name(value)}
    raise ProgramError(f"trace to JSON: no form for the constant {value!r} of {kind.__name__}; add it to serialize.py")


def _decode(value: Any, kinds: tuple[type, ...]) -> Any:
    if type(value) is list:
        return tuple([_decode(item, kinds) for item in value])
    if type(value) is not dict:
        return value
    ((tag, content),) = value.items()
    if tag == "v":
        return slot(content)
    if tag == "s":
        return scalar_slot(content, kinds[content])
    if tag == "f":
        return Float(float.fromhex(content))
    if tag == "c":
        return Complex(*map(float.fromhex, content))
    if tag == "d":
        return torch.device(content)
    constant = getattr(torch, content) if tag == "t" else None
    if not isinstance(constant, _TORCH_CONSTANTS):
        raise ProgramError(f"trace from JSON: {value!r} is no constant of a trace; send the trace anew")
    return constant


def _name(constant: Any) -> str:
    return str(constant).removeprefix("torch.")

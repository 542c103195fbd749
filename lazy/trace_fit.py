"""Whether the geometries in a trace that nobody recorded are what its operators give.

The trace of a call at other sizes is made from recorded ones by expressions. Here every operator's result is inferred
from its operands and constants, as the recorder would have done.

Invariant: a trace fits only if each result whose geometry inference tells for the recorded trace is told for this one.
"""

from __future__ import annotations

from typing import Any

import torch
from torchlazy.lazy.geometry import Geometry, base_of
from torchlazy.lazy.infer import CannotInfer, infer
from torchlazy.lazy.trace import Complex, CutTrace, Entry, Float, ScalarSlot, Slot, slots_in

_COPY = torch.ops.aten.copy.default
_MOST_REMEMBERED = 65536
_remembered: dict[Any, Any] = {}  # what was inferred, in all traces


class TraceFit:
    """Made from a recorded trace; says of others of its skeleton whether they fit."""

    def __init__(self, trace: CutTrace) -> None:
        told = [_lies_as_target(trace, entry) or self.results(trace, entry) for entry in trace.entries]
        self._told = [
            found is not None and found == _geometries(trace, entry.outputs)
            for found, entry in zip(told, trace.entries, strict=True)
        ]
        self._recorded = trace

    def misfit(self, trace: CutTrace) -> str:
        """The first operator whose result is otherwise, or cannot be told and has another geometry than the recorded
        one; empty where all fit."""
        for position, (entry, is_told) in enumerate(zip(trace.entries, self._told, strict=True)):
            wanted = _geometries(trace, entry.outputs)
            if is_told:
                if _lies_as_target(trace, entry) != wanted and self.results(trace, entry) != wanted:
                    return f"{entry.op} gives another size{_at(trace, position)}"
            elif wanted != _geometries(self._recorded, self._recorded.entries[position].outputs):
                return f"the size of what {entry.op} gives cannot be told{_at(trace, position)}"
        return ""

    def results(self, trace: CutTrace, entry: Entry) -> Any:
        """The geometries that inference gives the entry's results; None where it cannot."""
        first = next(iter(slots_in(entry.outputs)), None)
        if first is None:
            return None
        own = trace.geometries[first.number]
        args = tuple([_argument(trace, value) for value in entry.args])
        kwargs = tuple([(name, _argument(trace, value)) for name, value in entry.kwargs])
        return result_of(entry.op, args, kwargs, own.device, own.compute)


def _lies_as_target(trace: CutTrace, entry: Entry) -> Geometry | None:
    """What is written to a window: the recorder gives it the window's own geometry, with or without its place among the
    memory."""
    if entry.op is not _COPY or type(entry.args[0]) is not Slot or type(entry.outputs) is not Slot:
        return None
    target, source = trace.geometries[entry.args[0].number], trace.geometries[entry.args[1].number]
    made = trace.geometries[entry.outputs.number]
    fits = len(source.shape) <= len(target.shape) and all(
        size in (1, own) for size, own in zip(reversed(source.shape), reversed(target.shape), strict=False)
    )
    return made if fits and made in (target, base_of(target)) else None


def result_of(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    device: torch.device,
    compute: str,
) -> Any:
    """The geometries that inference gives the operator's results on this device; None where it cannot tell. `args` and
    `kwargs` hold Geometries and constants, in tuples."""
    key = (op, args, kwargs, device, compute, _signs(args), _signs(kwargs))
    if key in _remembered:
        return _remembered[key]
    try:
        found, _ = infer(op, tuple(map(_listed, args)), {n: _listed(value) for n, value in kwargs}, device, compute)
    except CannotInfer:
        found = None
    if len(_remembered) >= _MOST_REMEMBERED:
        _remembered.clear()
    _remembered[key] = found
    return found


def _at(trace: CutTrace, position: int) -> str:
    frame = trace.frames[position] if position < len(trace.frames) else ""
    return f" at {frame}" if frame else ""


def _geometries(trace: CutTrace, outputs: Any) -> Any:
    if type(outputs) is Slot:
        return trace.geometries[outputs.number]
    return tuple([_geometries(trace, item) for item in outputs]) if type(outputs) is tuple else outputs


def _argument(trace: CutTrace, value: Any) -> Any:
    kind = type(value)
    if kind is Slot:
        return trace.geometries[value.number]
    if kind is ScalarSlot:
        return value.kind(1)
    if kind is Float:
        return value.value
    if kind is Complex:
        return complex(value)
    return tuple([_argument(trace, item) for item in value]) if kind is tuple else value


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if type(value) is tuple else value


def _signs(values: Any) -> Any:
    """Types of constants: 1, True and 1.0 are equal, and promote otherwise."""
    if type(values) is tuple:
        return tuple(map(_signs, values))
    return None if type(values) is Geometry else type(values)

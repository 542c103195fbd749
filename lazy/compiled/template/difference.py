"""How a call that ran differs from a template, in words.

Invariant: templates are compared by what they do; two without a difference here do the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.numbers.expr import evaluator, hold, places_in
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.trace import CutTrace, operands

_WINDOW = torch.ops.aten.as_strided.default
_COMPARED_BY_FIELDS = (
    t.TensorOperand, t.ToLazy, t.ToHost, t.HostItem, t.LazyItem, t.Seed, t.KeepState, t.Rewind,
    t.TensorResult, t.HostResult, t.JointResult, t.NumberResult,
)  # fmt: skip
_BY_VALUE = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)  # fmt: skip


class CapturedCall(Protocol):
    """A call that ran: its template, or why it has none; its branches on numbers, and the values of its sources."""

    @property
    def template(self) -> t.CallTemplate | None: ...
    @property
    def refused(self) -> str: ...
    @property
    def checks(self) -> tuple[Any, ...]: ...
    @property
    def values(self) -> Mapping[int, Any]: ...


def difference(template: t.CallTemplate, captured: CapturedCall) -> str:
    """How the captured call differs from the template, in words; empty where it does not."""
    fresh = captured.template
    if took_other_branch(template, captured):
        return ""
    if fresh is None:
        return captured.refused
    if _sees_otherwise(template, fresh):
        return ""
    if len(template.steps) != len(fresh.steps):
        return f"{len(template.steps)} steps then, {len(fresh.steps)} now"
    for old, new in zip(template.steps, fresh.steps, strict=True):
        told = step_difference(old, new)
        if told:
            return told
    if plain(template.checks) != plain(fresh.checks):
        return f"its branches on numbers were {template.checks}, are {fresh.checks}"
    if list(map(plain, template.results)) != list(map(plain, fresh.results)) or template.spec != fresh.spec:
        return "it returns something else"
    if [(e.name, plain(e.results)) for e in template.effects] != [(e.name, plain(e.results)) for e in fresh.effects]:
        return "it leaves other state behind"
    return ""


def _sees_otherwise(template: t.CallTemplate, fresh: t.CallTemplate) -> bool:
    """Whether memory of an ordinary tensor is seen through another tensor than then (a view of which the argument is,
    or itself): operators then differ that do the same, and nothing can be told."""
    then = _forms_of(template)
    return any(then.get(source, form) != form for source, form in _forms_of(fresh).items())


def _forms_of(template: t.CallTemplate) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for step in template.steps:
        for source, (_, geom) in zip(step.inputs, step.trace.inputs, strict=True) if type(step) is t.Segment else ():
            if type(source) in (t.FromArgument, t.FromGradient, t.FromData):
                key = source if type(source) is t.FromArgument else id(source.owner)  # type: ignore[union-attr]
                found[key, type(source)] = geom.dtype, geom.shape, geom.strides
    return found


def serves(template: t.CallTemplate, captured: CapturedCall) -> bool:
    """Whether the template would have done what the captured call did."""
    has_template = captured.template is not None
    return has_template and not took_other_branch(template, captured) and not difference(template, captured)


def took_other_branch(template: t.CallTemplate, captured: CapturedCall) -> bool:
    """Whether a number that the template checks came out otherwise, so that it would not have served this call."""
    for position, ((old, then), (new, now)) in enumerate(zip(template.checks, captured.checks, strict=False)):
        if old != new:
            return any(_fails(check, template, captured) for check in template.checks[position:])
        if then != now:
            return True
    return False


def _fails(check: tuple[Any, Any], template: t.CallTemplate, captured: CapturedCall) -> bool:
    """Whether a check of the template that the call lacks fails for the call's numbers, where both read these alike: a
    dropout branches differently where its p is 0."""
    fresh, places = captured.template, places_in(check[0])
    if fresh is None or fresh.free != template.free or not all(place in captured.values for place in places):
        return False
    read = max((n for n, step in enumerate(template.steps) if not places.isdisjoint(_sources_of(step))), default=-1) + 1
    if len(fresh.steps) < read or any(map(step_difference, template.steps[:read], fresh.steps[:read])):
        return False
    return not hold(evaluator([check[0]]), captured.values, [check])


def _sources_of(step: t.Step) -> tuple[int, ...]:
    if isinstance(step, t.LazyCall):
        return step.sources
    return (step.source,) if isinstance(step, (t.HostItem, t.LazyItem, t.Seed)) else ()


def step_difference(old: t.Step, new: t.Step) -> str:
    """How the steps differ, in words; empty where they do the same."""
    if type(old) is not type(new):
        return f"a {type(old).__name__} then, a {type(new).__name__} now"
    if isinstance(old, t.Segment) and isinstance(new, t.Segment):
        told = _traces(old.trace, new.trace)
        if told:
            return told
        if plain(old.inputs) != plain(new.inputs):
            return "it reads other tensors"
        if plain(old.targets) != plain(new.targets):
            return "it writes other tensors"
        for position, (then, now) in enumerate(zip(old.scalars, new.scalars, strict=True)):
            if then != now:
                return _scalar(old.trace, position, then, now)
        return ""
    if isinstance(old, t.JointRun) and isinstance(new, t.JointRun):
        told = _traces(old.joint.forward, new.joint.forward)
        if not told and old.joint.backward is not None and new.joint.backward is not None:
            told = _traces(old.joint.backward, new.joint.backward)
        if not told and (plain([m for m, _ in old.inputs]) != plain([m for m, _ in new.inputs])):
            told = "it reads other tensors"
        if not told and old.scalars != new.scalars:
            return f"its numbers were {old.scalars}, are {new.scalars}"
        return told
    if isinstance(old, t.Collective) and isinstance(new, t.Collective):
        same = old.op is new.op and old.facts == new.facts
        same = same and [plain(w.memory) for w in old.windows] == [plain(w.memory) for w in new.windows]
        return "" if same else f"{old.op} of {old.facts} then, {new.op} of {new.facts} now"
    if isinstance(old, t.HostCall) and isinstance(new, t.HostCall):
        same = old.op is new.op and plain(old.args) == plain(new.args) and plain(old.kwargs) == plain(new.kwargs)
        return "" if same else f"{old.op}({plain(old.args)}) then, {new.op}({plain(new.args)}) now, on ordinary tensors"
    if isinstance(old, t.LazyCall) and isinstance(new, t.LazyCall):
        first, second = [
            (call.op, plain(call.args), plain(call.kwargs), call.made, call.geometries, call.sources)
            for call in (old, new)
        ]
        return "" if first == second else f"{first} then, {second} now"
    return "" if plain(old) == plain(new) else f"{old} then, {new} now"


def _with_memory_as_in(old: CutTrace, new: CutTrace) -> CutTrace:
    """The new trace, with inputs that it only reads through views in the geometry that the old trace gives them.

    Memory that an earlier operator made has the geometry of that operator's result, other memory is flat; a view of it
    depends on its own offset and strides alone.
    """
    if len(old.inputs) != len(new.inputs) or len(old.geometries) != len(new.geometries):
        return new
    forms: dict[int, Geometry] = {}
    for (slot, then), (other, now) in zip(old.inputs, new.inputs, strict=True):
        alike = all(getattr(then, name) == getattr(now, name) for name in ("dtype", "device", "compute", "nbytes"))
        if then is not now and slot is other and alike and then.numel == now.numel:
            forms[slot.number] = then
    for entry in new.entries if forms else ():
        for slot in operands(entry):
            if entry.op is not _WINDOW or slot is not entry.args[0]:
                forms.pop(slot.number, None)
    for slot in (*(slot for slot, _ in new.outputs), *(new.inputs[place][0] for _, place in new.donations)):
        forms.pop(slot.number, None)
    if not forms:
        return new
    inputs = tuple((slot, forms.get(slot.number, geometry)) for slot, geometry in new.inputs)
    geometries = tuple(forms.get(number, geometry) for number, geometry in enumerate(new.geometries))
    return replace(new, inputs=inputs, geometries=geometries)


def _traces(old: CutTrace, new: CutTrace) -> str:
    new = _with_memory_as_in(old, new)
    for position, (then, now) in enumerate(zip(old.entries, new.entries, strict=False)):
        if (then.op, then.args, then.kwargs) != (now.op, now.args, now.kwargs):
            return f"operator {position} was {_line(old, position)}, is {_line(new, position)}"
    if len(old.entries) != len(new.entries):
        longer = old if len(old.entries) > len(new.entries) else new
        at = min(len(old.entries), len(new.entries))
        return f"{len(old.entries)} operators then, {len(new.entries)} now; the first extra one is {_line(longer, at)}"
    for position, (before, after) in enumerate(zip(old.geometries, new.geometries, strict=False)):
        if before is not after:
            return f"value {position} was {before}, is {after}"
    return "" if old.signature() == new.signature() else "its program has other inputs or outputs"


def _line(trace: CutTrace, position: int) -> str:
    entry = trace.entries[position]
    arguments = ", ".join([*map(repr, entry.args), *(f"{name}={value!r}" for name, value in entry.kwargs)])
    frame = trace.frames[position] if position < len(trace.frames) else ""
    return f"{entry.op}({arguments})" + (f" at {frame}" if frame else "")


def _scalar(trace: CutTrace, number: int, then: Any, now: Any) -> str:
    for position, entry in enumerate(trace.entries):
        if f"${number}" in repr((entry.args, entry.kwargs)).replace(",", " ").replace(")", " ").split():
            return f"a number in {_line(trace, position)} was {then}, is {now}"
    return f"a number was {then}, is {now}"


def plain(value: Any) -> Any:
    """Values of templates in a form that compares: state and host tensors by identity."""
    if isinstance(value, t.FromState):
        return ("state", id(value.storage))
    if isinstance(value, t.FromData):
        return ("data", id(value.owner))
    if isinstance(value, (t.FromGradient, t.SameGradient)):
        return ("gradient", id(value.owner))
    if isinstance(value, t.HostKept):
        tensor = value.tensor
        return ("constant", tensor.dtype, repr(tensor.tolist())) if value.constant else ("host", id(tensor))
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    if isinstance(value, _COMPARED_BY_FIELDS):
        return (type(value).__name__, *(plain(getattr(value, name)) for name in type(value).__slots__))
    if isinstance(value, t.SameObject):
        kind = type(value.value)
        return ("object", kind, repr(value.value) if kind in _BY_VALUE else id(value.value))
    return value


__all__ = ["CapturedCall", "difference", "plain", "serves", "step_difference", "took_other_branch"]

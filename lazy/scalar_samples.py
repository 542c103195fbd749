"""A trace whose numbers are constants, told as a sample of one in which some of them are inputs.

A compiled callable makes a number an input once it saw another value of it; the trace before that has the same
operators, and says as well as any other how sizes move.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchlazy.lazy.trace import CutTrace, Entry, Float, ScalarSlot


def as_sample_of(before: CutTrace, trace: CutTrace) -> CutTrace | None:
    """`before` with inputs where `trace` has them and it has plain numbers; None where there is no such place, or
    where they differ in more than that and in numbers."""
    if len(before.scalar_kinds) >= len(trace.scalar_kinds) or len(before.entries) != len(trace.entries):
        return None
    entries = []
    for old, new in zip(before.entries, trace.entries, strict=True):
        if old.op is not new.op or len(old.args) != len(new.args) or len(old.kwargs) != len(new.kwargs):
            return None
        args = tuple([_as(a, b) for a, b in zip(old.args, new.args, strict=True)])
        kwargs = tuple([(name, _as(a, b)) for (name, a), (_, b) in zip(old.kwargs, new.kwargs, strict=True)])
        entries.append(Entry(old.op, args, kwargs, old.outputs))
    return replace(before, entries=tuple(entries), scalar_kinds=trace.scalar_kinds)


def _as(old: Any, new: Any) -> Any:
    if type(new) is ScalarSlot:
        return new if type(old) in (Float, int, ScalarSlot) else old
    if type(old) is tuple and type(new) is tuple and len(old) == len(new):
        return tuple([_as(a, b) for a, b in zip(old, new, strict=True)])
    return old

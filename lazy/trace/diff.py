"""Why a trace is new: the first operator at which it differs from the nearest known trace, and how.

Invariant: nothing here runs while operators are recorded, nor at a cut whose trace is known; a new trace is compared
with the few that were seen last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.trace import CutTrace, Entry, Float, ScalarSlot, Slot, slots_in

_COMPARED = 12  # traces kept for comparison, those that were seen last
_NEVER = (-1, -1, -1.0, -1)

REMEDIES = {
    "size": "pad or bucket this size if it takes many values",
    "dtype": "convert the input before the step, or accept one program for each dtype",
    "layout": "call .contiguous() on the input where it is made",
    "device": "keep inputs on one device",
    "operator": "Python took another branch here: torch.where keeps one structure, or accept a program for each branch",
    "constant": "pass the number as a tensor if it changes often",
    "operand": "another value is read here; keep the same tensors, or the order in which they are first used",
    "length": "Python did more or less here than before; accept one program for each length",
    "alive": "another set of tensors was kept at the cut: drop references before it, or keep them each time",
    "memory": "a tensor that is overwritten is still referenced elsewhere (or no longer): keep the references alike",
    "setting": "the default dtype or a number's type changed",
}
_OTHER_RANK = "another number of dimensions"
_ONE_PROGRAM = "nothing, if it takes many values: one program is made for all sizes; the report says where not"


@dataclass(frozen=True)
class Divergence:
    """Where one trace left the nearest known one.

    `cut` and `nearest` are the numbers of the two cuts (None: no trace was known); `op` is the position of the
    operator in the trace, `operator` its name. `what` is a key of `REMEDIES`; `old` and `new` are texts. `frame` is the
    user's line, "" where it was not kept.
    """

    cut: int
    nearest: int | None
    op: int
    operator: str
    frame: str
    what: str
    old: str
    new: str
    detail: str = ""

    @property
    def remedy(self) -> str:
        """What to do about it."""
        if self.what == "operator" and not self.op:
            return "another piece of work begins here: nothing, if it is one of your program's own"
        if self.detail.startswith(_OTHER_RANK):
            return "accept one program for each number of dimensions"
        if self.what == "size" and config.dynamic == "on":
            return _ONE_PROGRAM
        return REMEDIES.get(self.what, "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the remedy and the text."""
        return {**asdict(self), "remedy": self.remedy, "text": str(self)}

    def __str__(self) -> str:
        if self.nearest is None:
            return f"cut {self.cut} is the first of its kind: no trace was known to compare with"
        where = self.frame or "line not kept"
        detail = f" ({self.detail})" if self.detail else ""
        return (
            f"cut {self.cut} left cut {self.nearest} at op {self.op}, {where}, "
            f"{self.what} {self.old} -> {self.new}{detail}" + (f" [{self.operator}]" if self.operator else "")
        )


@dataclass(frozen=True)
class _Difference:
    op: int
    what: str
    old: str
    new: str
    detail: str = ""


class SeenTraces:
    """The traces seen last, each with the number of the cut at which it was seen last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[object, tuple[CutTrace, int]] = OrderedDict()

    def record_seen(self, key: object, trace: CutTrace, cut: int) -> None:
        """Remember that a trace of the structure `key` was seen at this cut."""
        self._seen[key] = trace, cut
        self._seen.move_to_end(key)
        if len(self._seen) > _COMPARED:
            self._seen.popitem(last=False)

    def forget(self) -> None:
        self._seen.clear()

    def divergence(self, trace: CutTrace, cut: int, frame: str) -> Divergence:
        """Where a trace that is new left the nearest of those; `frame` is the line of its cut."""
        nearest: tuple[CutTrace, int] | None = None
        best: tuple[int, int, float, int] = _NEVER
        for known, number in self._seen.values():
            lengths = sorted((len(known.entries), len(trace.entries), 1))
            alike = lengths[-2] / lengths[-1]  # of two that differ at once, the one of about this length
            rank = (_first_difference(known, trace), _same_operators(known, trace), alike, number)
            if rank > best:
                nearest, best = (known, number), rank
        if nearest is None:
            return Divergence(cut, None, 0, "", frame, "", "", "")
        known, number = nearest
        found = _describe(known, trace, best[0])
        operator = str(trace.entries[found.op].op) if found.op < len(trace.entries) else ""
        line = frame
        if found.op < len(trace.entries) and found.what not in ("alive", "memory", "setting"):
            line = _line(trace, found.op)
        return Divergence(cut, number, found.op, operator, line, found.what, found.old, found.new, found.detail)


def _line(trace: CutTrace, op: int) -> str:
    """The user's line of an operator: kept for each on request, else for the one that left the known paths."""
    if op < len(trace.frames):
        return trace.frames[op]
    if trace.left_at is not None and trace.left_at[0] == op:
        return trace.left_at[1]
    return ""


def _first_difference(known: CutTrace, new: CutTrace) -> int:
    """The position of the first operator that differs in itself, its operands' geometry or its results'."""
    limit = min(len(known.entries), len(new.entries))
    entry = next((i for i in range(limit) if not _same(known.entries[i], new.entries[i])), limit)
    if known.geometries[: len(new.geometries)] == new.geometries[: len(known.geometries)]:
        return entry
    pairs = zip(known.geometries, new.geometries, strict=False)
    number = next(i for i, (a, b) in enumerate(pairs) if a is not b)
    for position in range(entry):
        if any(found.number >= number for found in _slots_of(new.entries[position])):
            return position
    return entry


def _same(a: Entry, b: Entry) -> bool:
    return a is b or a == b


def _slots_of(entry: Entry) -> list[Slot]:
    return [*slots_in(entry.args), *slots_in(tuple(v for _, v in entry.kwargs)), *slots_in(entry.outputs)]


def _same_operators(known: CutTrace, new: CutTrace) -> int:
    """How many operators at the beginning are the same, whatever they are called with."""
    limit = min(len(known.entries), len(new.entries))
    return next((i for i in range(limit) if known.entries[i].op is not new.entries[i].op), limit)


def _describe(known: CutTrace, new: CutTrace, op: int) -> _Difference:
    if op >= min(len(known.entries), len(new.entries)):
        return _describe_end(known, new, op)
    a, b = known.entries[op], new.entries[op]
    if a.op is not b.op:
        return _Difference(op, "operator", str(a.op), str(b.op))
    operands = zip(_operands(a), _operands(b), strict=False)
    for position, (one, other) in enumerate(operands):
        found = _geometry_difference(known, new, one, other, op, f"operand {position}")
        if found is not None:
            return found
    found = _constant_difference(a, b, op)
    if found is not None:
        return found
    for one, other in zip(slots_in(a.outputs), slots_in(b.outputs), strict=False):
        found = _geometry_difference(known, new, one, other, op, "result")
        if found is not None:
            return found
    return _Difference(op, "operand", str(a.args), str(b.args))


def _operands(entry: Entry) -> list[Slot]:
    return [*slots_in(entry.args), *slots_in(tuple(v for _, v in entry.kwargs))]


def _geometry_difference(
    known: CutTrace, new: CutTrace, one: Slot, other: Slot, op: int, role: str
) -> _Difference | None:
    a, b = known.geometries[one.number], new.geometries[other.number]
    if a is b:
        return None
    what, old, now, detail = _compare_geometry(a, b)
    return _Difference(op, what, old, now, f"{detail} of {role}" if detail else role)


def _compare_geometry(a: Geometry, b: Geometry) -> tuple[str, str, str, str]:
    """(what, old, new, detail) of two geometries that differ."""
    if a.shape != b.shape:
        if len(a.shape) != len(b.shape):
            return "size", str(a.shape), str(b.shape), _OTHER_RANK
        differing = [d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
        if len(differing) == 1:
            (d,) = differing
            return "size", str(a.shape[d]), str(b.shape[d]), f"dimension {d}"
        return "size", str(a.shape), str(b.shape), ""
    if a.dtype != b.dtype:
        return "dtype", str(a.dtype).removeprefix("torch."), str(b.dtype).removeprefix("torch."), ""
    if (a.device, a.compute) != (b.device, b.compute):
        return "device", f"{a.device} on {a.compute}", f"{b.device} on {b.compute}", ""
    if a.strides != b.strides:
        return "layout", f"strides {a.strides}", f"strides {b.strides}", ""
    return "layout", f"offset {a.offset}", f"offset {b.offset}", ""


def _constant_difference(a: Entry, b: Entry, op: int) -> _Difference | None:
    names = [argument.name for argument in a.op._schema.arguments]
    pairs = [(names[i], *pair) for i, pair in enumerate(zip(a.args, b.args, strict=False))]
    if len(a.args) != len(b.args):
        longer = max(a.args, b.args, key=len)
        name = names[min(len(a.args), len(b.args))]
        given = f"{_text(longer[min(len(a.args), len(b.args))])}"
        old, new = ("its default", given) if longer is b.args else (given, "its default")
        return _Difference(op, "constant", old, new, f"argument {name}")
    left, right = dict(a.kwargs), dict(b.kwargs)
    for name in {**left, **right}:
        if name not in left or name not in right:
            old, new = (_text(kwargs[name]) if name in kwargs else "its default" for kwargs in (left, right))
            return _Difference(op, "constant", old, new, f"argument {name}")
        pairs.append((name, left[name], right[name]))
    for name, old_value, new_value in pairs:
        for one, other in _leaves(old_value, new_value):
            if one is other or (type(one) is type(other) and one == other):
                continue
            what = "operand" if isinstance(one, Slot) or isinstance(other, Slot) else "constant"
            return _Difference(op, what, _text(one), _text(other), f"argument {name}")
    return None


def _leaves(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    if type(one) is tuple and type(other) is tuple and len(one) == len(other):
        for pair in zip(one, other, strict=True):
            yield from _leaves(*pair)
    else:
        yield one, other


def _text(value: Any) -> str:
    if isinstance(value, ScalarSlot):
        return "a number that may vary"
    if isinstance(value, Float):
        return repr(value.value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)


def _describe_end(known: CutTrace, new: CutTrace, op: int) -> _Difference:
    """The operators are the same as far as both go."""
    if len(known.entries) != len(new.entries):
        longer = new if len(new.entries) > len(known.entries) else known
        word = f"continues with {longer.entries[op].op}"
        old, now = ("the cut", word) if longer is new else (word, "the cut")
        return _Difference(op, "length", old, now, f"{len(known.entries)} and {len(new.entries)} operators")
    last = max(len(new.entries) - 1, 0)
    before, after = _alive(known), _alive(new)
    if before != after:
        gained, lost = sorted(set(after) - set(before)), sorted(set(before) - set(after))
        maker, number = (new, gained[0]) if gained else (known, (lost or sorted(before))[0])
        position = _maker(maker, number, last)
        detail = ", ".join(
            f"{word} {', '.join(_shape(trace, n) for n in numbers[:3])}"
            for word, trace, numbers in (("kept now", new, gained), ("not kept now", known, lost))
            if numbers
        )
        return _Difference(
            position, "alive", f"{len(before)} tensors", f"{len(after)} tensors", detail or "in another order"
        )
    if known.donations != new.donations:
        old, now = (f"{len(trace.donations)} values written in place" for trace in (known, new))
        return _Difference(last, "memory", old, now)
    if known.scalar_kinds != new.scalar_kinds:
        pairs = zip(known.scalar_kinds, new.scalar_kinds, strict=False)
        position, (a, b) = next(
            ((i, (m, n)) for i, (m, n) in enumerate(pairs) if m is not n), (0, (type(None), type(None)))
        )
        return _Difference(last, "setting", a.__name__, b.__name__, f"number {position}")
    return _Difference(last, "setting", "other settings", "these settings", "default dtype, precision or target")


def _alive(trace: CutTrace) -> list[int]:
    return [number.number for number, _ in trace.outputs]


def _maker(trace: CutTrace, number: int, last: int) -> int:
    """The position of the operator that made a slot."""
    makers = (i for i, entry in enumerate(trace.entries) if any(s.number == number for s in slots_in(entry.outputs)))
    return next(makers, last)


def _shape(trace: CutTrace, number: int) -> str:
    return str(trace.geometries[number].meta)


def summary(divergences: Sequence[Divergence]) -> list[tuple[int, Divergence]]:
    """Divergences at the same line for the same kind of reason once, with how many there were; most frequent first."""
    groups: dict[tuple[Any, ...], list[Divergence]] = {}
    for found in divergences:
        groups.setdefault((found.frame, found.operator, found.what, found.nearest is None), []).append(found)
    return sorted(((len(group), group[-1]) for group in groups.values()), key=lambda pair: -pair[0])

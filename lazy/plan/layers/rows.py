"""Splits operators over lists (`_foreach_*`, `_fused_*`) by what made their rows: an optimizer's update, by layers.

Invariant: the entries compute the same slots; those of one group follow each other, and read no other group's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchlazy.lazy.trace.trace import CutTrace, Entry, slots_in

_BY_POSITION = ("_foreach_addcmul.Tensor", "_foreach_addcdiv.Tensor")
"""Their factors are the elements of one tensor: a row's number matters."""

_LEAST_OPERATORS = 3  # a norm of all gradients is planned as quickly whole


def rows_of(entry: Entry) -> int | None:
    """How many rows an operator over lists has, if each is computed by itself."""
    name = entry.op.name().removeprefix("aten::")
    if not name.startswith(("_foreach_", "_fused_")) or name in _BY_POSITION:
        return None
    lists = [value for value in entry.args if type(value) is tuple and value]
    outputs = entry.outputs if type(entry.outputs) is tuple else ()
    if outputs and all(type(value) is tuple for value in outputs):
        lists += [value for value in outputs if value]
    else:
        lists.append(outputs)
    counts = set(map(len, lists))
    return counts.pop() if len(counts) == 1 else None


def by_groups(
    trace: CutTrace, positions: Sequence[int], maker: Mapping[int, int], least: int
) -> tuple[CutTrace, list[int], dict[int, int]]:
    """The trace of these entries alone, operators over lists split by their rows' groups; the positions where groups
    begin or end; and by number among `positions` where an entry stands now, if it was not split. `maker`: by slot the
    number of the range that makes it; stretches of fewer than `least` groups stay whole."""
    cut = None if trace.half is None else trace.half.entries
    group_of = dict(maker)
    entries: list[Entry] = []
    frames: list[str] = []
    borders: list[int] = []
    moved: dict[int, int] = {}
    at = early = 0
    while at < len(positions):
        stretch = _stretch(trace, positions, at, cut)
        groups = _groups(stretch, group_of) if stretch else {}
        for group, rows in groups.items():
            for entry in stretch:
                group_of.update((slot.number, group) for slot in slots_in(_taken(entry.outputs, rows)))
        count = max(1, len(stretch))
        own = positions[at : at + count]
        lines = [trace.frames[position] if trace.frames else "" for position in own]
        if len(groups) < least or (len(stretch) < _LEAST_OPERATORS and not any(map(_is_fused, stretch))):
            moved |= {at + number: len(entries) + number for number in range(count)}
            entries += [trace.entries[position] for position in own]
            frames += lines
        else:
            moved[at] = len(entries)
            borders.append(len(entries))
            for rows in groups.values():
                entries += [_of_rows(entry, rows) for entry in stretch]
                frames += lines
                borders.append(len(entries))
        at += count
        early = len(entries) if cut is not None and own[-1] < cut else early
    half = None if trace.half is None else replace(trace.half, entries=early)
    own_frames = tuple(frames) if trace.frames else ()
    return replace(trace, entries=tuple(entries), frames=own_frames, writes=(), half=half), borders, moved


def _is_fused(entry: Entry) -> bool:
    return entry.op.name().startswith("aten::_fused_")


def _stretch(trace: CutTrace, positions: Sequence[int], at: int, cut: int | None) -> list[Entry]:
    """Operators over as many rows from a position on, of which each row reads no other row's results; none across the
    cut of a joined trace."""
    found: list[Entry] = []
    row_of: dict[int, int] = {}
    count = rows_of(trace.entries[positions[at]])
    for position in positions[at:]:
        entry = trace.entries[position]
        if count is None or rows_of(entry) != count or (cut is not None and positions[at] < cut <= position):
            break
        for value in (*entry.args, *(value for _, value in entry.kwargs)):
            is_list = type(value) is tuple and len(value) == count
            rows = enumerate(value) if is_list else ((-1, value),)
            if any(row_of.get(slot.number, row) != row for row, one in rows for slot in slots_in(one)):
                return found
        found.append(entry)
        row_of.update((slot.number, row) for row in range(count) for slot in slots_in(_taken(entry.outputs, (row,))))
    return found


def _groups(stretch: Sequence[Entry], group_of: Mapping[int, int]) -> dict[int, list[int]]:
    """The rows by the last range that anything which they read was made in."""
    count = rows_of(stretch[0]) or 0
    own = {slot.number for entry in stretch for slot in slots_in(entry.outputs)}
    found: dict[int, list[int]] = {}
    for row in range(count):
        read = (slot.number for entry in stretch for value in entry.args for slot in slots_in(_row(value, row, count)))
        found.setdefault(max((group_of.get(n, -1) for n in read if n not in own), default=-1), []).append(row)
    return found


def _row(value: Any, row: int, count: int) -> Any:
    return value[row] if type(value) is tuple and len(value) == count else None


def _of_rows(entry: Entry, rows: Sequence[int]) -> Entry:
    args = tuple(tuple(value[row] for row in rows) if type(value) is tuple and value else value for value in entry.args)
    return Entry(entry.op, args, entry.kwargs, _taken(entry.outputs, rows))


def _taken(outputs: Any, rows: Iterable[int]) -> Any:
    if outputs and type(outputs[0]) is tuple:
        return tuple(tuple(value[row] for row in rows) if value else value for value in outputs)
    return tuple(outputs[row] for row in rows)

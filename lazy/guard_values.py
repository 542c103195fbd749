"""Values that code reads by name, compared with what they were: containers looked at whole, and single places.

Invariant: identity is asked first, in C; only after that fails does Python look at single values, to say which one
changed or to find that it is equal after all. Equal are plain values of one type and one value, down to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torchlazy.lazy.guard_reached import Place

_PLAIN = frozenset({int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.Size, tuple})
_CHUNK = 50  # comparisons in one expression


class WholeContainers:
    """Containers that are looked at whole."""

    def __init__(self, live: Sequence[Iterable[Any]], names: list[str]) -> None:
        self._views = live
        self._names = names
        self._values = list(chain.from_iterable(live))
        self._lengths = [len(tuple(view)) for view in live]

    def __len__(self) -> int:
        return len(self._values)

    def holds(self) -> bool:
        """Whether the same values are there; the containers have been found to have their lengths."""
        return self.holds_very_same() or self._equal()

    def holds_very_same(self) -> bool:
        """Whether the very same objects are there."""
        return all(map(is_, chain.from_iterable(self._views), self._values))

    def _equal(self) -> bool:
        """Other objects may be equal values: they are what is compared from now on."""
        values = list(chain.from_iterable(self._views))
        if not all(map(same_or_equal, values, self._values)):
            return False
        self._values = values
        return True

    def broken(self) -> list[tuple[str, Any, Any]]:
        """Values of containers that have the length they had; which others went or came, their lengths tell."""
        found: list[tuple[str, Any, Any]] = []
        start = 0
        for view, length in zip(self._views, self._lengths, strict=True):
            values, end = tuple(view), start + length
            if len(values) == length:
                rows = zip(self._names[start:end], self._values[start:end], values, strict=True)
                found += [(n, a, b) for n, a, b in rows if a is not b and not is_equal(b, a)]
            start = end
        return found


class SingleValues:
    """Values that are looked at one by one, by a generated function: attributes, cells, globals."""

    def __init__(self, places: Sequence[Place], free: frozenset[str]) -> None:
        self._rows: list[tuple[str, str]] = []  # name, expression
        self._space: dict[str, Any] = {}
        for number, place in enumerate(places):
            self._space[f"o{number}"] = place.of if place.sources else place.read
            sources = place.sources or tuple(f"of()[{i}]" for i in range(len(place.names)))
            for name, source in zip(place.names, sources, strict=True):
                if name not in free:
                    self._rows.append((name, f"o{number}{source.removeprefix('of')}"))
        lines = ["def holds():", "    try:", "        pass"]
        for start in range(0, len(self._rows), _CHUNK):
            rows = range(start, min(start + _CHUNK, len(self._rows)))
            tests = " and ".join(f"{self._rows[i][1]} is v{i}" for i in rows)
            lines.append(f"        if not ({tests}): return False")
        lines += ["    except (LookupError, AttributeError, ValueError, TypeError):", "        return False"]
        lines.append("    return True")
        everything = "".join(f"{source}, " for _, source in self._rows)
        lines += ["def read():", f"    return ({everything})"]
        exec(compile("\n".join(lines), "<torchlazy guards>", "exec"), self._space)
        self._holds: Callable[[], bool] = self._space["holds"]
        self._values = self._read()
        self._space.update((f"v{i}", value) for i, value in enumerate(self._values))

    def __len__(self) -> int:
        return len(self._rows)

    def holds(self) -> bool:
        """Whether the same values are there."""
        return self._holds() or self._equal()

    def holds_very_same(self) -> bool:
        """Whether the very same objects are there."""
        return self._holds()

    def _read(self) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._space["read"]()
        return found

    def _read_what_is_there(self) -> list[Any]:
        values = []
        for _, source in self._rows:
            try:
                values.append(eval(source, self._space))
            except (LookupError, AttributeError, ValueError, TypeError):
                values.append(_GONE)
        return values

    def _equal(self) -> bool:
        try:
            values = self._read()
        except (LookupError, AttributeError, ValueError, TypeError):
            return False
        if not all(map(same_or_equal, values, self._values)):
            return False
        for position, (now, then) in enumerate(zip(values, self._values, strict=True)):
            if now is not then:
                self._space[f"v{position}"] = now
        self._values = values
        return True

    def broken(self) -> list[tuple[str, Any, Any]]:
        rows = zip(self._rows, self._values, self._read_what_is_there(), strict=True)
        return [(name, a, b) for (name, _), a, b in rows if a is not b and not is_equal(b, a)]


class _Gone:
    def __repr__(self) -> str:
        return "nothing (it was deleted)"


_GONE = _Gone()


def is_equal(now: Any, before: Any) -> bool:
    """Whether both are plain values of one type that nothing tells apart."""
    kind = type(before)
    if type(now) is not kind or kind not in _PLAIN:
        return False
    if kind is float:
        return bool(now.hex() == before.hex())
    if kind is complex:
        return repr(now) == repr(before)
    if kind is tuple:
        return len(now) == len(before) and all(map(same_or_equal, now, before))
    return bool(now == before)


def same_or_equal(now: Any, before: Any) -> bool:
    """Whether it is the same object, or an equal plain value."""
    return now is before or is_equal(now, before)

"""Guards of values that code reads by name: containers compared whole, and single places.

Invariant: identity is compared first, in C; only where it differs does Python compare single values, to say which one
changed or to find that it is equal after all. Equal are plain values of one type and one value, down to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torchlazy.lazy.compiled.guards.reached import GONE, GuardedPlace

_PLAIN = frozenset({int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.Size, tuple})
_CHUNK = 50  # comparisons in one expression
_PATIENCE = 12  # comparisons before a function for them is generated


class WholeContainers:
    """Containers that are compared whole."""

    def __init__(self, live: Sequence[Iterable[Any]], names: list[str]) -> None:
        self._views = live
        self._names = names
        self._values = list(chain.from_iterable(live))
        self._lengths = [len(tuple(view)) for view in live]

    def __len__(self) -> int:
        return len(self._values)

    def holds(self) -> bool:
        """Whether the same values are there; the lengths of the containers have been compared before."""
        return self.holds_very_same() or self._equal()

    def holds_very_same(self) -> bool:
        """Whether the very same objects are there."""
        return all(map(is_, chain.from_iterable(self._views), self._values))

    def _equal(self) -> bool:
        """Whether other objects are equal values; then they are compared from now on."""
        values = list(chain.from_iterable(self._views))
        if not all(map(same_or_equal, values, self._values)):
            return False
        self._values = values
        return True

    def broken(self) -> list[tuple[str, Any, Any]]:
        """Changed values of containers of unchanged length; lengths are reported separately."""
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
    """Values that are compared one by one: attributes, cells, globals.

    After `_PATIENCE` comparisons a function is generated for them: ten times as fast, but compiling it takes as long as
    a thousand comparisons.
    """

    def __init__(self, places: Sequence[GuardedPlace], free: frozenset[str]) -> None:
        self._places = [(place, [i for i, name in enumerate(place.names) if name not in free]) for place in places]
        self._names = [place.names[i] for place, positions in self._places for i in positions]
        self._space: dict[str, Any] = {}
        self._generated: Callable[[], bool] | None = None
        self._looks = 0
        self._values = self._read()

    def __len__(self) -> int:
        return len(self._names)

    def holds(self) -> bool:
        """Whether the same values are there."""
        return self.holds_very_same() or self._equal()

    def holds_very_same(self) -> bool:
        """Whether the very same objects are there."""
        if self._generated is not None:
            return self._generated()
        self._looks += 1
        if self._looks > _PATIENCE:
            self._generated = self._generate()
        return all(map(is_, self._read(), self._values))

    def _read(self) -> list[Any]:
        """The current values; GONE where there is none."""
        values: list[Any] = []
        for place, positions in self._places:
            if len(positions) == len(place.names):
                try:
                    found = tuple(place.read())
                except _MISSING:
                    found = ()
                if len(found) == len(positions):
                    values += found
                    continue
            for position in positions:
                try:
                    values.append(place.read_one(position))
                except _MISSING:
                    values.append(GONE)
        return values

    def _generate(self) -> Callable[[], bool]:
        rows: list[str] = []
        for number, (place, positions) in enumerate(self._places):
            name = f"o{number}"
            if place.keys:
                self._space[name] = place.of
                rows += [f"{name}[{place.keys[i]!r}]" for i in positions]
            elif place.attributes:
                self._space[name] = place.of
                rows += [f"{name}.{place.attributes[i]}" for i in positions]
            elif place.cells:
                self._space[name] = place.cells
                rows += [f"{name}[{i}].cell_contents" for i in positions]
            else:
                self._space[name] = place.read
                rows += [f"{name}()[{i}]" for i in positions]
        lines = ["def holds():", "    try:", "        pass"]
        for start in range(0, len(rows), _CHUNK):
            tests = " and ".join(f"{rows[i]} is v{i}" for i in range(start, min(start + _CHUNK, len(rows))))
            lines.append(f"        if not ({tests}): return False")
        lines += [f"    except {_MISSING_NAMES}:", "        return False", "    return True"]
        self._space.update((f"v{i}", value) for i, value in enumerate(self._values))
        exec(compile("\n".join(lines), "<torchlazy guards>", "exec"), self._space)
        found: Callable[[], bool] = self._space["holds"]
        return found

    def _equal(self) -> bool:
        values = self._read()
        if not all(map(same_or_equal, values, self._values)):
            return False
        if self._generated is not None:
            for position, (now, then) in enumerate(zip(values, self._values, strict=True)):
                if now is not then:
                    self._space[f"v{position}"] = now
        self._values = values
        return True

    def broken(self) -> list[tuple[str, Any, Any]]:
        """What has another value now, or none: (name, value then, value now)."""
        rows = zip(self._names, self._values, self._read(), strict=True)
        return [(name, a, b) for name, a, b in rows if a is not b and not is_equal(b, a)]


_MISSING = (LookupError, AttributeError, ValueError, TypeError)
_MISSING_NAMES = "(LookupError, AttributeError, ValueError, TypeError)"


def is_equal(now: Any, before: Any) -> bool:
    """Whether both are plain values of one type that are indistinguishable."""
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

"""Parses `dynamic=`: which dimensions of which arguments vary, their names, and the sizes to record at.

Accepted for a dimension: a name ("batch"), a linear form of one ("2*batch + 1"), a `torch.export.Dim` or a form of one,
`Dim.AUTO` and `Dim.DYNAMIC` (a size of its own).

Invariant: every sample point keeps the bounds and steps of each size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchlazy.lazy.export.expressions import Number, SizeExpr, evaluate, linear, solve
from torchlazy.lazy.export.front_door import ExportError

_FORM = re.compile(r"^(?:(\d+)\s*\*\s*)?([A-Za-z_]\w*)(?:\s*([+-])\s*(\d+))?$")
_FAR = 1 << 16  # assumed to be above every threshold of a program; only metadata is that large
_PROBED = (*range(4, 17), 23)
_MOVES = (1, 2, 3, 7, 33)  # in steps, from the example
_STEPS = (1, 2, 4, 8, 16, 32, 64, 3, 5, 6, 7)


@dataclass
class Size:
    """A symbolic size while it is being learned. `example` is its size in the arguments given."""

    name: str
    example: int
    low: int | None = None
    high: int | None = None
    step: int = 1
    seen: list[int] = field(default_factory=list)

    def allows(self, size: int) -> bool:
        """Whether the bounds and the step allow this size."""
        low = 1 if self.low is None else self.low
        return low <= size and (self.high is None or size <= self.high) and (size - self.example) % self.step == 0


@dataclass(frozen=True)
class Dynamic:
    """The dimensions that vary: by the place of an argument ("x", "batch['ids']") the expression of each axis."""

    shapes: dict[str, dict[int, Number]]
    sizes: dict[str, Size]

    def shape_of(self, place: str, tensor: torch.Tensor) -> tuple[Number, ...]:
        """The shape of the argument at `place` with expressions where it varies."""
        forms = self.shapes.get(place, {})
        return tuple(forms.get(axis, int(n)) for axis, n in enumerate(tensor.shape))


def read_dynamic(dynamic: Any, leaves: Sequence[tuple[str, torch.Tensor]], names: Sequence[str]) -> Dynamic:
    """Understand `dynamic` for these arguments; ExportError where it names none, or the sizes contradict it.

    `leaves` are the tensors with their places, `names` the arguments in order (for a tuple or list of dimensions).
    """
    shapes: dict[str, dict[int, Number]] = {}
    bounds: dict[str, tuple[int | None, int | None]] = {}
    places = dict(leaves)
    if isinstance(dynamic, (tuple, list)):
        dynamic = dict(zip(names, dynamic, strict=False))
    if not isinstance(dynamic or {}, Mapping):
        raise ExportError(f'torchlazy.export: dynamic={dynamic!r}; write dynamic={{"x": {{0: "batch"}}}}')
    for place, axis, wish in _wishes(dynamic or {}, places):
        tensor = places[place]
        if not -tensor.dim() <= axis < tensor.dim():
            raise ExportError(f"torchlazy.export: dynamic names dimension {axis} of {place}, which has {tensor.dim()}")
        axis %= tensor.dim()
        form, found = _form(wish, f"{place.translate(_PLAIN_NAME)}_{axis}")
        bounds.update(found)
        shapes.setdefault(place, {})[axis] = form
    sizes: dict[str, Size] = {}
    pairs = [(place, axis, form) for place, axes in shapes.items() for axis, form in axes.items()]
    for place, axis, form in sorted(pairs, key=lambda p: not (isinstance(p[2], SizeExpr) and p[2].op == "size")):
        _learn_example(place, axis, form, int(places[place].shape[axis]), sizes, bounds)
    return Dynamic(shapes, sizes)


_PLAIN_NAME = str.maketrans({c: "_" for c in "[]'\". "})


def _learn_example(
    place: str, axis: int, form: Number, actual: int, sizes: dict[str, Size], bounds: Mapping[str, Any]
) -> None:
    known = {name: size.example for name, size in sizes.items()}
    try:
        solved = solve(form, actual, known)
    except ValueError as error:
        raise ExportError(f"torchlazy.export: dimension {axis} of {place} is {actual}, but {error}") from None
    if solved is not None:
        name, example = solved
        low, high = bounds.get(name, (None, None))
        size = sizes[name] = Size(name, example, low, high)
        if not size.allows(example):
            raise ExportError(f"torchlazy.export: {name} is {example} in the example, outside of its own bounds")
    elif evaluate(form, known) != actual:
        raise ExportError(
            f"torchlazy.export: dimension {axis} of {place} is {actual}, but {form} is {evaluate(form, known)} by the "
            "other arguments; give them different names, or pass examples that agree"
        )


def _wishes(dynamic: Any, places: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, int, Any]]:
    """(place, axis, what `dynamic` has for it) for all of `dynamic`, which mirrors the arguments' containers."""

    def walk(said: Any, place: str) -> Iterator[tuple[str, int, Any]]:
        if said is None:
            return
        if place in places:
            if not isinstance(said, (Mapping, list, tuple)):
                raise _no_dimensions(place, said)
            axes = said.items() if isinstance(said, Mapping) else enumerate(said)
            for axis, wish in axes:
                if not isinstance(axis, int):
                    raise _no_dimensions(place, said)
                if wish is not None and not _is_static(wish):
                    yield place, axis, wish
                elif isinstance(wish, int):
                    _check_fixed(place, axis, wish, places[place])
            return
        inner: Any
        if isinstance(said, Mapping):
            inner = [(f"{place}[{key!r}]", f"{place}.{key}", value) for key, value in said.items()]
        elif isinstance(said, (list, tuple)):
            inner = [(f"{place}[{i}]", "", value) for i, value in enumerate(said)]
        else:
            inner = []
        known = [(a if _has(places, a) else b, value) for a, b, value in inner]
        if not inner or not all(_has(places, at) for at, value in known if value is not None):
            raise _unknown(place, places)
        for at, value in known:
            yield from walk(value, at)

    for name, said in dynamic.items():
        if said is not None and not _has(places, name):
            raise _unknown(name, places)
        yield from walk(said, name)


def _no_dimensions(place: str, said: Any) -> ExportError:
    return ExportError(
        f"torchlazy.export: dynamic says {said!r} of {place}; write its dimensions as ints: "
        f'{{"{place}": {{0: "batch"}}}}'
    )


def _check_fixed(place: str, axis: int, size: int, tensor: torch.Tensor) -> None:
    """ExportError where a dimension given as a fixed size has another one."""
    if -tensor.dim() <= axis < tensor.dim() and tensor.shape[axis] != size:
        raise ExportError(
            f"torchlazy.export: dynamic says that dimension {axis} of {place} is {size}, but it is "
            f'{tensor.shape[axis]} in the example; a name lets it vary: dynamic={{"{place}": {{{axis}: "size"}}}}'
        )


def _unknown(name: str, places: Mapping[str, torch.Tensor]) -> ExportError:
    tensors = ", ".join(places) or "none"
    return ExportError(f"torchlazy.export: dynamic names {name!r}; the tensors among the arguments are {tensors}")


def _has(places: Mapping[str, torch.Tensor], place: str) -> bool:
    return any(p == place or p.startswith((f"{place}[", f"{place}.")) for p in places)


def _is_static(wish: Any) -> bool:
    return isinstance(wish, int) or getattr(getattr(wish, "type", None), "name", "") == "STATIC"


def _form(wish: Any, own_name: str) -> tuple[Number, dict[str, tuple[int | None, int | None]]]:
    """The expression of one dimension, and bounds of the sizes that it names."""
    if isinstance(wish, str):
        found = _FORM.match(wish.strip())
        if found is None:
            raise ExportError(f'torchlazy.export: size {wish!r}; write "batch", "2*batch" or "batch + 1"')
        scale, name, sign, offset = found.groups()
        return linear(name, int(scale or 1), int(f"{sign or ''}{offset or 0}")), {}
    if getattr(getattr(wish, "type", None), "name", "") in ("AUTO", "DYNAMIC"):
        low, high = getattr(wish, "min", None), getattr(wish, "max", None)
        return linear(own_name, 1, 0), {own_name: (low, high)}
    if hasattr(wish, "root") and hasattr(wish, "fn"):
        offset = int(wish.fn(0))
        form = linear(wish.root.__name__, int(wish.fn(1)) - offset, offset)
        return form, {wish.root.__name__: _bounds(wish.root)}
    name = getattr(wish, "__name__", None)
    if not isinstance(name, str):
        raise ExportError(f"torchlazy.export: size {wish!r}; use a name or torch.export.Dim")
    return linear(name, 1, 0), {name: _bounds(wish)}


def _bounds(dim: Any) -> tuple[int | None, int | None]:
    low, high = getattr(dim, "min", None), getattr(dim, "max", None)
    unbounded = high is None or not isinstance(high, int) or high >= 2**31
    return (low if isinstance(low, int) and low > 0 else None), None if unbounded else high


def moved_sizes(size: Size) -> list[int]:
    """Sizes to record at, in steps from the example: above it where the bound allows, else below."""
    found: list[int] = []
    for move in _MOVES:
        for at in (size.example + move * size.step, size.example - move * size.step):
            if size.allows(at) and at > 1 and at not in found:
                found.append(at)
                break
    return found


def candidate_steps(example: int) -> list[int]:
    """Steps to try where the program fails at the next size: divisors of the example."""
    return [step for step in _STEPS if example % step == 0 and step <= example]


def points_for(
    sizes: Mapping[str, Size], record_works: Callable[[dict[str, int]], Exception | None]
) -> list[dict[str, int]]:
    """The sample points: the example first, then each size moved alone, then several at once.

    `record_works` says whether the program runs at a point (the error if not); it is how steps and bounds are found.
    """
    base = {name: size.example for name, size in sizes.items()}
    points = [base]
    alone: dict[str, list[int]] = {}
    for name, size in sizes.items():
        alone[name] = _working_sizes(size, base, record_works)
        points += [{**base, name: at} for at in alone[name]]
    if len(sizes) > 1:
        for offset in range(3):
            together = {name: ats[(offset + i) % len(ats)] for i, (name, ats) in enumerate(alone.items())}
            if record_works(together) is None:
                points.append(together)
        for first in sizes:  # pairs, for products of two sizes
            for second in sizes:
                if first < second:
                    pair = {**base, first: alone[first][0], second: alone[second][0]}
                    if record_works(pair) is None:
                        points.append(pair)
    unique = {tuple(sorted(p.items())): p for p in points}
    return list(unique.values())


def _working_sizes(
    size: Size, base: Mapping[str, int], record_works: Callable[[dict[str, int]], Exception | None]
) -> list[int]:
    failure: Exception | None = None
    for step in candidate_steps(size.example):
        size.step = step
        working = []
        for at in moved_sizes(size):
            error = record_works({**base, size.name: at})
            if error is None:
                working.append(at)
                continue
            failure = failure or error
            below = 2 * size.example - at  # too long for something? then below
            if below > 1 and size.allows(below) and below not in working:
                if record_works({**base, size.name: below}) is None:
                    working.append(below)
            elif not working:
                break
        if len(working) >= 2:
            return working
    size.step = 1
    raise ExportError(
        f"torchlazy.export: the program does not run at other sizes of {size.name!r} than {size.example}"
        + (f": {type(failure).__name__}: {failure}" if failure is not None else "")
        + "\nremedy: sizes that must be equal need one name; leave out of `dynamic` what must not vary"
    ) from failure


def probes(size: Size, bounds: tuple[int, int | None], seen: Sequence[int]) -> list[int]:
    """Sizes within the bounds at which roundings show: every remainder of small divisors, near the example and far."""
    low, high = bounds
    far = max(seen) * 3
    steps = [*(size.example + move for move in _PROBED), *(far + move for move in _PROBED[:3])]
    found = [size.example + (at - size.example) * size.step for at in steps]
    return [at for at in found if low <= at <= (high or _FAR) and size.allows(at) and at not in seen]


def farthest(size: Size) -> int:
    """The largest size that is tried."""
    highest = size.high if size.high is not None else _FAR
    return highest - (highest - size.example) % size.step


def find_bounds(size: Size, seen: Sequence[int], works: Callable[[int], Exception | None]) -> tuple[int, int | None]:
    """(low, high) between which the program is one graph; high None where it still is at `_FAR`.

    `works` says what is wrong at a size, None if nothing. ExportError where the user's own bounds are wider.
    """
    low, high = min(seen), max(seen)
    wish_low = size.low if size.low is not None else 1
    lowest = wish_low + (size.example - wish_low) % size.step
    highest = farthest(size)
    failure = works(lowest) if lowest < low else None
    low = lowest if failure is None else _last_working(size, low, lowest, works)
    if failure is not None and size.low is not None:
        raise _too_wide(size, f"min={low}", lowest, failure)
    failure = works(highest) if highest > high else None
    if failure is None:
        return low, size.high
    high = _last_working(size, high, highest, works)
    if size.high is not None:
        raise _too_wide(size, f"max={high}", highest, failure)
    return low, high


def _last_working(size: Size, good: int, bad: int, works: Callable[[int], Exception | None]) -> int:
    """The size farthest from `good` towards `bad` that works, if those that do not lie all beyond it."""
    while abs(bad - good) > size.step:
        middle = good + (bad - good) // (2 * size.step) * size.step
        if middle == good:
            middle = good + (size.step if bad > good else -size.step)
        if works(middle) is None:
            good = middle
        else:
            bad = middle
    return good


def _too_wide(size: Size, remedy: str, at: int, failure: Exception) -> ExportError:
    error = ExportError(
        f"torchlazy.export: the bounds of {size.name!r} include {at}, where the program is not the same graph: "
        f"{type(failure).__name__}: {failure}\nremedy: torch.export.Dim({size.name!r}, {remedy})"
    )
    error.__cause__ = failure
    return error


__all__ = ["Dynamic", "Size", "farthest", "find_bounds", "points_for", "probes", "read_dynamic"]

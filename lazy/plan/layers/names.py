"""Buffer numbers for inserted layers: those that lowering the whole graph would have given.

Invariant: equal numbers are never given to two values.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass


class NotPeriodic(Exception):
    """A trace or its schedule has layers, but differs between them; the message says where."""


@dataclass(frozen=True)
class Stamped:
    """An item of the long schedule: `item` of the short one, `by` layers further on, on other values. `ahead`: how many
    layers the long schedule has before it that the short one has not; None for an item without a layer."""

    item: int
    by: int
    ahead: int | None
    refs: tuple[str, ...]
    outs: tuple[str, ...]


@dataclass
class _Stretch:
    """Numbers given layer by layer: `step` a layer; `low` are the numbers of its values in the earlier numbered of the
    two layers between which layers are put in, `end` is where the stretch ends."""

    step: int
    low: dict[Hashable, int]
    end: int

    def cut(self) -> int:
        return max(self.low.values())


def new_numbers(
    numbers: Mapping[int, int], roles: Mapping[int, tuple[Hashable, int] | None], first: int, more: int
) -> dict[tuple[int, int], int]:
    """The number of each value, and of those of layer `first` - 1 in the `more` layers that are put in after it.

    `numbers` are those that the values have, `roles` their classes and layers. The result is by (value, how many
    layers further on). NotPeriodic where numbering does not go by layers."""
    at = {place: value for value, place in roles.items() if place is not None}
    reach: dict[Hashable, tuple[int, int]] = {}
    for (role, _), value in at.items():
        low, high = reach.get(role, (numbers[value], numbers[value]))
        reach[role] = min(low, numbers[value]), max(high, numbers[value])
    pairs: list[tuple[int, int, Hashable, bool]] = []
    for (role, layer), value in at.items():
        if layer != first - 1:
            continue
        after = at.get((role, first))
        if after is None:
            raise NotPeriodic(f"value {value} has no counterpart in the next layer")
        low, high = sorted((numbers[value], numbers[after]))
        pairs.append((low, high, role, numbers[value] == low))
    stretches: list[_Stretch] = []
    for low, high, role, _ in sorted(pairs, key=lambda pair: reach[pair[2]]):
        begin, end = reach[role]
        if stretches and begin < stretches[-1].end:
            if high - low != stretches[-1].step:
                raise NotPeriodic(f"buffers are numbered by {high - low} and by {stretches[-1].step} a layer")
            stretches[-1].low[role] = low
            stretches[-1].end = max(end, stretches[-1].end)
        else:
            stretches.append(_Stretch(high - low, {role: low}, end))
    own = {role: stretch for stretch in stretches for role in stretch.low}

    def shift(number: int, role: Hashable | None) -> int:
        total = 0
        for stretch in stretches:
            cut = stretch.low[role] if role is not None and own.get(role) is stretch else stretch.cut()
            total += more * stretch.step if number > cut else 0
        return total

    found: dict[tuple[int, int], int] = {}
    for value, number in numbers.items():
        place = roles[value]
        found[value, 0] = number + shift(number, None if place is None else place[0])
    for low, _, role, is_rising in pairs:
        value = at[role, first - 1]
        start = low + shift(low, role)
        for by in range(1, more + 1):
            found[value, by] = start + own[role].step * (by if is_rising else more - by + 1)
    if len(set(found.values())) != len(found):
        raise NotPeriodic("two buffers would get one name")
    return found


def numbers_in_order(
    numbers: Mapping[int, int], roles: Mapping[int, tuple[Hashable, int] | None], first: int, more: int
) -> dict[tuple[int, int], int]:
    """As `new_numbers`, where numbering does not go by layers: each value is numbered after its counterpart in the
    layer before."""
    places = [(value, 0) for value in numbers]
    repeated = (value for value, place in roles.items() if place is not None and place[1] == first - 1)
    places += [(value, by) for value in repeated for by in range(1, more + 1)]
    return {place: n for n, place in enumerate(sorted(places, key=lambda one: (numbers[one[0]], one[1])))}

"""Knapsack problems: choices among items with a gain and a price. Knows no tensors.

Invariant: results are functions of the numbers alone; ties fall to the item that comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_STATES = 20_000
"""Undominated partial choices that are followed; equal layers give few, 64 unrelated items may give more than there is
memory for. Beyond it the greedy choice stands, which is at most one item's price above the best."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something that can be had: `gain` > 0 for `price` >= 0."""

    gain: int
    price: int


def by_ratio(items: Sequence[Item]) -> list[int]:
    """The items' positions, most gain for its price first."""
    return sorted(range(len(items)), key=lambda i: (items[i].price / items[i].gain, -items[i].gain, i))


def greedy_cover(items: Sequence[Item], need: int) -> tuple[int, ...] | None:
    """Items of at least `need` gain in all, best ratio first, then without those that turn out unneeded."""
    chosen: list[int] = []
    gained = 0
    for i in by_ratio(items):
        if gained >= need:
            break
        chosen.append(i)
        gained += items[i].gain
    if gained < need:
        return None
    for i in sorted(chosen, key=lambda i: -items[i].price):
        if gained - items[i].gain >= need:
            chosen.remove(i)
            gained -= items[i].gain
    return tuple(sorted(chosen))


def cheapest_cover(items: Sequence[Item], need: int) -> tuple[int, ...] | None:
    """The cheapest items of at least `need` gain in all; None where all together do not reach it.

    Exact: a table of undominated partial choices, (gain, price) both rising, grows item by item. Greedy where the table
    outgrows MAX_STATES.
    """
    if need <= 0:
        return ()
    states: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for i in by_ratio(items):
        with_it = [(min(need, g + items[i].gain), p + items[i].price, (*c, i)) for g, p, c in states if g < need]
        merged = sorted(states + with_it, key=lambda state: (-state[0], state[1], len(state[2])))
        states = []
        for state in merged:  # from the greatest gain down, each must be cheaper than what gains more
            if not states or state[1] < states[-1][1]:
                states.append(state)
        if len(states) > MAX_STATES:
            return greedy_cover(items, need)
    best = states[0]
    return tuple(sorted(best[2])) if best[0] >= need else None


def undominated(points: Sequence[tuple[int, int]]) -> list[int]:
    """Positions of the points that no other point beats in both numbers, the first number falling."""
    kept: list[int] = []
    best: int | None = None
    for i in sorted(range(len(points)), key=lambda i: (points[i], i)):
        if best is None or points[i][1] < best:
            kept.append(i)
            best = points[i][1]
    return kept[::-1]

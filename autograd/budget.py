"""Plans that hold less than the free plan: which values to recompute with products and passes, as a table of prices.

Starting from the free plan, values are given up in the order of the bytes that they free for their price. Values of one
size and price, as equal layers have, are tried together first and one by one after; a value is given up only if that
lowers what is held at the worst moment, so that of a long chain some values stay as points to start from.

Invariant: each row of a table holds less and costs more than the row before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import fx
from torchlazy.autograd.knapsack import Item, by_ratio, cheapest_cover, undominated
from torchlazy.autograd.plan import RecomputePlan, plan_keeping
from torchlazy.autograd.step import TrainingStep
from torchlazy.prims.errors import GraphError

MAX_EXACT = 64
"""Candidates up to which the exact knapsack is solved beside the greedy choice."""

MAX_TRIALS = 600
"""Plans that are priced in search of a row; each walks the forward once (some 3 ms for a thousand nodes)."""


@dataclass(frozen=True)
class _Offer:
    """Held values that can be given up, with what each frees and costs when all the others stay."""

    values: tuple[fx.Node, ...]
    items: tuple[Item, ...]


class _Search:
    """Prices plans that give up some of the free plan's values, and counts them."""

    def __init__(self, step: TrainingStep, free: RecomputePlan) -> None:
        self.step, self.free = step, free
        self.trials = 0

    def without(self, given_up: Collection[fx.Node]) -> RecomputePlan | None:
        """The plan that holds what is left; None where something cannot be computed again."""
        self.trials += 1
        kept = {node: None for node in self.free.saved if node not in given_up}
        reasons = {node: "given up for the memory budget" for node in given_up}
        try:
            return plan_keeping(self.step, kept, reasons)
        except GraphError:
            return None


def _offers(search: _Search) -> _Offer:
    values, items = [], []
    for node in search.free.saved:
        plan = search.without((node,))
        if plan is None or plan.saved_bytes >= search.free.saved_bytes:
            continue
        gain = search.free.saved_bytes - plan.saved_bytes
        values.append(node)
        items.append(Item(gain, max(0, plan.added_cost - search.free.added_cost)))
    return _Offer(tuple(values), tuple(items))


def _rows(
    search: _Search, offer: _Offer, is_enough: Callable[[RecomputePlan], bool]
) -> list[tuple[RecomputePlan, tuple[int, ...]]]:
    """Plans that hold less and less, each with the offer's positions given up, until one is enough or nothing helps."""
    rows: list[tuple[RecomputePlan, tuple[int, ...]]] = [(search.free, ())]
    waiting = by_ratio(offer.items)

    def attempt(positions: list[int]) -> bool:
        plan, given_up = rows[-1]
        together = (*given_up, *positions)
        found = search.without({offer.values[i]: None for i in together})
        if found is None or found.held_bytes >= plan.held_bytes:
            return False
        rows.append((found, together))
        return True

    progress = True
    while progress and waiting and search.trials < MAX_TRIALS:
        progress = False
        left: list[int] = []
        for group in _equal_runs(offer.items, waiting):
            if is_enough(rows[-1][0]) or search.trials >= MAX_TRIALS:
                return rows
            if attempt(group):
                progress = True
                continue
            for i in group if len(group) > 1 else ():
                if is_enough(rows[-1][0]) or search.trials >= MAX_TRIALS:
                    return rows
                if attempt([i]):
                    progress = True
                else:
                    left.append(i)
            left += group if len(group) == 1 else []
        waiting = left
    return rows


def _equal_runs(items: tuple[Item, ...], order: list[int]) -> list[list[int]]:
    """The order, cut where size or price change."""
    runs: list[list[int]] = []
    for i in order:
        if runs and items[runs[-1][0]] == items[i]:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def plan_for_bytes(step: TrainingStep, free: RecomputePlan, limit: int) -> RecomputePlan:
    """The cheapest plan found that holds at most `limit` bytes; where none does, the one that holds least."""
    search = _Search(step, free)
    offer = _offers(search)
    return _cheapest(search, offer, _rows(search, offer, lambda plan: plan.held_bytes <= limit), limit)


def plan_for_share(step: TrainingStep, free: RecomputePlan, everything: RecomputePlan, share: float) -> RecomputePlan:
    """The cheapest plan found that holds at most that share of the way from the least that any plan found holds (0.0)
    to what `everything` holds (1.0)."""
    search = _Search(step, free)
    offer = _offers(search)
    rows = _rows(search, offer, lambda plan: False)
    least = min(plan.held_bytes for plan, _ in rows)
    limit = int(least + share * (max(everything.held_bytes, free.held_bytes) - least))
    return _cheapest(search, offer, rows, limit)


def _cheapest(
    search: _Search, offer: _Offer, rows: list[tuple[RecomputePlan, tuple[int, ...]]], limit: int
) -> RecomputePlan:
    """The first row that holds at most `limit`, without what it gives up in vain; else the one that holds least."""
    best, given_up = next((row for row in rows if row[0].held_bytes <= limit), rows[-1])
    if best.held_bytes > limit or not given_up:
        return best
    for i in sorted(given_up, key=lambda i: -offer.items[i].price):  # a group may have overshot
        fewer = tuple(k for k in given_up if k != i)
        plan = search.without({offer.values[k]: None for k in fewer})
        if plan is not None and plan.held_bytes <= limit and plan.added_cost <= best.added_cost:
            best, given_up = plan, fewer
    if len(offer.items) <= MAX_EXACT:
        chosen = cheapest_cover(offer.items, search.free.saved_bytes - limit)
        exact = search.without({offer.values[i]: None for i in chosen}) if chosen is not None else None
        if exact is not None and exact.held_bytes <= limit and exact.added_cost < best.added_cost:
            return exact
    return best


def pareto_table(step: TrainingStep, free: RecomputePlan) -> tuple[RecomputePlan, ...]:
    """Plans from the free one down, each holding less and costing more than the one before."""
    search = _Search(step, free)
    rows = [plan for plan, _ in _rows(search, _offers(search), lambda plan: False)]
    kept = undominated([(plan.held_bytes, plan.added_cost) for plan in rows])
    return tuple(rows[i] for i in kept)


def format_table(plans: tuple[RecomputePlan, ...]) -> str:
    """One plan a line: MiB held at the worst moment, MiB saved, added cost in MiB of traffic, numbers of values."""
    lines = [f"{'held':>10} {'saved':>10} {'added cost':>12} {'values saved':>13} {'recomputed':>11}"]
    mib = 1 << 20
    lines += [
        f"{plan.held_bytes / mib:10.2f} {plan.saved_bytes / mib:10.2f} {plan.added_cost / mib:12.2f}"
        f" {len(plan.saved):13} {len(plan.recomputed):11}"
        for plan in plans
    ]
    return "\n".join(lines)

"""Covers against all subsets."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from torchlazy.autograd import knapsack
from torchlazy.autograd.knapsack import Item, cheapest_cover, greedy_cover, undominated


def best_price(items: list[Item], need: int) -> int | None:
    prices = [
        sum(items[i].price for i in chosen)
        for count in range(len(items) + 1)
        for chosen in combinations(range(len(items)), count)
        if sum(items[i].gain for i in chosen) >= need
    ]
    return min(prices, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_the_cheapest_cover_is_the_best_of_all_subsets(seed):
    rng = random.Random(seed)
    items = [Item(rng.randrange(1, 20), rng.randrange(15)) for _ in range(rng.randrange(1, 9))]
    need = rng.randrange(60)
    best = best_price(items, need)
    chosen, greedy = cheapest_cover(items, need), greedy_cover(items, need)
    assert (chosen is None) == (greedy is None) == (best is None)
    if best is not None:
        assert sum(items[i].gain for i in chosen) >= need
        assert sum(items[i].price for i in chosen) == best
        assert sum(items[i].gain for i in greedy) >= need


def test_too_many_partial_choices_fall_back_to_the_greedy_cover(monkeypatch):
    monkeypatch.setattr(knapsack, "MAX_STATES", 2)
    items = [Item(3, 5), Item(5, 7), Item(9, 20), Item(2, 1)]
    assert cheapest_cover(items, 8) == greedy_cover(items, 8)


def test_undominated_points_rise_in_one_number_where_they_fall_in_the_other():
    points = [(10, 0), (8, 3), (9, 3), (8, 4), (5, 9), (5, 8), (7, 8)]
    assert [points[i] for i in undominated(points)] == [(10, 0), (8, 3), (5, 8)]

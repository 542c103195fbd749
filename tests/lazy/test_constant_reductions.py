"""Reductions of values that the C++ compiler knows: their last vector has lanes that do not count."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("size", [3, 8, 10, 12, 14, 15, 24])
def test_sum_of_ones(size: int, compiled: None) -> None:
    """GCC 12 folded the choice between a known sum and a known zero into the sum, for all lanes: 12 ones gave 16."""
    ones = torch.ones(3, size, device="lazy")
    assert ones.sum().item() == 3 * size
    assert ones[0].sum().item() == size
    assert torch.full((size,), 2.0, device="lazy").prod().item() == 2.0**size
    assert torch.where(torch.arange(size, device="lazy") < size - 2, 2.0, 1.0).sum().item() == 2 * size - 2


@pytest.mark.parametrize("size", [4, 12])
def test_mean_with_weights_of_one(size: int, compiled: None) -> None:
    x = torch.arange(float(3 * size)).view(3, size)

    def weighted(x):
        weights = torch.ones_like(x)
        kept = torch.where(weights != 0, x * weights, torch.zeros_like(x))
        return kept.sum() / weights.sum().clamp(min=1.0)

    assert weighted(x.to("lazy")).item() == pytest.approx(weighted(x).item())

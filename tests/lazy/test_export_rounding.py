"""Exports whose sizes are rounded on the way: ratios, windows, halvings; constants that equal themselves bitwise only.

Invariant: between its bounds a program gives eager's result at every size, not only at those that it was recorded at.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F


def wrong_sizes(exported: Any, function: Any, make: Any, most: int) -> list[int]:
    """Sizes within the bounds at which the program differs."""
    module = exported.module()
    found, taken = [], 0
    for at in range(1, most):
        x = make(at)
        try:
            got = module(x)
        except AssertionError:  # out of the bounds
            continue
        taken += 1
        if not torch.equal(got, function(x)):
            found.append(at)
    assert taken > most * 3 // 4
    return found


@pytest.mark.parametrize("ratio", [0.6, 0.75, 1.1, 1.25, 1.5, 1.7, 2.5])
def test_resampling_by_a_ratio(ratio: float) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=ratio)

    exported = torchlazy.export(function, (torch.randn(1, 1, 8, 2),), dynamic={"x": {2: "h"}})
    assert wrong_sizes(exported, function, lambda h: torch.randn(1, 1, h, 2), 80) == []


def test_a_size_with_a_rest_is_refused_between_its_steps() -> None:
    exported = torchlazy.export(lambda x: x * 2, (torch.ones(19),), dynamic={"x": {0: "8*n + 3"}}).module()
    assert [exported(torch.ones(n)).shape[0] for n in (11, 19, 35)] == [11, 19, 35]
    with pytest.raises(AssertionError, match=r"% 8"):
        exported(torch.ones(20))


def test_windows_of_windows() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool1d(F.avg_pool1d(x, 5, stride=3), 3, stride=2, padding=1)

    exported = torchlazy.export(function, (torch.randn(1, 2, 40),), dynamic={"x": {2: "n"}})
    assert wrong_sizes(exported, function, lambda n: torch.randn(1, 2, n), 120) == []


def test_pictures_seen_by_a_ratio_in_both_directions() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=1.5, mode="bilinear").mean((2, 3))

    dynamic = {"x": {0: "batch", 2: "height", 3: "width"}}
    exported = torchlazy.export(function, (torch.randn(1, 2, 8, 8),), dynamic=dynamic)
    module = exported.module()
    for batch, height, width in itertools.product((1, 3), (2, 9, 21), (7, 12)):
        x = torch.randn(batch, 2, height, width)
        torch.testing.assert_close(module(x), function(x))


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_library_calls_that_count_on_the_layout_of_a_copy(cell: Any) -> None:
    model = cell(4, 5, num_layers=2, batch_first=True, bidirectional=True)
    exported = torchlazy.export(model, (torch.randn(2, 3, 4),), dynamic={"input": {0: "batch"}})
    x = torch.randn(5, 3, 4)
    want = model(x)
    torch.testing.assert_close(exported.module()(x)[0], want[0].detach())


def test_a_copy_lies_as_in_eager() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.t().contiguous(), x.t().clone(), x.t().contiguous().view(-1) * 2]

    exported = torchlazy.export(function, (torch.randn(3, 4),), dynamic={"x": {0: "n"}})
    x = torch.randn(6, 4)
    for got, want in zip(exported.module()(x), function(x), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def test_a_constant_that_is_no_number_is_the_same_at_all_sizes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, torch.tensor(float("nan")))

    exported = torchlazy.export(function, (torch.randn(5),), dynamic={"x": {0: "n"}})
    x = torch.randn(9)
    torch.testing.assert_close(exported.module()(x), function(x), equal_nan=True)


def test_state_is_its_own_at_each_load(tmp_path: Any) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.last.copy_(x.mean(0))
            self.seen += 1
            y = self.last * 2
            self.last.add_(1)
            return y, self.last, self.last[1:], self.seen + x.sum()

    model = Counts()
    plain = copy.deepcopy(model)
    program = torchlazy.export(model, (torch.randn(3, 4),), dynamic={"x": {0: "n"}})
    torch.export.save(program, tmp_path / "counts.pt2")
    first, second = torchlazy.load(tmp_path / "counts.pt2"), torchlazy.load(tmp_path / "counts.pt2")
    for rows in (3, 5, 2):
        x = torch.randn(rows, 4)
        for got, want in zip(first(x), plain(x), strict=True):
            torch.testing.assert_close(got, want)
    assert first.seen == 3 and second.seen == 0 and model.seen == 0

"""What crosses from a joint's forward to its backward channels-last; convolutions on the CPU stand in for a GPU's."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.plan import split_joint


class Net(nn.Module):
    """A convolution whose values are read through views of the row-major order, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.last = nn.Linear(72 if kind == "shuffled" else 288, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.conv(x)))
        if self.kind == "shuffled":
            x = x.view(-1, 2, 4, 6, 6).transpose(1, 2).reshape(-1, 8, 6, 6).exp()
            x = x.as_strided((x.shape[0], 8, 9), (288, 36, 4), 0).sigmoid()
        return self.last(x.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tiers", ["on", "foreground"])
@pytest.mark.parametrize("kind", ["flat", "shuffled"])
def test_views_of_what_crosses_are_of_the_recorded_layout(
    monkeypatch: pytest.MonkeyPatch, tiers: str, kind: str
) -> None:
    """Operators that ran one by one got the channels-last value, and `view` raised."""
    on_cpu = partial(split_joint.channels_last_values, device="cpu")
    seen: list[int] = []
    monkeypatch.setattr(split_joint, "channels_last_values", lambda graph: seen.append(1) or on_cpu(graph))
    monkeypatch.setattr(torchlazy.config, "tiers", tiers)
    model = Net(kind)
    other = copy.deepcopy(model)
    compiled = torchlazy.compile(other)
    for _ in range(8):
        x = torch.randn(4, 3, 8, 8)
        for module, call in ((model, model), (other, compiled)):
            module.zero_grad()
            call(x).square().sum().backward()
        for wanted, found in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-4)
    assert seen

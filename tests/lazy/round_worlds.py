"""What steps of several rounds train: a model on one device, fed by a generator of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class RoundWorld:
    """`told`: what the program read on its way."""

    width = 8

    def __init__(self, device: str, build: Callable[[], torch.nn.Module], momentum: float = 0.0) -> None:
        self.device = device
        torch.manual_seed(0)
        self.net = build().to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=momentum, foreach=True)
        self.generator = torch.Generator().manual_seed(3)
        self.told: list[Any] = []

    def data(self) -> torch.Tensor:
        return torch.randn(8, self.width, generator=self.generator).to(self.device)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.cpu() for name, value in self.net.state_dict().items()}

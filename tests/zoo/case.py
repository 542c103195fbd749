"""What a model of the zoo is: how to make it, its batches, its loss and its training step.

Invariant: `make` and `batch` draw from torch's CPU generator alone and run on the CPU; the runner seeds it and moves
the results, so every device trains on the same numbers. Noise that a step needs is part of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Optimizers = list[torch.optim.Optimizer]


def adamw(parameters: Any, rate: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW whose epsilon hides the rounding noise of gradients that are zero otherwise (the bias of keys)."""
    return torch.optim.AdamW(parameters, lr=rate, eps=1e-3)


def one_optimizer(model: nn.Module, rate: float = 1e-2) -> Optimizers:
    """The optimizer of most cases."""
    return [adamw(model.parameters(), rate)]


@dataclass(frozen=True)
class Case:
    """A model and how it is trained. `step` is given where a step is more than one loss and one backward."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    optimizers: Callable[[nn.Module], Optimizers] = one_optimizer
    step: Callable[[nn.Module, Batch, Optimizers], torch.Tensor] | None = None
    loss_needs_grad: bool = False  # it takes gradients itself

    def train_step(self, model: nn.Module, batch: Batch, optimizers: Optimizers) -> torch.Tensor:
        """One step; returns the loss, apart from autograd."""
        if self.step is not None:
            return self.step(model, batch, optimizers)
        loss = self.loss(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

"""Operators that torch has no rule for, or a wrong one: our geometry is what the kernels give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("operator_by_operator")
CLASSES = torch.tensor([[0, 2, -1, 0], [1, 0, 3, -1], [3, -1, 0, 0]])
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "multi margin": lambda x, r: F.multi_margin_loss(x, CLASSES[:, 0].to(x.device), reduction=r),
    "multi margin, weights": lambda x, r: F.multi_margin_loss(
        x, CLASSES[:, 0].to(x.device), p=2, margin=0.5, weight=torch.arange(4.0).to(x.device), reduction=r
    ),
    "multi margin, one row": lambda x, r: F.multi_margin_loss(x[0], CLASSES[2, 0].to(x.device), reduction=r),
    "multilabel margin": lambda x, r: F.multilabel_margin_loss(x, CLASSES.to(x.device), reduction=r),
    "multilabel margin, one row": lambda x, r: F.multilabel_margin_loss(x[0], CLASSES[0].to(x.device), reduction=r),
    "multilabel margin, a row of one": lambda x, r: F.multilabel_margin_loss(
        x[:1], CLASSES[:1].to(x.device), reduction=r
    ),
}
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fractional pooling": lambda x: F.fractional_max_pool3d(x.view(1, 1, 3, 2, 2), (2, 1, 1), (1, 1, 1)),
    "gamma": lambda x: torch.distributions.Gamma(x.exp(), 1 + x.square(), validate_args=False).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x.exp(), validate_args=False).rsample(),
}


def check(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Results and gradients of a call that is replayed, backward outside, against eager's; shapes and strides, too."""

    def runs(device: str, call: Any) -> list[torch.Tensor]:
        found = []
        for i in range(4):
            torch.manual_seed(i)
            x = (torch.arange(12.0).view(3, 4) + i).sin().to(device).requires_grad_()
            result = call(x)
            (result * torch.arange(1.0, 1 + result.numel(), device=device).view(result.shape)).sum().backward()
            found += [result.detach().cpu(), x.grad.cpu()]
        return found

    torchlazy.config.rng = "eager"
    run = torchlazy.compile(call, audit=False)
    torch.testing.assert_close(runs("lazy", run), runs("cpu", call), check_stride=True)
    assert run.report().replays, run.report()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_with_gradients_outside(loss: str, reduction: str) -> None:
    check(lambda x: LOSSES[loss](x, reduction))


@pytest.mark.parametrize("name", OTHERS)
def test_others_with_gradients_outside(name: str) -> None:
    check(OTHERS[name])

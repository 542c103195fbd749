"""Recurrent layers on ordinary tensors: oneDNN's kernel keeps a workspace where gradients are on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torchlazy
from torch import nn


@pytest.mark.parametrize("tiers", ["on", "off"])
@pytest.mark.parametrize("form", ["compiled", "lazy_mode"])
@pytest.mark.parametrize("is_training", [True, False])
def test_gradients_on_and_off_by_turns(is_training: bool, form: str, tiers: str) -> None:
    """The first call, one that follows it in the other mode, and replays."""
    torchlazy.config.tiers = tiers
    torch.manual_seed(0)
    model = nn.LSTM(3, 5).train(is_training)
    run = torchlazy.compile(model) if form == "compiled" else model
    for turn in range(6):
        x = torch.randn(2, 4, 3)
        mode: AbstractContextManager[object] = torchlazy.lazy_mode() if form == "lazy_mode" else nullcontext()
        with mode, torch.set_grad_enabled(turn % 3 > 0):
            loss = run(x)[0].square().sum()
            value = loss.item()
            if turn % 3:
                loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        wanted = model(x)[0].square().sum()
        assert value == pytest.approx(wanted.item(), rel=1e-5)
        if turn % 3:
            wanted.backward()
            torch.testing.assert_close(found, [p.grad for p in model.parameters()])
            model.zero_grad()

"""Recurrent layers: oneDNN's kernel keeps a workspace where gradients are on; on the lazy device LSTMs call it too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

from tests.fuzz.ways import followed


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


def _results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    output, states = model(x)
    states = states if isinstance(states, tuple) else (states,)
    sum((value.float().square().sum() for value in (output, *states)), torch.zeros((), device=x.device)).backward()
    assert x.grad is not None
    return [output, *states, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_an_lstm_on_the_device_gives_what_eager_gives(
    dtype: torch.dtype, bidirectional: bool, batch_first: bool, bias: bool
) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(3, 5, 2, bidirectional=bidirectional, batch_first=batch_first, bias=bias).to(dtype)
    on_device = copy.deepcopy(model).to("lazy")
    x = torch.randn(4, 6, 3, dtype=dtype)
    for found, wanted in zip(_results(on_device, x.to("lazy")), _results(model, x), strict=True):
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(found.detach().cpu(), wanted.detach(), check_stride=False)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            torch.testing.assert_close(on_device(x.to("lazy"))[0].cpu(), model(x)[0])


def test_an_lstm_on_the_device_is_one_library_call_a_layer() -> None:
    torchlazy.config.tiers = "off"
    model = nn.LSTM(3, 5, 2, dropout=0.5).to("lazy")
    torchlazy.reset_metrics()
    _results(model, torch.randn(30, 6, 3).to("lazy"))[-1].cpu()
    uses = str(torchlazy.report())
    assert "2 x aten.mkldnn_rnn_layer.default" in uses and "2 x aten.mkldnn_rnn_layer_backward.default" in uses
    assert "mm.default" not in uses


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, lambda *sizes: nn.LSTM(*sizes, proj_size=2)])
def test_other_recurrent_layers_keep_their_composite_form(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind(3, 5)
    on_device = copy.deepcopy(model).to("lazy")
    x = torch.randn(4, 6, 3)
    for found, wanted in zip(_results(on_device, x.to("lazy")), _results(model, x), strict=True):
        torch.testing.assert_close(found.detach().cpu(), wanted.detach())


@pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_deferred_layers_cut_nothing_in_any_grad_mode(device: str) -> None:
    """The grad mode in which a layer was called is part of a trace, and what a difference runs keeps it."""
    library = LIBRARY.wait()
    torch.manual_seed(0)
    model = nn.LSTM(3, 5, 2).to(device)
    plain = copy.deepcopy(model).to("cpu")

    def step(model: nn.Module, x: torch.Tensor, turn: int) -> list[torch.Tensor]:
        with torch.set_grad_enabled(turn % 2 == 0):
            found = model(x)[0].square()
        if turn % 3 == 2:
            found = found.sin()
        if not found.requires_grad:
            return [found]
        return [found, *torch.autograd.grad(found.sum(), list(model.parameters()))]

    with followed():
        library.reset_counts()
        for turn in range(24):
            x = torch.randn(2, 4, 3)
            with nullcontext() if device == "lazy" else torchlazy.lazy_mode():
                found = step(model, x.to(device), turn)
                torchlazy.flush()
            torch.testing.assert_close([t.cpu() for t in found], step(plain, x, turn))
        assert library.counts()["programs"] >= 12 and not any("rnn" in name for name in library.ran_at_once())

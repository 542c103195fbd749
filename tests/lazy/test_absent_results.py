"""Operators that give None in the place of a tensor: masks that are off, statistics and workspaces nobody asked for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.shapes.infer import infer
from torchlazy.lazy.trace.geometry import geometry

aten = torch.ops.aten
Call = Callable[..., Any]


def _layer_norm(mask: list[bool]) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        out, mean, rstd = aten.native_layer_norm(x, [4], w, b, 1e-5)
        return out, *aten.native_layer_norm_backward(x + 1, x, [4], mean, rstd, w, b, mask)

    return call


def _batch_norm(mask: list[bool]) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        out, mean, rstd = aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)
        grads = aten.native_batch_norm_backward(x.sin(), x, w, None, None, mean, rstd, True, 1e-5, mask)
        return out, *grads

    return call


def _group_norm(mask: list[bool]) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        x = x.reshape(3, 4, 1)
        out, mean, rstd = aten.native_group_norm(x, w, b, 3, 4, 1, 2, 1e-5)
        return out, *aten.native_group_norm_backward(x.cos(), x, mean, rstd, w, 3, 4, 1, 2, mask)

    return call


def _convolution(mask: list[bool]) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        image, filters = x.reshape(1, 3, 4), w.reshape(1, 1, 4).expand(2, 3, 2 + 2)[..., :2].contiguous()
        return aten.convolution_backward(
            image[:, :2, :3] + 0, image, filters, [2], [1], [0], [1], False, [0], 1, mask
        )  # fmt: skip

    return call


def _recurrent(w: torch.Tensor, x: torch.Tensor) -> Any:
    many = w.repeat(4)[:, None].expand(16, 4).contiguous()
    state = torch.zeros(3, 4)
    return torch.mkldnn_rnn_layer(
        x[None].contiguous(), many, many, many[:, 0].contiguous(), many[:, 0].contiguous(), state, state,
        False, [], 2, 4, 1, True, False, False, False,
    )  # fmt: skip


CALLS: dict[str, Call] = {
    f"{name}-{''.join('01'[on] for on in mask)}": make(list(mask))
    for name, make in (
        ("layer_norm", _layer_norm), ("batch_norm", _batch_norm), ("group_norm", _group_norm), ("conv", _convolution),
    )
    for mask in ((True, False, False), (False, True, False), (False, False, True), (True, True, False))
}  # fmt: skip
CALLS["rnn_layer"] = lambda x, w, b: _recurrent(w, x)[:3]
DOORS = ("device", "mode", "call", "module")


class _Module(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: torch.Tensor) -> Any:
        return self.call(*args)


def through(door: str, call: Call) -> Call:
    """The call through one of the doors; its results are ordinary tensors, or None."""
    if door == "call":
        return torchlazy.compile(call)
    if door == "module":
        return torchlazy.compile(_Module(call))  # type: ignore[no-any-return]

    def run(*args: torch.Tensor) -> Any:
        if door == "mode":
            with torchlazy.lazy_mode():
                return [None if r is None else r.clone() for r in call(*args)]
        return [None if r is None else r.cpu() for r in call(*[a.to("lazy") for a in args])]

    return run


@pytest.mark.parametrize("tiers", ["on", "off"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CALLS)
def test_results_that_nobody_asked_for(name: str, door: str, tiers: str) -> None:
    if name == "rnn_layer" and door == "device":
        pytest.skip("oneDNN's layer is for ordinary tensors")
    torchlazy.config.tiers = tiers
    torch.manual_seed(0)
    run = through(door, CALLS[name])
    for turn in range(5):
        args = torch.randn(3, 4), torch.randn(4), torch.randn(4)
        with torch.set_grad_enabled(turn % 2 == 0 or name != "rnn_layer"):
            found, wanted = run(*args), CALLS[name](*args)
        assert [r is None for r in found] == [r is None for r in wanted]
        pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if b is not None]
        torch.testing.assert_close([a for a, _ in pairs], [b for _, b in pairs])
        if turn == 2:
            torchlazy.wait_for_compile()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("tiers", ["on", "off"])
@pytest.mark.parametrize("door", ["device", "mode", "call", "module"])
def test_recurrent_models_train_and_predict(door: str, tiers: str, kind: str) -> None:
    """The loss, the backward and the optimizer outside of what is compiled, and evaluations between the steps."""
    torchlazy.config.tiers = tiers

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 6)
            self.layers = getattr(nn, kind)(6, 8, 2, batch_first=True)
            self.head = nn.Linear(8, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.layers(self.embed(x))[0])
            return out

    def train(door: str, model: Any) -> list[float]:
        call: Any = {"call": torchlazy.compile(lambda x: model(x)), "module": torchlazy.compile(model)}.get(door, model)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        losses = []
        for turn in range(12):
            x = batches[turn]
            x = x.to("lazy") if door == "device" else x
            if turn % 4 == 3:
                with torch.no_grad():
                    losses.append(call(x).square().sum().item())
                continue
            loss = nn.functional.cross_entropy(call(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if turn == 8:
                torchlazy.wait_for_compile()
        return losses

    torch.manual_seed(0)
    batches = [torch.randint(0, 20, (3, 5)) for _ in range(12)]
    first = Model()
    wanted = train("eager", copy.deepcopy(first))
    with torchlazy.lazy_mode() if door == "mode" else contextlib.nullcontext():
        found = train(door, first.to("lazy") if door == "device" else first)
    assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("tiers", ["on", "off"])
def test_a_workspace_that_nobody_gets_is_none(tiers: str) -> None:
    torchlazy.config.tiers = tiers
    x, w = torch.randn(3, 4), torch.randn(4)
    for is_on in (True, False):
        with torchlazy.lazy_mode(), torch.set_grad_enabled(is_on):
            found = _recurrent(w, x)
            assert (found[3] is None) is not is_on
            with torch.set_grad_enabled(not is_on):  # whatever holds where the trace is cut
                torchlazy.sync()
        torch.testing.assert_close(found[0], _recurrent(w, x)[0])


@pytest.mark.parametrize("asked", [True, False])
def test_attention_on_a_gpu_gives_no_log_sum_exp_unless_asked(asked: bool) -> None:
    device = torch.device("cuda", 0)
    heads = geometry((2, 4, 8, 16), (512, 128, 16, 1), 0, torch.float16, device, "cuda:0")
    op = aten._scaled_dot_product_cudnn_attention.default
    try:
        (_, logsumexp, *_), _ = infer(op, [heads, heads, heads, None, asked, 0.0, False, False], {}, device, "cuda:0")
    except Exception as why:  # this torch has no CUDA
        pytest.skip(str(why))
    assert (logsumexp is not None) is asked

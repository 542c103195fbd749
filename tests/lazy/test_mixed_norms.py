"""Norms of half precision with float32 parameters on the CPU: dtypes as eager's, so that a backward after a cut works.

Invariant: the oracle is torch on ordinary CPU tensors.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torchlazy

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
STATISTICS = {
    "layer": lambda x, w: aten.native_layer_norm(x, (4,), w, w, 1e-5),
    "layer without parameters": lambda x, w: aten.native_layer_norm(x, (4,), None, None, 1e-5),
    "group": lambda x, w: aten.native_group_norm(x[..., None], w, w, 6, 4, 1, 2, 1e-5),
    "batch": lambda x, w: aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5),
    "batch with running statistics": lambda x, w: aten.native_batch_norm(
        x, None, None, w.clone(), w.clone(), True, 0.1, 1e-5
    ),
    "batch in evaluation": lambda x, w: aten.native_batch_norm(x, None, None, w.clone(), w.clone(), False, 0.1, 1e-5),
}


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("parameters", [torch.float32, None], ids=["float32", "half"])
@pytest.mark.parametrize("name", STATISTICS)
def test_results_have_the_dtypes_of_eager(name: str, parameters: torch.dtype | None, half: torch.dtype) -> None:
    x, w = torch.randn(6, 4).to(half), torch.rand(4).to(parameters or half)
    want = STATISTICS[name](x, w)
    have = STATISTICS[name](x.to("lazy"), w.to("lazy"))
    for mine, theirs in zip(have, want, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(mine.cpu(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("device_in_python")
@pytest.mark.parametrize("module", [torch.nn.LayerNorm(4), torch.nn.GroupNorm(2, 4), torch.nn.BatchNorm1d(4)], ids=repr)
def test_backward_after_a_cut_under_autocast(module: torch.nn.Module) -> None:
    want, have = [], []
    for found, device in ((want, "cpu"), (have, "lazy")):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), copy.deepcopy(module)).to(device)
        x = torch.randn(6, 3).to(device)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=device == "cpu"),
            torch.autocast("lazy", torch.bfloat16, enabled=device == "lazy"),
        ):
            loss = net(x).float().square().sum()
        torchlazy.flush()
        loss.backward()
        found += [loss, *(p.grad for p in net.parameters())]
        net.zero_grad()
    for mine, theirs in zip(have, want, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine.cpu(), theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(("training", "stats"), [(False, True), (True, True), (True, False)])
def test_cudnn_s_norm_is_recorded(training: bool, stats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch takes it in float32, for norms in evaluation, too."""
    monkeypatch.setattr(torchlazy.config, "native_device", "off")
    given = [torch.randn(4, 3, 5), torch.ones(3), torch.zeros(3)]
    mean, var = (torch.full((3,), 0.5), torch.full((3,), 2.0)) if stats else (None, None)
    lazy = [t.to("lazy") if t is not None else None for t in (*given, mean, var)]
    torchlazy.reset_metrics()
    found = torch.ops.aten.cudnn_batch_norm(*lazy, training, 0.1, 1e-5)
    wanted = torch.ops.aten.native_batch_norm(*given, mean, var, training, 0.1, 1e-5)
    for have, want in zip(found[:3], wanted, strict=True):
        torch.testing.assert_close(have.cpu(), want)
    assert found[3].shape == (0,) and found[3].dtype is torch.uint8
    assert mean is None or torch.allclose(lazy[3].cpu(), mean)
    assert not torchlazy.metrics()["fallbacks"]

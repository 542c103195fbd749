"""Convolutions in another form: the same sums, through the compiler, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.plan import pipeline
from torchlazy.prims import ops
from torchlazy.prims.passes import conv_forms as stage
from torchlazy.prims.passes.conv_layout import channels_last_convolutions
from torchlazy.prims.verify import PRIMS, verify


@pytest.fixture
def formed(monkeypatch):
    """Give small convolutions on the CPU their other form too, and its layout."""
    made = []

    def change(graph):
        found = stage.other_forms(graph, device="cpu", least_pixels=1)
        verify(found, PRIMS)
        made.append((graph, found))
        return found

    monkeypatch.setattr(pipeline, "other_forms", change)
    monkeypatch.setattr(pipeline, "channels_last_convolutions", lambda g: channels_last_convolutions(g, device="cpu"))
    return made


@pytest.fixture(autouse=True)
def compiled_at_once():
    config = torchlazy.config
    before = config.tiers, config.strict, config.store, config.dynamic
    # Two cases of one structure would share a program for all sizes, and the second case would form its graph again.
    config.tiers, config.strict, config.store, config.dynamic = "off", True, "off", "off"
    yield
    config.tiers, config.strict, config.store, config.dynamic = before


IMAGES = [  # channels, size, kernel, stride, padding
    (3, (14, 18), 7, 2, 3),
    (3, (15, 13), 3, 2, 1),
    (1, (17, 14), 5, 3, 0),
    (4, (13, 14), (5, 4), 2, (2, 1)),
    (3, (12, 8), 4, 4, 0),
    (2, (6, 9), (2, 3), (2, 3), 0),
]


@pytest.mark.parametrize("case", IMAGES)
def test_images_of_few_channels(formed, case):
    channels, size, kernel, stride, padding = case
    layers = nn.Sequential(nn.Conv2d(channels, 8, kernel, stride, padding, bias=False), nn.GELU(), nn.Conv2d(8, 4, 1))
    _check(formed, layers, torch.randn(2, channels, *size), needs_grad=False)
    before, after = _with_backward(formed)
    assert len(before) == len(after)
    assert not any(node.target is ops.convolution and node.args[0].meta["val"].shape[1] == channels for node in after)


DEPTHWISE = [  # size, kernel, padding, dilation
    ((9, 8), 7, 3, 1),
    ((7, 7), 3, 0, 1),
    ((9, 9), (3, 5), (2, 4), (1, 2)),
]


@pytest.mark.parametrize("case", DEPTHWISE)
def test_depthwise_gradients(formed, case):
    size, kernel, padding, dilation = case
    conv = nn.Conv2d(6, 6, kernel, padding=padding, dilation=dilation, groups=6, bias=False)
    _check(formed, nn.Sequential(nn.SiLU(), conv, nn.SiLU()), torch.randn(2, 6, *size), needs_grad=True)
    _, after = _with_backward(formed)
    (backward,) = (node for node in after if node.target is ops.convolution_backward)
    assert backward.kwargs["output_mask"] == (False, True, False)
    assert sum(node.target is ops.convolution for node in after) == 2


STAYS = [
    nn.Conv2d(6, 6, 3, padding=3, groups=6, bias=False),  # more padding than the flipped kernel can take away
    nn.Conv2d(6, 6, 3, stride=2, groups=6, bias=False),
    nn.Conv2d(6, 12, 3, groups=6, bias=False),
    nn.Conv2d(6, 6, 3, stride=2, bias=False),
]


@pytest.mark.parametrize("conv", STAYS, ids=["padding", "stride", "multiplier", "channels"])
def test_others_stay(formed, conv):
    _check(formed, nn.Sequential(nn.SiLU(), conv, nn.SiLU()), torch.randn(2, 6, 8, 8), needs_grad=True)
    assert all(before is after for before, after in formed)


def test_float32_and_small_images_stay(formed):
    conv = nn.Conv2d(3, 4, 4, 4, bias=False)
    found = _run(conv, torch.randn(2, 3, 8, 8), "lazy", False, None)
    assert found
    for before, after in formed:
        assert before is after
        assert stage.other_forms(before) is before


def _check(formed, layers: nn.Module, x: torch.Tensor, needs_grad: bool) -> None:
    wanted = _run(layers, x, "cpu", needs_grad, torch.bfloat16)
    found = _run(layers, x, "lazy", needs_grad, torch.bfloat16)
    assert formed
    for (a, strides), (b, wanted_strides) in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * float(b.abs().max()))
        assert strides == wanted_strides


def _run(layers, x, device, needs_grad, dtype):
    torch.manual_seed(0)
    for module in layers.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    moved = layers.to(device)
    x = x.to(device).detach().requires_grad_(needs_grad)
    with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        out = moved(x)
    out.float().square().sum().backward()
    results = [out.detach(), *(p.grad for p in moved.parameters()), *([x.grad] if needs_grad else [])]
    found = [(t.float().cpu(), t.stride()) for t in results]
    layers.to("cpu").zero_grad()
    return found


def _with_backward(formed):
    """The nodes of the graph that holds the backward, before and after."""
    found = [pair for pair in formed if any(n.target is ops.convolution_backward for n in pair[0].nodes)]
    (pair,) = found
    calls = (ops.convolution, ops.convolution_backward, ops.mm)
    before = [n for n in pair[0].nodes if n.target in calls]
    after = [n for n in pair[1].nodes if n.target in calls]
    return before, after

"""Convolutional networks on a CUDA GPU: compiled steps give eager's losses and gradients, laid out as eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    before = torchlazy.config.tiers, torch.backends.cudnn.allow_tf32
    torchlazy.config.tiers, torch.backends.cudnn.allow_tf32 = "off", False
    yield
    torchlazy.config.tiers, torch.backends.cudnn.allow_tf32 = before


def _pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, 1, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def _depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.Hardswish(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 5, 2, 2, groups=32), nn.Conv2d(32, 48, 1), nn.AvgPool2d(3, 2, 1), nn.Flatten(),
        nn.LazyLinear(10),
    )  # fmt: skip


def _patches() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 8, 8), nn.GELU(), nn.Conv2d(64, 64, 7, padding=3, groups=64), nn.GELU(), nn.Flatten(2),
        nn.LayerNorm(256), nn.Flatten(), nn.Linear(64 * 256, 10),
    )  # fmt: skip


BUILDS = {"pooled": _pooled, "depthwise": _depthwise, "patches": _patches}


@pytest.mark.parametrize("is_step", [True, False], ids=["step", "module"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", BUILDS)
def test_training(name: str, dtype: torch.dtype | None, is_step: bool) -> None:
    torch.manual_seed(0)
    model = BUILDS[name]().cuda()
    x, y = torch.randn(8, 3, 128, 128, device="cuda"), torch.randint(10, (8,), device="cuda")
    model(x)
    wanted = _gradients(copy.deepcopy(model), x, y, dtype)
    if is_step:
        found = _gradients(copy.deepcopy(model), x, y, dtype, prepare_step=torchlazy.compile)
    else:
        found = _gradients(copy.deepcopy(model), x, y, dtype, prepare_model=torchlazy.compile)
    exact = _gradients(copy.deepcopy(model), x, y, None) if dtype else wanted
    for a, b, c in zip(found, wanted, exact, strict=True):
        assert a.stride() == b.stride()
        a, b, c = a.double(), b.double(), c.double()
        limit = 1e-3 if dtype is None else 2.0 * float((b - c).norm() / c.norm()) + 2e-2
        assert float((a - c).norm()) <= limit * float(c.norm()) + 1e-5, (name, a.shape)


def _gradients(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype | None, *,
    prepare_step: Callable[[Any], Any] = lambda step: step, prepare_model: Callable[[Any], Any] = lambda model: model,
) -> list[torch.Tensor]:  # fmt: skip
    """Three steps; the last loss and the gradients that it leaves."""
    forward = prepare_model(model)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = forward(x)
        loss = F.cross_entropy(out.float(), y)
        for parameter in model.parameters():
            parameter.grad = None
        loss.backward()
        return loss.detach()

    run = prepare_step(step)
    for _ in range(3):
        loss = run()
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

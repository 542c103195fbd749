"""`nn.LazyLinear` and its like: moved to the lazy device, made on it, copied, and trained as in eager."""

from __future__ import annotations

import copy

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter


def lazily(**kwargs):
    return nn.Sequential(
        nn.LazyConv2d(4, 3, **kwargs), nn.LazyBatchNorm2d(**kwargs), nn.Flatten(), nn.LazyLinear(2, **kwargs)
    )


def fill(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)


def train(model, device, optimizer=None):
    x = torch.linspace(-1, 1, 2 * 3 * 25).reshape(2, 3, 5, 5).to(device)
    model(x)
    fill(model)
    model[1].reset_running_stats()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.001)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [t.detach().cpu() for t in model.state_dict().values()]


WAYS = {
    "moved": lambda: lazily().to("lazy"),
    "made": lambda: lazily(device="lazy"),
    "moved and cast": lambda: lazily().double().to("lazy").float(),
    "there and back and there": lambda: lazily().to("lazy").cpu().to("lazy"),
}


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_in_eager(way):
    have = train(WAYS[way](), "lazy")
    for a, b in zip(have, train(lazily(), "cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_copy_remembers_the_device():
    copied = copy.deepcopy(nn.LazyLinear(2, device="lazy"))
    copied(torch.ones(1, 3, device="lazy"))
    assert torchlazy.is_lazy(copied.weight)
    assert copied.weight.device.type == "lazy"


def test_under_the_default_device():
    with torch.device("lazy"):
        model = lazily()
    model(torch.ones(1, 3, 5, 5, device="lazy"))
    assert {p.device.type for p in model.parameters()} == {"lazy"}
    assert {b.device.type for b in model.buffers()} == {"lazy"}


def test_parameters_stay_the_same_objects():
    model = lazily().to("lazy")
    before = list(model.parameters())
    optimizer = torch.optim.SGD(before, 0.001)
    assert all(isinstance(p, UninitializedParameter) for p in before[:2])
    have = train(model, "lazy", optimizer)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(torchlazy.is_lazy(p) and isinstance(p, nn.Parameter) and p.requires_grad for p in before)
    for a, b in zip(have, train(lazily(), "cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_in_lazy_mode():
    torchlazy.config.rng = "eager"
    with torchlazy.lazy_mode():
        have = train(lazily(), "cpu")
    for a, b in zip(have, train(lazily(), "cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_away_from_the_lazy_device_they_are_torchs_own():
    model = lazily().to("lazy").to("cpu", torch.float64)
    assert isinstance(model[0].weight, UninitializedParameter)
    assert isinstance(model[1].running_mean, UninitializedBuffer)
    assert model(torch.ones(1, 3, 5, 5, dtype=torch.float64)).dtype == torch.float64
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_dtype_on_the_lazy_device():
    model = nn.LazyLinear(2, device="lazy", dtype=torch.float64)
    assert model(torch.ones(1, 3, device="lazy", dtype=torch.float64)).dtype == torch.float64
    model = nn.LazyLinear(2, device="lazy").double()
    assert model(torch.ones(1, 3, device="lazy", dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_compiled_lazy_module_gets_its_parameters_in_its_first_call(device, compiled):
    model = lazily().to(device)
    step = torchlazy.compile(model)
    x = torch.linspace(-1, 1, 2 * 3 * 25).reshape(2, 3, 5, 5).to(device)
    shapes = [tuple(step(x).shape) for _ in range(12)]
    assert shapes == [(2, 2)] * 12 and model[3].weight.shape == (2, 36)
    torch.testing.assert_close(step(x), model(x))
    assert step.report().replays > 0

"""Training in `lazy_mode()` over ordinary CPU tensors, steps in and around blocks: what eager does."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F

from tests.lazy.compare import Cases, data, ints
from tests.lazy.mode_blocks import check_as_in_eager, train, two_layers
from tests.lazy.models import convnet, mlp

case = Cases()


@case.parametrize()
@pytest.mark.parametrize("tiers", ["on", "off"])
def test_as_in_eager(f, tiers):
    check_as_in_eager(f, tiers)


@case
def training_a_step_a_block(block):
    return train(block, two_layers(), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))


@case
def training_in_one_block(block):
    return train(block, two_layers(), lambda p: torch.optim.AdamW(p, 0.01), around="all")


@case
def training_with_batch_norm(block):
    return train(block, mlp(), lambda p: torch.optim.Adam(p, 0.01))


@case
def training_a_convnet(block):
    return train(block, convnet(), lambda p: torch.optim.SGD(p, 0.05), steps=3, x_shape=(4, 1, 8, 8))


@case
def resumed_from_a_checkpoint(block):
    with block():
        torch.manual_seed(3)
        model, file = two_layers(), io.BytesIO()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(5)
        torch.save((model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), generator.get_state()), file)
        file.seek(0)
        for _ in range(2):
            weights, state, of_torch, of_generator = torch.load(file, map_location="cpu", weights_only=True)
            file.seek(0)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            torch.set_rng_state(of_torch.clone())
            generator.set_state(of_generator)
            x = torch.randn(4, next(model.parameters()).shape[1]) + torch.rand(1, generator=generator)
            model(x).square().mean().backward()
            optimizer.step()
    return list(model.state_dict().values())


@case
def optimizer_outside(block):
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(3):
        with block():
            optimizer.zero_grad()
            loss = model(data("cpu", 6, 4, seed=step)).square().mean()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.state_dict(), [p.grad for p in model.parameters()]


@case
def backward_outside(block):
    model = two_layers()
    x = data("cpu", 6, 4, grad=True)
    with block():
        loss = model(x).square().mean()
    loss.backward()
    return loss, x.grad, [p.grad for p in model.parameters()]


@case
def forward_outside_backward_inside(block):
    model = two_layers()
    x = data("cpu", 6, 4, grad=True)
    loss = model(x).square().mean()
    with block():
        loss.backward()
        norm = x.grad.norm()
    return norm, x.grad, [p.grad for p in model.parameters()]


@case
def gradients_gathered_across_blocks(block):
    model = two_layers()
    for seed in range(3):
        with block() if seed != 1 else contextlib.nullcontext():
            model(data("cpu", 6, 4, seed=seed)).square().mean().backward()
    return [p.grad for p in model.parameters()]


@case
def zeroed_gradients(block):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(3):
        with block():
            optimizer.zero_grad(set_to_none=False)
            model(data("cpu", 6, 4, seed=seed)).square().mean().backward()
            optimizer.step()
    return model.state_dict()


@case
def data_loader_and_metrics(block):
    x, y = data("cpu", 12, 4), ints("cpu", 12, high=2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total, right = 0.0, 0
    with block():
        for a, b in loader:
            optimizer.zero_grad()
            out = model(a)
            loss = F.cross_entropy(out, b)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(a)
            right += (out.argmax(1) == b).sum().item()
    return round(total, 4), right, model.state_dict()


def test_parameters_keep_their_memory_and_objects():
    model = two_layers()
    before = [(id(p), p.data_ptr(), type(p)) for p in model.parameters()]
    train(torchlazy.lazy_mode, model, lambda p: torch.optim.AdamW(p, 0.01))
    train(torchlazy.lazy_mode, model, lambda p: torch.optim.SGD(p, 0.01), around="all")
    assert [(id(p), p.data_ptr(), type(p)) for p in model.parameters()] == before


def test_a_step_is_one_program():
    torchlazy.config.tiers = "off"
    torchlazy.config.strict = True
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(5):
        if step == 2:
            torchlazy.reset_metrics()
        with torchlazy.lazy_mode():
            optimizer.zero_grad()
            model(data("cpu", 6, 4)).square().mean().backward()
            optimizer.step()
    counts = torchlazy.metrics()
    assert counts["cuts"] == {"optimizer step": 3}, counts["cuts"]
    assert (counts["hits"], counts["compiles"]) == (3, 0)

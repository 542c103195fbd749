"""Compiled modules and steps of less usual programs: blocks in turns, second derivatives, factorisations.

Invariant: a program trains plain and with its module compiled from one seed to equal losses and parameters, without a
warning; its steady calls are replayed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchlazy
from torch import nn

pytestmark = [pytest.mark.usefixtures("operator_by_operator"), pytest.mark.filterwarnings("error:torchlazy.compile")]
STEPS = 10


def block_in_turns(model, x):
    """One block again and again: each of its inputs is computed from its own parameters by an earlier call."""
    for _ in range(4):
        x = x + 0.5 * model(x)
    return x.square().mean()


def runge_kutta(model, x):
    h = 0.25
    for _ in range(2):
        k1 = model(x)
        k2 = model(x + h / 2 * k1)
        x = x + h * model(x + h / 2 * k2)
    return (x - 1).abs().mean()


def equation_of_second_order(model, x):
    """Its residual needs second derivatives; a plain call at the boundary has another number of rows."""
    x.requires_grad_()
    value = model(x).sum(1, keepdim=True)
    first = torch.autograd.grad(value, x, torch.ones_like(value), create_graph=True)[0][:, :1]
    second = torch.autograd.grad(first, x, torch.ones_like(first), create_graph=True)[0][:, :1]
    return (value * first - second).square().mean() + model(x.detach()[:3]).square().mean()


def gradient_penalty(model, x):
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x.detach()).mean() + (gradient.norm(2, dim=1) - 1).square().mean()


def train(program: Any, device: str, compile: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    used, optimizer = compile(model), torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for i in range(STEPS):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).to(device)
        loss = program(used, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters()], used


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("program", [block_in_turns, runge_kutta, equation_of_second_order, gradient_penalty])
def test_as_plain_and_replayed(program, device):
    wanted, _ = train(program, device, lambda model: model)
    found, used = train(program, device, torchlazy.compile)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    report = used._compiled_call.report()
    assert not report.alarm and report.verified == 0 and report.captures <= 3, report


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_gaussian_process_is_replayed(device):
    """A factorisation that went well is a branch that replays check."""

    def fit(compile):
        scale, noise = (nn.Parameter(torch.zeros(1, device=device)) for _ in range(2))
        optimizer = torch.optim.SGD([scale, noise], 0.02)
        made = []

        def step(x, y):
            kernel = torch.exp(-0.5 * (x - x.T).square() / scale.exp()) + noise.exp() * torch.eye(len(x), device=device)
            factor = torch.linalg.cholesky(kernel)
            fitted = torch.cholesky_solve(y[:, None], factor)[:, 0]
            loss = 0.5 * y @ fitted + factor.diagonal().log().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = compile(step)
        for i in range(STEPS):
            x = torch.rand(7, 1, generator=torch.Generator().manual_seed(i)).to(device)
            made.append(run(x, torch.sin(6 * x[:, 0])))
        return [*made, scale, noise], run

    (wanted, _), (found, run) = fit(lambda function: function), fit(torchlazy.compile)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    report = run.report()
    assert not report.alarm and report.verified == 0 and report.captures <= 3, report


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_factorisation_that_fails_raises_in_a_replay_too(device):
    run = torchlazy.compile(lambda x: torch.linalg.inv(x) @ x)
    identity = torch.eye(3, device=device)
    for i in range(6):
        torch.testing.assert_close(run(identity * (i + 1)), identity)
    with pytest.raises(torch.linalg.LinAlgError, match="diagonal element 1 is zero"):
        run(identity * 0)
    torch.testing.assert_close(run(identity * 4), identity)
    assert run.report().verified == 0 and run.report().captures <= 2, run.report()

"""Gradients that a compiled call writes by hand (`x.grad = t`), on what needs gradients and on what does not."""

from __future__ import annotations

import pytest
import torch
import torchlazy

pytestmark = pytest.mark.usefixtures("operator_by_operator")


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("again", [False, True], ids=["new arguments", "one argument"])
def test_of_arguments(device, needs, again):
    def step(x, t):
        x.grad = t * 2
        return x.detach() + 1

    run = torchlazy.compile(step, audit=False)
    x = torch.ones(2, device=device, requires_grad=needs)
    for number in range(7):
        if not again:
            x = torch.ones(2, device=device, requires_grad=needs)
        before = x.grad
        run(x, torch.full((2,), float(number), device=device))
        assert x.grad is not before and x.grad.tolist() == [2.0 * number] * 2
        assert device == "lazy" or type(x.grad) is torch.Tensor
    assert run.report().replays >= 5, run.report()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_another_argument_is_the_gradient_itself(device):
    def step(x, t):
        x.grad = t
        return x.detach() + 1

    run = torchlazy.compile(step, audit=False)
    for _ in range(5):
        x, t = torch.ones(2, device=device), torch.ones(2, device=device)
        run(x, t)
        assert x.grad is t
    assert run.report().replays >= 3, run.report()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_of_state_that_needs_none(device):
    buffer = torch.ones(2, device=device)

    def step(t):
        buffer.grad = t + 1

    run = torchlazy.compile(step, audit=False)
    for number in range(6):
        run(torch.full((2,), float(number), device=device))
        assert buffer.grad.tolist() == [number + 1.0] * 2
        assert device == "lazy" or type(buffer.grad) is torch.Tensor
    assert run.report().replays >= 3, run.report()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_call_that_looks_whether_there_is_one(device):
    def step(x, t):
        if x.grad is None:
            x.grad = t * 2
        else:
            x.grad = None

    run = torchlazy.compile(step, audit=False)
    x, t = torch.ones(2, device=device), torch.ones(2, device=device)
    for number in range(8):
        run(x, t)
        assert (x.grad is None) == bool(number % 2)
        fresh = torch.ones(2, device=device)
        run(fresh, t)
        assert fresh.grad.tolist() == [2.0, 2.0]
    assert run.report().replays >= 10, run.report()

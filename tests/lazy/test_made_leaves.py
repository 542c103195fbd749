"""Compiled calls that make leaves of their own: results by them, and the leaves themselves among the results."""

from __future__ import annotations

import pytest
import torch
import torchlazy
from torch import nn

from tests.lazy.compare import data


def _of_views(x):
    leaf = x.view_as(x).requires_grad_()
    return torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)[0]


def _of_detached(x):
    return x.detach().requires_grad_() * 2


def _of_made(x):
    leaf = (x * 2).requires_grad_()
    return torch.stack([leaf.exp(), leaf.sin()]).view(2, -1)


def _of_functional(x):
    return torch.autograd.functional.jacobian(lambda y: torch.tanh(y) * 2, x, create_graph=True)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("function", [_of_views, _of_detached, _of_made, _of_functional], ids=lambda f: f.__name__)
def test_a_result_by_a_leaf_of_the_call_needs_gradients_in_replays(function, device, compiled):
    step = torchlazy.compile(function, audit=False)
    for seed in range(4):
        x = data(device, 3, seed=seed)
        made, wanted = step(x), function(x.cpu())
        torch.testing.assert_close(made.cpu(), wanted)
        assert made.requires_grad and not made.is_leaf and not x.requires_grad
        made.sum().backward()  # the gradient goes to a leaf that nobody has
    assert step.report().replays > 0


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("kept", [False, True], ids=["returned", "kept"])
def test_a_leaf_of_the_call_that_is_left_behind_gets_its_gradient(kept, device, compiled):
    model = nn.Linear(3, 3).to(device)
    plain = nn.Linear(3, 3)
    plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    held: dict[str, torch.Tensor] = {}

    def run(model, x):
        leaf = x.detach().requires_grad_()
        loss = model(leaf).pow(2).sum()
        if kept:
            held["leaf"] = leaf
            return loss
        return loss, leaf

    step = torchlazy.compile(run, audit=False)
    for seed in range(6):
        x = data(device, 2, 3, seed=seed)
        results = []
        for function, module, given in ((step, model, x), (run, plain, x.cpu())):
            found = function(module, given)
            loss, leaf = (found, held["leaf"]) if kept else found
            assert leaf.is_leaf and leaf.requires_grad
            loss.backward()
            results.append((leaf.grad.cpu(), module.weight.grad.cpu()))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("make", [torch.zeros_like, torch.detach], ids=["made", "window"])
def test_a_leaf_of_the_call_keeps_the_gradient_that_it_got_there(make, device, compiled):
    def attack(x):
        change = make(x).requires_grad_()
        ((x + change) ** 3).sum().backward()
        return change

    step = torchlazy.compile(attack, audit=False)
    for seed in range(5):
        x = data(device, 3, seed=seed)
        made, wanted = step(x), attack(x.cpu())
        assert made.is_leaf and made.requires_grad
        torch.testing.assert_close(made.grad.cpu(), wanted.grad)

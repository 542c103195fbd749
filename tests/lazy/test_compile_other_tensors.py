"""Compiled calls that meet tensors of other kinds (jagged nested, sparse): values are eager's, the report says why."""

from __future__ import annotations

import copy

import pytest
import torch
import torchlazy
from torch import nn

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def ragged_step(model, optimizer):
    def step(rows):
        made = model(torch.nested.nested_tensor(rows, layout=torch.jagged))
        loss = made.values().square().mean() + torch.nested.to_padded_tensor(made, 0.0).sum() * 0.01
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def learner(model):
    return ragged_step(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_jagged_tensors_made_in_the_call():
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    model = copy.deepcopy(plain)
    step = torchlazy.compile(learner(model))
    expected = learner(plain)
    for turn in range(4):
        rows = [torch.randn(2 + turn % 2, 4), torch.randn(3, 4)]
        torch.testing.assert_close(step(rows), expected(rows))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert "NestedTensor" in str(step.report())


def test_a_jagged_argument():
    run = torchlazy.compile(lambda x: torch.nn.functional.relu(x * 2).sum())
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert [run(ragged).item() for _ in range(3)] == [36.0] * 3


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:torchlazy.compile.*runs its Python")
def test_a_sparse_tensor_that_the_call_names(device, make):
    graph = make(torch.eye(5).roll(1, 0))
    weight = torch.linspace(-1, 1, 15).view(5, 3).to(device)

    def step(x):
        passed = torch.sparse.mm(graph, (x @ weight).cpu())
        return (x @ weight).tanh(), passed.sum(0)

    run = torchlazy.compile(step)
    for turn in range(4):
        x = torch.linspace(-turn, 2, 25).view(5, 5).to(device)
        torch.testing.assert_close([y.cpu() for y in run(x)], [y.cpu() for y in step(x)])

"""Compiled calls under `inference_mode`, which hands operators that are made of others over whole."""

from __future__ import annotations

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.lazy.compare import data


def _item(x):
    return (x * 2).sum().item()


def _branch(x):
    if x.sum() > 0:
        return x + 1
    return x * 2 if torch.is_nonzero(x[0, 0] > 0) else x - 1


def _position(x):
    return x[int(x[:, 0].argmax())] * float(x.max())


def _positions(x):
    rows, columns = torch.where(x > 0)
    return rows, columns, x[x > 0].sum()


def _on_the_host(x):
    count = torch.zeros(())
    count += 1
    return count.item() + x.mean().item()


def _list(x):
    return x.double().tolist()


def _parts(x):
    return torch.tensor_split(x, 2), F.linear(x, x), torch.einsum("ij,jk->k", x, x), x.reshape(-1).to(torch.float64)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize(
    "function", [_item, _branch, _position, _positions, _on_the_host, _list, _parts], ids=lambda f: f.__name__
)
def test_values_are_those_of_each_call(function, device, compiled):
    def inferring(x):
        with torch.inference_mode():
            return function(x)

    step = torchlazy.compile(inferring, audit=False)
    for seed in range(6):
        x = data(device, 3, 3, seed=seed)
        for made, right in zip(tree_leaves(step(x)), tree_leaves(inferring(x.cpu())), strict=True):
            made, right = torch.as_tensor(made).cpu(), torch.as_tensor(right)
            torch.testing.assert_close(made, right, rtol=1e-5, atol=1e-6)


def test_a_number_read_under_inference_mode_is_replayed(compiled):
    def inferring(x):
        with torch.inference_mode():
            return _item(x)

    step = torchlazy.compile(inferring, audit=False)
    assert [step(torch.full((2,), float(value))) for value in range(4)] == [0.0, 4.0, 8.0, 12.0]
    assert step.report().replays == 3


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_what_is_made_is_no_tensor_for_autograd(device):
    """Results and state made inside are inference tensors: writes, versions and gradients raise as in eager."""

    class Held:
        value = None

    def call(x, held):
        with torch.inference_mode():
            held.value = x + 1
            made = x * 2
            return made, made.view(-1), x.view(-1)

    def raised(function):
        try:
            function()
        except RuntimeError as error:
            return str(error)[:40]
        return ""

    def told(function):
        held = Held()
        given = torch.arange(4.0).view(2, 2).to(device)
        found = [*function(given, held), held.value]
        found[2].add_(1)
        return [
            (
                x.is_inference(), x.tolist(), raised(lambda x=x: x.add_(1)), raised(lambda x=x: x._version),
                raised(lambda x=x: x * torch.ones(1, requires_grad=True).to(device)),
            ) for x in found
        ]  # fmt: skip

    expected = told(call)
    assert [row[0] for row in expected] == [True, True, False, True]
    run = torchlazy.compile(call)
    for _ in range(6):
        assert told(run) == expected
    assert run.report().replays

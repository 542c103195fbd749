"""Arguments that are windows on larger memory, of which a compiled call asks what no copy of them can answer: the call
is given the window itself from there on.

Invariant: every function of `FUNCTIONS` meets every window of `WINDOWS`; what the caller sees is as in eager.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy

pytestmark = [pytest.mark.usefixtures("operator_by_operator"), pytest.mark.filterwarnings("ignore:torchlazy.compile")]

WINDOWS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "rows": lambda data, i: data[i : i + 2],
    "columns": lambda data, i: data[:, i : i + 3],
    "every other, transposed": lambda data, i: data[i % 2 :: 2, ::2][:2].t(),
}


def needs_a_gradient(x, y):
    x.requires_grad_()
    return x.permute(1, 0), (x * x).sum()


def needs_a_gradient_by_name(x, y):
    x.requires_grad = True
    return x[0], (x * x).sum()


def writes_and_needs_a_gradient(x, y):
    x.add_(3)
    early = x[0]
    x.requires_grad_()
    with torch.no_grad():
        x.mul_(2)
    return early, (x * early).sum()


def writes_through_an_early_view(x, y):
    early = x[0]
    x.requires_grad_()
    early.add_(1)
    return early, x.sum()


def trains(x, y):
    x.requires_grad_()
    (x * x).sum().backward()
    with torch.no_grad():
        x -= 0.5 * x.grad
    return x.grad


def hooked(x, y):
    x.requires_grad_()
    x.register_hook(lambda grad: grad * 3)
    return (x * x).sum()


def takes_a_gradient(x, y):
    x.grad = x + 1


def gives_its_gradient(x, y):
    return x.grad


def goes_elsewhere(x, y):
    x.data = y
    x.add_(1)
    return x * 1


def goes_elsewhere_by_a_view(x, y):
    x.data = y[:1]
    x.add_(1)
    return x[0]


def writes_and_goes_elsewhere(x, y):
    early = x[0]
    x.mul_(2)
    x.data = y[1:]
    early.add_(5)
    return early, x


def goes_by_set(x, y):
    x.set_(y)
    x.add_(1)
    return x


def another_goes_to_it(x, y):
    y.data = x
    y.add_(1)
    return y[0], x * 1


def another_goes_to_a_view(x, y):
    early = x[1]
    y.data = early.data
    x.mul_(2)
    return early, y


def another_is_set_to_a_view(x, y):
    y.set_(x[1])
    return y.add_(1)


def grows(x, y):
    x.resize_(2, 2)
    x.fill_(3)
    return x[1]


def grows_like(x, y):
    x.resize_as_(y[:1])
    return x.zero_()


def gives_an_array(x, y):
    x.add_(1)
    return x.numpy()


def gives_arrays_of_views(x, y):
    early = x.detach()
    x.add_(1)
    return x[1:].numpy(), early.numpy()


def is_set_to_a_detached_one(x, y):
    x.set_(y.detach())


def looks_around(x, y):
    early = x.detach()
    wide = torch.as_strided(early, (1, 2), (1, 3), 0)
    early.data.add_(1)
    x.data.mul_(2)
    early.add_(3)
    return wide * 1, early


def writes_around(x, y):
    early = x[1]
    early.mul_(2)
    early.as_strided((2, 2), (3, 1), 2).add_(5)
    x.add_(early.sum())
    return early


def gives_a_copy_on_its_memory(x, y):
    return copy.copy(x)


def gives_a_deep_copy(x, y):
    x.add_(1)
    return copy.deepcopy(x)


def stores_itself_and_needs_a_gradient(x, y):
    held = [x]
    x.requires_grad_()
    return held, {"x": x}


FUNCTIONS = [
    needs_a_gradient,
    needs_a_gradient_by_name,
    writes_and_needs_a_gradient,
    writes_through_an_early_view,
    trains,
    hooked,
    takes_a_gradient,
    gives_its_gradient,
    goes_elsewhere,
    goes_elsewhere_by_a_view,
    writes_and_goes_elsewhere,
    goes_by_set,
    another_goes_to_it,
    another_goes_to_a_view,
    another_is_set_to_a_view,
    grows,
    grows_like,
    gives_an_array,
    gives_arrays_of_views,
    is_set_to_a_detached_one,
    looks_around,
    writes_around,
    gives_a_copy_on_its_memory,
    gives_a_deep_copy,
    stores_itself_and_needs_a_gradient,
]


def sights(function: Any, window: Callable[[torch.Tensor, int], torch.Tensor], has_gradient: bool) -> list[Any]:
    """What the caller sees of several calls at several places."""
    found: list[Any] = []
    for turn in range(4):
        data, y = torch.arange(24.0).reshape(4, 6), torch.arange(100.0, 124.0).reshape(4, 6)
        x = window(data, turn % 3)
        if has_gradient:
            x.grad = torch.ones_like(x)
        versions = data._version, x._version, y._version
        result = function(x, y)
        raised = [now - was for was, now in zip(versions, (data._version, x._version, y._version), strict=True)]
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if leaf is not None]
        tensors = [torch.as_tensor(leaf) for leaf in leaves]
        loss = next((leaf for leaf in tensors if leaf.requires_grad and leaf.grad_fn and not leaf.dim()), None)
        if loss is not None:
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()
            found.append(gradient)
        with torch.no_grad():
            for number, leaf in enumerate(tensors):
                found.append((leaf.clone(), leaf is x, leaf is x.grad, leaf.requires_grad, leaf.stride()))
                leaf.add_(number + 1)
        grad = None if x.grad is None else x.grad.clone()
        facts = (x.requires_grad, x.is_leaf, tuple(x.shape), x.stride(), x.storage_offset(), x.grad is None)
        on = [x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in (data, y)]
        facts = (*facts, raised, tuple(y.shape), y.stride(), y.storage_offset())
        found += [data.clone(), y.clone(), x.detach().clone(), grad, facts, on]
    return found


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_caller_sees_what_eager_leaves(function: Any, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        has_gradient = function is gives_its_gradient
        expected = sights(function, WINDOWS[name], has_gradient)
        found = sights(torchlazy.compile(function), WINDOWS[name], has_gradient)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_later_calls_are_given_the_window() -> None:
    def moves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.data = y[:2]
        return x.add_(1) * 2

    call = torchlazy.compile(moves, audit=False)
    for turn in range(5):
        y = torch.ones(3, 6)
        assert torch.equal(call(torch.arange(24.0).reshape(4, 6)[1:3], y), torch.full((2, 6), 4.0)), turn
        assert torch.equal(y, torch.tensor([[2.0], [2.0], [1.0]]).expand(3, 6)), turn
    report = call.report()
    assert report.replays and any("a view of larger memory to be on other memory" in why for why in report.reasons)

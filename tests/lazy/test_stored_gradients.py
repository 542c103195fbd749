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


def accumulates(held):
    (held.model(torch.full((2, 2), 3.0, device=held.x.device)).sum()).backward()
    return held.model.weight.grad


def gives_and_clears(held):
    found = accumulates(held)
    held.model.zero_grad()
    return found


def lists(held):
    return [*(parameter.grad for parameter in held.model.parameters())].pop()


def hands_on(held):
    held.other.weight.grad = held.model.weight.grad
    return held.other.weight.grad


def exchanges(held):
    held.model.weight.grad, held.other.weight.grad = held.other.weight.grad, held.model.weight.grad
    return held.model.weight.grad


def keeps(held):
    held.kept = held.model.weight.grad
    return held.x + 1


def takes_a_number_on_the_host(held):
    return held.x * float(held.scale.grad)


def writes_on_the_host(held):
    with torch.no_grad():
        held.scale.sub_(held.scale.grad)
    return held.x + held.scale.detach()


GIVEN = [
    accumulates,
    gives_and_clears,
    lists,
    hands_on,
    exchanges,
    keeps,
    takes_a_number_on_the_host,
    writes_on_the_host,
]


class Held:
    """Parameters and gradients, on the device and (one of them) on the host."""

    def __init__(self, device):
        self.model = torch.nn.Linear(2, 1, bias=False).to(device)
        self.other = torch.nn.Linear(2, 1, bias=False).to(device)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.x, self.kept = torch.ones(2, device=device), None
        for one in (self.model.weight, self.other.weight):
            torch.nn.init.ones_(one)
            one.grad = torch.full_like(one, 5.0)
        self.scale.grad = torch.tensor(7.0)

    def seen(self, value):
        tensors = (value, self.model.weight.grad, self.other.weight.grad, self.kept, self.scale)
        same = [value is self.model.weight.grad, self.kept is self.model.weight.grad]
        return [None if x is None else x.tolist() for x in tensors] + same


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("step", GIVEN, ids=lambda step: step.__name__)
def test_gradients_of_the_state_that_a_call_gives_back(step, device):
    """They accumulate, and are assigned or reset from outside now and then."""
    mine, plain = Held(device), Held("cpu")
    run = torchlazy.compile(lambda: step(mine), audit=False)
    for turn in range(14):
        assert mine.seen(run()) == plain.seen(step(plain)), turn
        for held in (mine, plain):
            if turn in (4, 7):
                held.model.weight.grad = torch.full_like(held.model.weight, float(turn))
                held.scale.grad = torch.tensor(float(turn))
            if turn == 10 and step is accumulates:
                held.model.zero_grad()
    assert run.report().replays >= (0 if step is keeps else 6), run.report()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_an_argument_is_a_gradient_of_the_state(device):
    model = torch.nn.Linear(2, 1, bias=False).to(device)
    model.weight.grad = torch.full_like(model.weight, 5.0)

    def step(x):
        x.mul_(2)
        return model.weight.grad.sum()

    run = torchlazy.compile(step, audit=False)
    expected = 10.0
    for turn in range(8):
        is_it = turn not in (3, 4, 6)
        expected *= 1 + is_it
        assert float(run(model.weight.grad if is_it else torch.ones(1, 2, device=device))) == expected, turn


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("graph", [False, True], ids=["alone", "beside a result with a graph"])
def test_accumulated_inside_and_dropped_outside_now_and_then(device: str, graph: bool) -> None:
    def seen(wrap):
        torch.manual_seed(0)
        p, layer = torch.nn.Parameter(torch.randn(3).to(device)), torch.nn.Linear(3, 3).to(device)

        def step(x, k):
            (p * k).sum().backward()
            return layer(x) if graph else x * 2

        called, found = wrap(step), []
        for number in range(8):
            if number in (4, 6):
                p.grad = None
            called(torch.ones(3, device=device), 0.5)
            found.append(p.grad.tolist())
        return found

    assert seen(lambda step: torchlazy.compile(step, audit=False)) == seen(lambda step: step)

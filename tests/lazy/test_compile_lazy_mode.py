"""Compiled calls inside `lazy_mode()`: they are captured and replayed there, and give what they give outside."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.api import recorder
from torchlazy.lazy.record.tensor import LazyTensor

pytestmark = pytest.mark.usefixtures("operator_by_operator")
TURNS = 10


def modes(where: str, turn: int) -> contextlib.AbstractContextManager:
    inside = {"outside": False, "inside": True, "in turn": turn % 2 == 1}[where]
    return torchlazy.lazy_mode() if inside else contextlib.nullcontext()


def train(what: str, where: str, arguments: str):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    forward = torchlazy.compile(model) if what == "forward" else model

    def step(x, y):
        loss = F.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = torchlazy.compile(step) if what == "step" else step
    generator = torch.Generator().manual_seed(1)
    seen = []
    for turn in range(TURNS):
        x, y = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
        with modes(where, turn):
            loss = run(x * 1 if arguments == "made inside" else x, y)
            seen += [loss.item(), (loss + model[0].weight.detach().sum()).item()]
            if turn == 6:
                optimizer.param_groups[0]["lr"] = 0.02
    return [*seen, *(t.double().sum().item() for t in model.state_dict().values())], run if what == "step" else forward


@pytest.mark.parametrize("arguments", ["made inside", "made outside"])
@pytest.mark.parametrize("where", ["inside", "in turn"])
@pytest.mark.parametrize("what", ["forward", "step"])
def test_training(what, where, arguments):
    wanted, _ = train("plain", "outside", arguments)
    found, run = train(what, where, arguments)
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    report = run.report()
    assert report.replays >= 2 and report.replays + report.audits >= 5 and report.verified <= 1, report
    assert not report.alarm


def test_gradients_of_tensors_that_the_mode_made():
    weight = torch.ones(4, requires_grad=True)
    run = torchlazy.compile(lambda h: (h * weight).sin(), audit=False)
    for turn in range(5):
        weight.grad = None
        x = torch.full((4,), 0.1 * turn, requires_grad=True)
        with torchlazy.lazy_mode():
            h = x * 3
            out = run(h).sum()
            out.backward()
        wanted = 0.3 * turn * torch.cos(torch.full((4,), 0.3 * turn))
        torch.testing.assert_close(weight.grad, wanted)
        torch.testing.assert_close(x.grad, 3 * torch.cos(torch.full((4,), 0.3 * turn)))
    assert run.report().replays >= 3, run.report()


def test_writes_are_seen_on_both_sides():
    total = torch.zeros(3)

    def call(x):
        x.add_(1)
        total.add_(x)
        return total * 2

    run = torchlazy.compile(call, audit=False)
    expected = torch.zeros(3)
    for turn in range(6):
        with torchlazy.lazy_mode():
            x = torch.full((3,), float(turn)) * 1
            total.mul_(2)  # pending when the call begins
            found = run(x)
            after = total + x  # reads what the call wrote
        expected = expected * 2 + turn + 1
        assert total.tolist() == expected.tolist() and x.tolist() == [turn + 1.0] * 3
        assert found.tolist() == (expected * 2).tolist() and after.tolist() == (expected + turn + 1).tolist()
    assert run.report().replays >= 4, run.report()


def test_state_that_the_mode_left():
    class Running(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean = 0.5 * self.mean + x
            return self.mean * 2

    def play(compiled):
        module = Running()
        run = torchlazy.compile(module, audit=False) if compiled else module
        seen = []
        for turn in range(8):
            with torchlazy.lazy_mode():
                seen.append(run(torch.full((3,), float(turn))).tolist())
                if turn % 3 == 2:
                    module.mean = module.mean + 1
            seen.append(module.mean.tolist())
        return seen, run

    wanted, _ = play(False)
    found, run = play(True)
    assert found == wanted
    assert run.report().replays >= 3, run.report()


def test_what_cannot_be_replayed_is_recorded_by_the_mode():
    def call(x):
        x.add_(1)
        return x * 2 if x.sum() > 0 else x * 3

    run = torchlazy.compile(call, audit=False)
    for turn in range(-3, 4):
        with torchlazy.lazy_mode():
            x = torch.full((2,), float(turn)) + 0.5
            found = run(x)
        assert found.tolist() == [(turn + 1.5) * (2 if turn + 1.5 > 0 else 3)] * 2


@pytest.mark.usefixtures("recorded_in_python")
def test_memory_of_ordinary_tensors_is_never_a_lazy_tensor():
    # A storage over memory that is itself recorded has none: kernels that read it crashed.
    x = torch.ones(3)
    with torchlazy.lazy_mode():
        storage = recorder.storage_of_plain(x)
        assert type(storage.real) is torch.Tensor and storage.real.data_ptr() == x.data_ptr()
        made = x * 2
        assert isinstance(made, LazyTensor)
        made.data = torch.full((3,), 7.0)
        assert (made + x).tolist() == [8.0] * 3


def test_an_expanded_number_beside_tensors_that_need_gradients():
    """The number's memory is one element, however wide the view of it: `torch.distributions.Normal(x, 1.0)`."""

    def density(x):
        scale = torch.tensor(2.0, device=x.device)
        return -((x / scale.expand(3, 4)) ** 2) - scale.expand(4).log()

    run = torchlazy.compile(density)
    for _ in range(6):
        x = torch.randn(3, 4, requires_grad=True)
        found, wanted = run(x), density(x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), x))
    assert run.report().replays and not run.report().verified


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_factories_within_an_operator_are_no_business_of_the_capture(device):
    """`affine_grid` is planned by its parts, `linspace` among them: the modes of the capture took it for the call's."""

    def grid(weight):
        return F.affine_grid(weight.view(2, 2, 3), [2, 1, 5, 7], align_corners=False).square().sum()

    run = torchlazy.compile(grid)
    for _ in range(3):
        weight = torch.randn(2, 6).to(device).requires_grad_()
        (found,) = torch.autograd.grad(run(weight), weight)
        other = weight.detach().cpu().requires_grad_()
        torch.testing.assert_close(found.cpu(), torch.autograd.grad(grid(other), other)[0])
    assert not any("tracing" in reason for reason in run.report().reasons)

"""`torchlazy.compile` over whole steps and modules: what it gives is what the callable itself gives."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.run.sync_policy import SyncInside

from tests.lazy.models import mean_square_step

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.fixture(autouse=True)
def _at_once():
    before = torchlazy.config.tiers
    torchlazy.config.tiers = "off"
    yield
    torchlazy.config.tiers = before


def _train(optimizer_name: str, compiled: bool, *, first: bool = False, steps: int = 11):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(12, 3)
    ).to("lazy")
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    inputs, labels = torch.randn(steps, 8, 6), torch.randint(0, 3, (steps, 8))

    def step(x, y):
        if first:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not first:
            optimizer.zero_grad()
        return loss.detach(), loss.item()

    run = torchlazy.compile(step) if compiled else step
    torch.manual_seed(1)
    losses = []
    for i in range(steps):
        if i in (6, 9):
            optimizer.param_groups[0]["lr"] *= 0.5
        loss, number = run(inputs[i].to("lazy"), labels[i].to("lazy"))
        assert type(number) is float and number == loss.item()
        losses.append(number)
    return losses, [p.detach().cpu() for p in model.parameters()], run


@pytest.mark.parametrize("first", [False, True], ids=["zero_grad last", "zero_grad first"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_step(name, first):
    losses, parameters, _ = _train(name, False, first=first)
    found, compiled, run = _train(name, True, first=first)
    assert found == losses
    assert all(map(torch.equal, compiled, parameters))
    report = run.report()
    # Torch hands over a fused step's numbers as plain floats: a new rate is captured again, but not compiled.
    assert report.replays >= (2 if name == "fused" else 3) and not report.alarm, report
    assert not any("'lr'" in reason for reason in report.reasons), "a learning rate is an input"


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_module_with_loss_and_optimizer_outside(device):
    def train(compiled: bool):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Linear(8 * 36, 4),
        ).to(device, torch.float64)  # fmt: skip
        forward = torchlazy.compile(model) if compiled else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        values = []
        torch.manual_seed(1)
        for i in range(9):
            if i == 6:
                model.eval()
            x = torch.randn(4, 3, 8, 8, dtype=torch.float64).to(device).requires_grad_()
            loss = forward(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values += [loss.item(), x.grad.abs().sum().item(), model[1].running_mean.sum().item()]
        return torch.tensor(values), forward

    wanted, _ = train(False)
    found, forward = train(True)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    assert forward.report().replays >= 2 and not forward.report().alarm, forward.report()


def test_fullgraph_names_the_line():
    def step(x):
        if x.sum() > 0:  # the line that is told
            return x * 2
        return x

    with pytest.raises(SyncInside, match=r"bool.*test_compile_training\.py"):
        torchlazy.compile(step, fullgraph=True)(torch.ones(2).to("lazy"))


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_fullgraph_takes_what_needs_no_value(device):
    """Looking at the memory of its own results is no read of the call's, on ordinary tensors either."""
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    step = mean_square_step(model, optimizer)

    twin, x = copy.deepcopy(model), torch.ones(4, 3, device=device)
    compiled = torchlazy.compile(step, fullgraph=True)
    forward = torchlazy.compile(twin.forward, fullgraph=True)
    losses = [compiled(x).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(forward(x), twin(x))
        forward(x).sum().backward()


def test_another_back_end():
    seen = []

    def backend(graph, inputs):
        seen.append(len(graph.graph.nodes))
        return graph.forward

    run = torchlazy.compile(lambda x: torch.sin(x) * 2 + 1, backend=backend, audit=False)
    x = torch.randn(5)
    for _ in range(4):
        torch.testing.assert_close(run(x.to("lazy")).cpu(), torch.sin(x) * 2 + 1)
    assert seen and run.report().replays == 3


@pytest.mark.parametrize(
    "arguments", [{"mode": "fast"}, {"dynamic": "yes"}, {"backend": 3}], ids=["mode", "dynamic", "backend"]
)
def test_bad_arguments_are_told(arguments):
    with pytest.raises((ValueError, TypeError), match=r"torchlazy\.compile"):
        torchlazy.compile(lambda x: x, **arguments)


class _Trainer:
    def __init__(self, net, x, optimizer):
        self.held = net, x, optimizer

    def __call__(self):
        return _train_once(*self.held)


def _train_once(net, x, optimizer):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def _by_defaults(net, x, optimizer):
    def train(net=net, args=(x,), optimizer=optimizer):
        return _train_once(net, *args, optimizer)

    return train


def _by_keyword_defaults(net, x, optimizer):
    def train(*, net=net, held={"x": x}, optimizer=optimizer):  # noqa: B006
        return _train_once(net, held["x"], optimizer)

    return train


_WAYS = {
    "defaults": _by_defaults,
    "keyword defaults": _by_keyword_defaults,
    "partial": lambda *held: functools.partial(_train_once, *held),
    "object": _Trainer,
    "method": lambda *held: _Trainer(*held).__call__,
}


def _images():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    net = torch.nn.Sequential(*layers)
    return net, torch.randn(2, 3, 8, 8), torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("way", _WAYS)
def test_ordinary_tensors_are_found_wherever_the_callable_has_them(way):
    run, eager = torchlazy.compile(_WAYS[way](*_images())), _WAYS[way](*_images())
    for _ in range(7):
        torch.testing.assert_close(run(), eager(), rtol=1e-4, atol=1e-5)
    report = run.report()
    assert report.replays and not report.alarm and "at once" not in str(report), report


def test_a_replay_that_runs_its_operators_at_once_says_so():
    """The state has a tensor on the lazy device: ordinary ones are not recorded. The gradient of a convolution gives
    None for its input."""

    def make(count):
        net, x, optimizer = _images()

        def train():
            count.add_(1)
            return _train_once(net, x, optimizer)

        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.zero_grad = functools.partial(optimizer.zero_grad, set_to_none=False)
        return train

    run, eager = torchlazy.compile(make(torch.zeros(1, device="lazy"))), make(torch.zeros(1))
    for _ in range(7):
        torch.testing.assert_close(run(), eager(), rtol=1e-4, atol=1e-5)
    report = run.report()
    assert report.replays and any("run operators at once" in reason for reason in report.reasons), report

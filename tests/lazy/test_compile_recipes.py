"""What training programs are made of, compiled: schedulers, clipping, averages, accumulation, scalers, containers.

Invariant: every recipe runs plain and compiled from one seed, gives the same losses and state, and is replayed.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.usefixtures("operator_by_operator")
RECIPES: dict[str, Any] = {}
STEPS = 14


def recipe(least: int, devices: tuple[str, ...] = ("lazy", "cpu")) -> Any:
    """A recipe makes (step, what shows its state); so many of its calls are replayed at least."""

    def enter(function: Any) -> Any:
        RECIPES[function.__name__] = function, least, devices
        return function

    return enter


def net(device: str, *extra: torch.nn.Module) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), *extra, torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(device)


def learn(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@recipe(10)
def scheduler_inside(device):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def step(x, y):
        optimizer.zero_grad()
        loss = learn(model, optimizer, x, y)
        schedule.step()
        return loss

    return step, lambda: [*model.parameters(), schedule.get_last_lr(), schedule.last_epoch]


@recipe(10)
def warm_up_and_decay_inside(device):
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min((epoch + 1) / 5, 1.0) * 0.95**epoch)

    def step(x, y):
        optimizer.zero_grad()
        loss = learn(model, optimizer, x, y)
        schedule.step()
        return loss

    return step, lambda: [*model.parameters(), schedule.get_last_lr()]


@recipe(11)
def gradients_kept_as_zeros(device):
    model = net(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    def step(x, y):
        optimizer.zero_grad(set_to_none=False)
        return learn(model, optimizer, x, y)

    return step, lambda: [*model.parameters(), *(p.grad for p in model.parameters())]


@recipe(11)
def clipping(device):
    model = net(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        is_finite = norm.item() < 1e9  # asked before anything that was there has changed
        optimizer.step()
        return loss.detach(), norm, is_finite, norm.item()

    return step, lambda: [*model.parameters()]


@recipe(10)
def steps_skipped_where_the_norm_is_large(device):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() < 0.6:
            optimizer.step()
        return loss.detach()

    return step, lambda: [*model.parameters()]


@recipe(11)
def moving_average_in_a_dict(device):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(x, y):
        optimizer.zero_grad()
        loss = learn(model, optimizer, x, y)
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name] = 0.9 * average[name] + 0.1 * p
        return loss

    return step, lambda: [*average.values()]


@recipe(10, ("cpu",))
def averaged_model(device):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = swa_utils.AveragedModel(model)

    def step(x, y):
        optimizer.zero_grad()
        loss = learn(model, optimizer, x, y)
        average.update_parameters(model)
        return loss

    return step, lambda: [*average.parameters(), average.n_averaged]


@recipe(11)
def averaged_model_with_decay(device):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

    def step(x, y):
        optimizer.zero_grad()
        loss = learn(model, optimizer, x, y)
        average.update_parameters(model)
        return loss

    return step, lambda: [*average.parameters()]


@recipe(5)
def accumulation_over_three_calls(device):
    model = net(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    count = {"calls": 0}

    def step(x, y):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        count["calls"] += 1
        if count["calls"] % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step, lambda: [*model.parameters(), count["calls"]]


@recipe(11)
def batch_norm(device):
    model = net(device, torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    def step(x, y):
        optimizer.zero_grad()
        return learn(model, optimizer, x, y)

    return step, lambda: [*model.parameters(), *model.buffers()]


@recipe(11, ("lazy",))
def dropout(device):
    model = net(device, torch.nn.Dropout(0.3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    def step(x, y):
        optimizer.zero_grad()
        return learn(model, optimizer, x, y)

    return step, lambda: [*model.parameters()]


@recipe(6, ("cpu",))
def gradient_scaler(device):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)

    def step(x, y):
        x = torch.where(y.sum() % 5 == 0, x * float("inf"), x)  # now and then a step is skipped
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach().float()

    return step, lambda: [*model.parameters(), scaler.get_scale()]


@recipe(10)
def compiled_within_compiled(device):
    model = net(device)
    inner = torchlazy.compile(model.forward)

    def step(x, y):
        return F.cross_entropy(inner(x), y).detach() * 2

    return step, list


def play(made, device, compiled):
    torch.manual_seed(0)
    step, state = made(device)
    run = torchlazy.compile(step, audit=False) if compiled else step
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    seen = []
    for _ in range(STEPS):
        x, y = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            seen += tree_leaves(run(x.to(device), y.to(device)))
        seen += tree_leaves(state())
        seen = [v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for v in seen]
    return seen, run


@pytest.mark.parametrize(
    ("name", "device"), [(name, device) for name, (_, _, devices) in RECIPES.items() for device in devices]
)
def test_recipe(name, device):
    made, least, _ = RECIPES[name]
    if name == "dropout":
        torchlazy.config.native_device = "off"  # which draws eager's numbers, compiled calls their own
    wanted, _ = play(made, device, False)
    found, run = play(made, device, True)
    for a, b in zip(found, wanted, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        else:
            assert type(a) is type(b) and a == pytest.approx(b)
    assert run.report().replays >= least, run.report()


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    parts: list[torch.Tensor]
    scale: float = 2.0


class Pair(NamedTuple):
    a: torch.Tensor
    b: float


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_data_classes_go_in_and_out(device):
    run = torchlazy.compile(lambda batch, *, more: Batch(batch.x * batch.scale + more, [batch.parts[0]]), audit=False)
    for turn in range(8):
        part = torch.ones(1).to(device)
        given = Batch(torch.full((2,), float(turn)).to(device), [part], scale=1.0 + turn)
        found = run(given, more=torch.ones(2).to(device))
        assert type(found) is Batch and found.x.tolist() == [turn * (1.0 + turn) + 1] * 2 and found.scale == 2.0
        assert found.parts[0] is part
    assert run.report().replays >= 6, run.report()
    same = torchlazy.compile(lambda batch: batch)
    assert all(same(given) is given for _ in range(4))


def test_a_data_class_that_the_call_changes():
    def call(batch, factor):
        batch.x = batch.x * factor
        return batch.x.sum()

    run = torchlazy.compile(call, audit=False)
    for turn in range(5):
        given = Batch(torch.ones(2).to("lazy"), [])
        assert run(given, float(turn)).item() == 2 * turn and given.x.tolist() == [turn] * 2


def test_named_tuples_and_keywords():
    def call(pair, /, *, scale=2.0, flags=()):
        return Pair(pair.a * scale, pair.b + len(flags)), collections.OrderedDict(x=pair.a)

    run = torchlazy.compile(call, audit=False)
    for _ in range(4):
        a = torch.ones(2).to("lazy")
        found, table = run(Pair(a, 1.5), flags=(1, 2))
        assert type(found) is Pair and found.a.tolist() == [2, 2] and found.b == 3.5 and table["x"] is a
        assert run(Pair(a, 1.5), scale=3.0)[0].a.tolist() == [3, 3]
    assert run.report().replays == 6, run.report()


def test_generators_and_coroutines_run_as_they_are():
    @torchlazy.compile
    def rows(x):
        for i in range(3):
            yield x * i

    @torchlazy.compile
    async def later(x):
        await asyncio.sleep(0)
        return x * 2

    x = torch.ones(2)
    for _ in range(3):
        assert [row.tolist() for row in rows(x)] == [[i, i] for i in range(3)]
        assert asyncio.run(later(x)).tolist() == [2, 2]
    assert "generator" in rows.report().reasons[0] and "coroutine" in later.report().reasons[0]


def test_called_inside_lazy_mode():
    model = net("cpu")
    run = torchlazy.compile(torch.no_grad()(lambda x: model(x) * 2))
    for _ in range(4):
        x = torch.randn(5, 6)
        with torchlazy.lazy_mode():
            found = run(x) + 1
        torch.testing.assert_close(torch.Tensor(found.cpu()), model(x).detach() * 2 + 1)

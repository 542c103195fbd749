"""Compiled calls whose Python branches on a value that the call computes."""

from __future__ import annotations

import math

import pytest
import torch
import torchlazy


@pytest.fixture(autouse=True)
def _at_once():
    before = torchlazy.config.tiers
    torchlazy.config.tiers = "off"
    yield
    torchlazy.config.tiers = before


def _masked(x, mask):
    noisy = x + torch.rand_like(x)
    if (mask == 1).all():  # asked before anything that existed has changed
        return noisy * 2
    return noisy * mask


def test_each_way_has_a_template_and_draws_the_same_numbers():
    run = torchlazy.compile(_masked)
    full, part = torch.ones(4).to("lazy"), torch.tensor([1.0, 0, 1, 0]).to("lazy")
    x = torch.arange(4.0).to("lazy")
    order = [full, full, full, part, full, part, part, full, part, full, full, part]
    torch.manual_seed(3)
    wanted = [_masked(x, mask).cpu() for mask in order]
    torch.manual_seed(3)
    found = [run(x, mask).cpu() for mask in order]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    report = run.report()
    assert report.variants == 2 and report.replays >= 3 and not report.alarm, report


def test_training_with_a_branch_on_its_input():
    def train(compiled: bool):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)).to("lazy")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def step(x, mask):
            x = x if mask.all() else x * mask
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = torchlazy.compile(step) if compiled else step
        torch.manual_seed(1)
        inputs = torch.randn(10, 3, 4)
        masks = [torch.ones(3, 4) if i % 3 else torch.eye(3, 4) for i in range(10)]
        losses = [run(x.to("lazy"), mask.bool().to("lazy")).cpu() for x, mask in zip(inputs, masks, strict=True)]
        return torch.stack(losses), run

    plain, _ = train(False)
    found, run = train(True)
    torch.testing.assert_close(found, plain)
    assert run.report().replays >= 2 and not run.report().alarm, run.report()


def test_a_branch_after_a_change_is_replayed_each_way():
    state = torch.zeros(2).to("lazy")

    def step(x):
        state.add_(x)
        if (state > 2).all():
            state.zero_()
        return state * 1

    run = torchlazy.compile(step, audit=False)
    found = [run(torch.ones(2).to("lazy")).tolist() for _ in range(8)]
    assert [f[0] for f in found] == [1.0, 2.0, 0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
    assert run.report().replays == 6 and run.report().variants == 2, run.report()


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_start_that_is_a_tensor(device):
    """torch checks it by `and` and `or` of comparisons."""
    compiled = torchlazy.compile(lambda x, start: x.narrow(0, start, 2) * 2)
    for start in (0, 1, 2, 0, 1, 2, -3, -2, 1):
        x = torch.arange(8.0).reshape(4, 2)
        have = compiled(x.to(device), torch.tensor(start))
        assert torch.equal(have.cpu(), x.narrow(0, torch.tensor(start), 2) * 2)
    with pytest.raises((IndexError, RuntimeError)):
        compiled(x.to(device), torch.tensor(3))


def test_a_step_that_stops_where_its_loss_is_no_number_is_replayed():
    """`math.isfinite` is a question about the value, answered for all finite losses alike: one template, also where
    batch norm has written its statistics before the loss is read."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x):
        loss = model(x).square().mean()
        if not math.isfinite(loss.item()) or math.isnan(loss.item()):
            raise FloatingPointError("the loss is no number")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = torchlazy.compile(step)
    for _ in range(10):
        assert run(torch.rand(6, 3).to("lazy")).item() > 0
    report = run.report()
    assert report.variants == 1 and report.captures <= 2 and report.replays >= 4 and not report.alarm, report
    weights = [p.detach().cpu().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError):
        run(torch.full((6, 3), float("inf")).to("lazy"))
    for before, after in zip(weights, model.parameters(), strict=True):
        assert torch.equal(before, after.cpu())


@pytest.mark.parametrize("at", [2, 3, 4, 6])
def test_an_audited_call_that_takes_another_way_and_makes_new_state_is_no_alarm(at):
    """The deeper exit's parameters get their optimizer's state when they are first reached: no template comes of that
    call, and it says nothing against the one that it left."""

    def training(device, compile):
        torch.manual_seed(0)
        first, second = [torch.nn.Linear(3, 3).to(device) for _ in range(2)]
        optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-2)

        def step(x):
            optimizer.zero_grad()
            y = first(x)
            if x.sum() > 0:
                y = second(y)
            y.square().mean().backward()
            optimizer.step()

        return compile(step), [*first.parameters(), *second.parameters()]

    run, mine = training("lazy", torchlazy.compile)
    plain, theirs = training("cpu", lambda function: function)
    for i in range(12):
        x = torch.rand(4, 3, generator=torch.Generator().manual_seed(i)) - (0 if i == at or i > 8 else 2)
        run(x.to("lazy"))
        plain(x)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.cpu(), b)
    assert not run.report().alarm, run.report()


@pytest.mark.parametrize("values", [(0.0, 0.5), (0.5, 0.0), (0.5, 1.0), (1.0, 0.5, 0.0)], ids=str)
def test_ways_that_ask_other_things_of_a_number_are_no_alarm(values):
    """A dropout that is 0 does nothing, and fixes its p; another one is compared with 0 and 1."""
    run = torchlazy.compile(lambda x, p: torch.nn.functional.dropout(x, p.item(), True))
    for number in range(16):
        p = values[number % len(values)]
        found = run(torch.ones(64, device="lazy"), torch.tensor(p, device="lazy")).cpu()
        wanted = {0.0, 1 / (1 - p)} if p not in (0.0, 1.0) else {1.0 - p}
        assert set(found.tolist()) == wanted
    report = run.report()
    assert not report.alarm and report.captures <= len(values) and report.replays > 0, report


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_an_int_in_the_name_of_a_layer_is_a_branch(device: str) -> None:
    """`self[f"expert_{index}"]`: the layers of a dictionary by the values of a tensor."""
    layers = {f"layer_{i}": torch.full((3,), i + 2.0, device=device) for i in range(3)}

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return layers[f"layer_{x.argmax()}"] * x + layers[f"layer_{(x > 5).any():d}"]

    run = torchlazy.compile(chosen)
    for first in (0, 1, 2, 0, 1, 2, 2, 1, 0, 0):
        x = torch.arange(3, device=device).roll(first) * 2.0
        torch.testing.assert_close(run(x), chosen(x))
    report = run.report()
    assert report.captures == 3 and report.verified == 0 and not report.alarm, report


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_write_that_is_taken_back_raises_no_version(shape: tuple[int, ...]) -> None:
    def step(x):
        if bool(x.sum() > 0):
            pass
        else:
            x.add_(1)

    compiled = torchlazy.compile(step, audit=False)
    for number in range(6):
        x = torch.full(shape, 1.0 if number % 2 else -3.0)
        y = x.clone().requires_grad_()
        loss = (x * y).sum()  # saves x
        before = x._version
        compiled(x)
        assert (x._version > before) == (number % 2 == 0)
        if number % 2:
            loss.backward()
            assert y.grad is not None
            assert y.grad.tolist() == x.tolist()

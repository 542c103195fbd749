"""Training loops as people write them, with the step compiled: a step's number as argument, logs, rings, late groups.

Invariant: every loop runs plain and compiled from one seed, gives the same values, and once its pattern has come twice
neither captures nor variants grow.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.usefixtures("operator_by_operator")
LOOPS: dict[str, Any] = {}
STEPS, SETTLED = 30, 14


def loop(captures: int) -> Any:
    """A loop makes (turn, what shows its state) and gets the compiler; so many captures it takes at most."""

    def enter(function: Any) -> Any:
        LOOPS[function.__name__] = function, captures
        return function

    return enter


def net(device: str, *extra: torch.nn.Module) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), *extra, torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(device)


def batch(device: str, seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    return x.to(device), torch.randint(0, 3, (rows,), generator=generator).to(device)


@loop(6)
def accumulation_by_the_index(device, compiled):
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step(i, x, y):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    run = compiled(step)
    return lambda i: run(i, *batch(device, i)), lambda: list(model.parameters())


@loop(2)
def cosine_by_hand(device, compiled):
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step(i, x, y):
        for group in optimizer.param_groups:
            group["lr"] = 0.005 * (1 + math.cos(math.pi * i / 100))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = compiled(step)
    return lambda i: run(i, *batch(device, i)), lambda: list(model.parameters())


@loop(4)
def losses_logged_now_and_then(device, compiled):
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    log: list[Any] = []

    def step(i, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            log.append((i, loss.item()))
        return loss.detach()

    run = compiled(step)
    return lambda i: run(i, *batch(device, i)), lambda: [*model.parameters(), log]


@loop(2)
def losses_logged_at_each_step(device, compiled):
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)  # its first call makes state: no template, but a log
    log: list[float] = []

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        log.append(loss.item())

    run = compiled(step)
    return lambda i: run(*batch(device, i)), lambda: [*model.parameters(), log]


@loop(4)
def a_group_added_later(device, compiled):
    body, head = torch.nn.Linear(6, 8).to(device), torch.nn.Linear(8, 3).to(device)
    body.requires_grad_(False)
    optimizer = torch.optim.AdamW(head.parameters(), 1e-2)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(head(torch.tanh(body(x))), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = compiled(step)

    def turn(i):
        if i == 8:
            body.requires_grad_(True)
            optimizer.add_param_group({"params": list(body.parameters()), "lr": 1e-3})
        return run(*batch(device, i))

    return turn, lambda: [*body.parameters(), *head.parameters()]


@loop(12)
def a_ring_of_ten_places(device, compiled):
    ring, model = torch.zeros(10, 6).to(device), torch.nn.Linear(6, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    class Count:
        def __init__(self) -> None:
            self.n = 0

    count = Count()

    def step(x):
        ring[count.n % 10] = x[0]
        count.n += 1
        loss = model(ring).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = compiled(step)
    return lambda i: run(batch(device, i)[0]), lambda: [*model.parameters(), ring, count.n]


@loop(2)
def cumulative_averages(device, compiled):
    model = net(device, torch.nn.BatchNorm1d(8, momentum=None))
    optimizer = torch.optim.SGD(model.parameters(), 1e-1)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = compiled(step)
    return lambda i: run(*batch(device, i)), lambda: [*model.parameters(), *model.buffers()]


@loop(1)
def cumulative_averages_of_a_module(device, compiled):
    model = net(device, torch.nn.BatchNorm1d(8, momentum=None))
    optimizer = torch.optim.SGD(model.parameters(), 1e-1)
    run = compiled(model)

    def turn(i):
        x, y = batch(device, i)
        optimizer.zero_grad()
        loss = F.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return turn, lambda: [*model.parameters(), *model.buffers()]


def play(made: Any, device: str, compile_it: bool) -> tuple[list[Any], list[tuple[int, int]], Any]:
    torch.manual_seed(0)
    runs: list[Any] = []

    def compiled(function: Any) -> Any:
        runs.append(torchlazy.compile(function) if compile_it else function)
        return runs[-1]

    turn, state = made(device, compiled)
    seen, counts = [], []
    for i in range(STEPS):
        found = tree_leaves([turn(i), state() if i % 6 == 5 else ()])
        seen.append([v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for v in found])
        if compile_it:
            report = runs[0].report()
            counts.append((report.captures, report.variants, report.verified))
    return seen, counts, runs[0]


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("name", LOOPS)
def test_loop(name, device):
    made, captures = LOOPS[name]
    wanted, _, _ = play(made, device, False)
    found, counts, run = play(made, device, True)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        for left, right in zip(a, b, strict=True):
            if isinstance(right, torch.Tensor):
                torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5, msg=lambda m, i=i: f"step {i}: {m}")
            else:
                assert type(left) is type(right) and left == pytest.approx(right), i
    report = run.report()
    assert not report.alarm and report.captures <= captures and report.verified <= 1, report
    assert counts[SETTLED] == counts[-1], report


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_line_printed_now_and_then_costs_its_own_steps_only(device, capsys):
    """Text of a value that is computed after a change cannot be replayed: those steps run their Python, no others."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if i % 6 == 0:
            print(f"step {i}: {loss.item():.4f}")

    run = torchlazy.compile(step)
    for i in range(31):
        run(i, *batch(device, i))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"step {i}" for i in range(0, 31, 6)]
    report = run.report()
    assert report.verified <= 1 and report.captures <= 8 and not report.alarm, report


def test_an_int_that_shapes_depend_on_is_known_by_its_value():
    run = torchlazy.compile(lambda x, n: x[:n] * 2)
    x = torch.arange(8.0).to("lazy")
    for n in (2, 3, 5, 2, 3, 5, 2, 3, 5, 5, 3, 2):
        assert torch.equal(run(x, n).cpu(), torch.arange(8.0)[:n] * 2)
    assert run.report().captures <= 5 and not run.report().alarm, run.report()


def test_an_int_keeps_its_type_where_it_is_followed():
    run = torchlazy.compile(lambda x, n: (x * n, n // 2, n))
    for n in (3, 4, 5, 2**40, 7):
        for x in (torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bfloat16)):
            product, half, same = run(x.to("lazy"), n)
            assert torch.equal(product.cpu(), x * n) and product.dtype == (x * n).dtype
            assert (half, same) == (n // 2, n) and type(half) is type(same) is int


def _caches(device: str, form: str) -> tuple[Any, Any]:
    """A step of decoding, and what starts its caches anew: they grow by cat, or have a place for each position."""
    layers = [torch.nn.Linear(8, 8).to(device) for _ in range(3)]
    keys, values = torch.zeros(1, 16, 8).to(device), torch.zeros(1, 16, 8).to(device)

    def attend(x: Any, k: Any, v: Any) -> Any:
        return torch.tanh(F.scaled_dot_product_attention(layers[0](x)[:, None], k[:, None], v[:, None])[:, 0])

    def cat(x: Any, i: int, past: Any) -> Any:
        k, v = torch.cat([past[0], layers[1](x)], 1), torch.cat([past[1], layers[2](x)], 1)
        return attend(x, k, v), (k, v)

    def grows(x, past):
        return cat(x, 0, past)

    def by_number(x, i):
        keys[:, i : i + 1], values[:, i : i + 1] = layers[1](x), layers[2](x)
        return attend(x, keys[:, : i + 1], values[:, : i + 1])

    def by_tensor(x, at):
        keys.index_copy_(1, at, layers[1](x))
        values.index_copy_(1, at, layers[2](x))
        seen = torch.arange(16, device=x.device) <= at
        return attend(x, keys * seen[None, :, None], values * seen[None, :, None])

    return {"grows": grows, "by_number": by_number, "by_tensor": by_tensor}[form], lambda: [
        torch.zeros(1, 0, 8, device=device) for _ in range(2)
    ]


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("form", ["grows", "by_number", "by_tensor"])
def test_decoding_is_replayed_where_its_positions_come_again(form, device):
    """Each position of a growing cache, or of a number, is captured when it comes for the second time."""

    def decode(compile_it: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        step, start = _caches(device, form)
        step = torch.no_grad()(step)
        run = torchlazy.compile(step, audit=False) if compile_it else step
        seen = []
        for sequence in range(4):
            x, past = torch.full((1, 1, 8), 0.1 * sequence, device=device), start()
            for i in range(12):
                if form == "grows":
                    x, past = run(x, past)
                else:
                    x = run(x, i if form == "by_number" else torch.tensor([i], device=device))
                seen.append(x.detach().cpu().clone())
        return seen, run

    wanted, _ = decode(False)
    found, run = decode(True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    report = run.report()
    assert report.replays >= (40 if form == "by_tensor" else 20), report

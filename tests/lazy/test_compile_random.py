"""Compiled calls that seed torch's generators, or take them back: what they draw is what the plain call would draw.

Invariant: each case says by its own numbers whether they are right, call after call.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torchlazy
from torch import nn
from torch.utils.checkpoint import checkpoint

CALLS = 9


@pytest.fixture(params=["cpu", "lazy"])
def device(request):
    return request.param


def run(function, *args):
    """The results of `CALLS` calls, each with the generator's state before and after it; and the report."""
    compiled = torchlazy.compile(function)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(CALLS):
            torch.rand(1)  # the caller's own: no two calls begin where the other ended
            before = torch.get_rng_state()
            value = compiled(*args)
            found.append((value, before, torch.get_rng_state()))
    return found, compiled.report()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_drops_what_forward_dropped(device, reentrant):
    x = torch.ones(64, device=device, requires_grad=True)
    drop = nn.Dropout(0.5)

    def step():
        x.grad = None
        y = checkpoint(lambda v: drop(v * 1.0).sin(), x, use_reentrant=reentrant)
        y.sum().backward()
        return y.detach(), x.grad

    found, report = run(step)
    masks = []
    for (y, gradient), _, _ in found:
        masks.append((y != 0).cpu())
        assert torch.equal(masks[-1], (gradient != 0).cpu())
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(masks))
    assert report.replays > 0


def test_fork_rng_leaves_the_generator_alone(device):
    def draw():
        with torch.random.fork_rng(devices=[]):
            first = torch.rand(3, device=device)
        with torch.random.fork_rng(devices=[]):
            second = torch.rand(3, device=device)
        return first, second

    found, report = run(draw)
    for (first, second), before, after in found:
        assert torch.equal(first.cpu(), second.cpu())
        assert torch.equal(before, after)
    assert report.replays > 0


def test_numbers_after_a_fork_go_on(device):
    def draw():
        first = torch.rand(3, device=device)
        with torch.random.fork_rng(devices=[]):
            torch.rand(5, device=device)
        return first, torch.rand(3, device=device)

    found, report = run(draw)
    rows = [t.cpu() for value, _, _ in found for t in value]
    assert all(not torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])
    assert report.replays > 0


def test_a_state_taken_and_set_again(device):
    def draw():
        state = torch.get_rng_state()
        first = torch.rand(3, device=device)
        torch.set_rng_state(state)
        return first, torch.rand(3, device=device)

    found, report = run(draw)
    rows = []
    for (first, second), _, _ in found:
        assert torch.equal(first.cpu(), second.cpu())
        rows.append(first.cpu())
    assert all(not torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])
    assert report.replays > 0


@pytest.mark.parametrize("where", ["first", "last", "between"])
def test_seeds_set_inside_are_left_to_python(device, where):
    def draw():
        if where == "first":
            torch.manual_seed(3)
        first = torch.rand(3, device=device)
        if where == "between":
            torch.manual_seed(3)
        second = torch.rand(3, device=device)
        if where == "last":
            torch.manual_seed(3)
        return first, second

    found, report = run(draw)
    assert report.replays == 0
    assert any("seeds a random generator" in reason for reason in report.reasons)
    assert len({bytes(after.numpy()) for _, _, after in found}) == 1
    firsts = {tuple(first.tolist()) for (first, _), _, _ in found}
    seconds = {tuple(second.tolist()) for (_, second), _, _ in found}
    if where == "first":
        assert len(firsts) == len(seconds) == 1
    elif where == "between":
        assert len(seconds) == 1
    else:
        assert len(firsts) == 2  # the first call begins from another state


def test_a_generator_of_the_program_that_it_seeds_is_found_by_an_audit():
    generator = torch.Generator()

    def draw():
        generator.manual_seed(7)
        return torch.rand(3, device="lazy", generator=generator)

    found, report = run(draw)
    assert report.replays == 0
    assert "seeds a random generator" in report.alarm
    assert len({tuple(value.tolist()) for value, _, _ in found}) == 1


def test_a_generator_of_the_program_is_replayed():
    generator = torch.Generator().manual_seed(7)

    def draw():
        return torch.rand(3, device="lazy", generator=generator), torch.rand(2, device="lazy", generator=generator)

    found, report = run(draw)
    assert report.replays > 0
    assert len({tuple(value[0].tolist()) for value, _, _ in found}) == CALLS

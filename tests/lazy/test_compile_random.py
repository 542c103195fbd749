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


def _seeds_its_own(kept):
    return torch.rand(3, generator=kept.manual_seed(7))


def _makes_one(kept):
    return torch.rand(3, generator=torch.Generator().manual_seed(7))


def _sets_a_state(kept):
    kept.set_state(torch.Generator().manual_seed(7).get_state())
    return torch.rand(3, generator=kept)


def _asks_a_helper(kept):
    return _makes_one(kept) + _seeds_its_own(kept)


@pytest.mark.parametrize("draw", [_seeds_its_own, _makes_one, _sets_a_state, _asks_a_helper])
@pytest.mark.parametrize("rng", ["eager", "philox"])
def test_generators_that_a_call_makes_or_seeds_are_not_replayed(draw, rng, device, monkeypatch):
    """No audit is needed to find that."""
    monkeypatch.setattr(torchlazy.config, "rng", rng)
    kept = torch.Generator()
    compiled = torchlazy.compile(lambda x: draw(kept).to(x.device) * x, audit=False)
    found = [compiled(torch.ones(3, device=device)).tolist() for _ in range(CALLS)]
    assert all(value == found[0] for value in found)
    if rng == "eager":
        assert found[0] == draw(kept).tolist()
    report = compiled.report()
    assert report.replays == 0 and not report.alarm and "generator" in str(report)


@pytest.mark.parametrize("how", ["method", "torch"])
def test_a_generator_is_seeded_with_a_number_that_varies(how, device, monkeypatch):
    """C code takes no tracked number."""
    monkeypatch.setattr(torchlazy.config, "rng", "eager")

    def draw(x, seed):
        if how == "torch":
            torch.manual_seed(seed)
            return x * torch.rand(3).to(x.device)
        return x * torch.rand(3, generator=torch.Generator().manual_seed(seed)).to(x.device)

    compiled = torchlazy.compile(draw)
    for seed in (1, 2, 3, 2, 1, 7):
        found = compiled(torch.ones(3, device=device), seed)
        assert found.tolist() == draw(torch.ones(3), seed).tolist()


def test_a_generator_of_the_program_is_replayed():
    generator = torch.Generator().manual_seed(7)

    def draw():
        return torch.rand(3, device="lazy", generator=generator), torch.rand(2, device="lazy", generator=generator)

    found, report = run(draw)
    assert report.replays > 0
    assert len({tuple(value[0].tolist()) for value, _, _ in found}) == CALLS


def _draws_as_eager(program, device):
    """The plain calls and the replays draw the same, and leave the generator at one state."""
    plain, ours = program("cpu"), program(device)
    compiled = torchlazy.compile(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(CALLS):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            torch.manual_seed(number)
            expected, stands = plain(x.clone()), torch.get_rng_state()
            torch.manual_seed(number)
            found = compiled(x.clone().to(device))
            torch.testing.assert_close([v.cpu() for v in found], list(expected))
            assert torch.equal(torch.get_rng_state(), stands)
    assert compiled.report().replays > 0, compiled.report()


def _operators_that_draw_themselves(device):
    return lambda x: (
        x[torch.randperm(4, device=device)] + torch.poisson(x.exp()),
        torch.multinomial(x.softmax(-1), 2),
        torch.normal(x, x.exp()) * torch._standard_gamma(x.exp()),
        torch.bernoulli(x.sigmoid()),
    )


def _policy(device):
    torch.manual_seed(0)
    layer = nn.Linear(6, 3).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def step(x):
        chosen = torch.distributions.Categorical(logits=layer(x))
        action = chosen.sample()
        loss = -(chosen.log_prob(action) * x[:, 0]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), action, *[p.detach() for p in layer.parameters()]

    return step


def _goes_on_as_drawn(device):
    kept = torch.zeros(6, device=device)

    def call(x):
        kept.add_(torch.poisson(x[0].exp()))
        if (torch.multinomial(x.softmax(-1), 1).sum() > 9).item():
            return torch.poisson(x.exp()) + kept, kept
        return x - kept, kept

    return call


def _forks(device):
    def call(x):
        with torch.random.fork_rng(devices=[]):
            first = torch.multinomial(x.softmax(-1), 2)
        return first, torch.multinomial(x.softmax(-1), 2)

    return call


def _in_place(device):
    kept = torch.zeros(4, 6, device=device)

    def call(x):
        kept.exponential_()
        turned = torch.empty(6, 4, device=device).t().normal_()
        kept[:, 1].random_(5)
        return x + kept, turned, x.bernoulli_(0.3), torch.nn.functional.dropout(turned, 0.4)

    return call


@pytest.mark.parametrize("program", [_operators_that_draw_themselves, _policy, _goes_on_as_drawn, _forks, _in_place])
def test_draws_of_eagers_own_are_replayed(device, program, monkeypatch):
    monkeypatch.setattr(torchlazy.config, "rng", "eager")
    _draws_as_eager(program, device)


@pytest.mark.parametrize("program", [_policy, _forks])
def test_operators_that_draw_themselves_give_eagers_numbers_in_any_case(device, program):
    _draws_as_eager(program, device)


def test_generators_among_the_arguments(device):
    kept = [torch.Generator().manual_seed(number) for number in range(2)]
    others = [torch.Generator().manual_seed(number) for number in range(2)]

    def call(x, generator):
        return torch.multinomial(x.softmax(-1), 1, generator=generator)

    compiled = torchlazy.compile(call)
    for number in range(CALLS):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        found = compiled(x.to(device), kept[number % 2])
        assert torch.equal(found.cpu(), call(x, others[number % 2]))
        assert torch.equal(kept[number % 2].get_state(), others[number % 2].get_state())
    assert compiled.report().replays > 0


def test_what_an_operator_of_the_program_draws(device):
    @torch.library.custom_op("tlzdraws::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape)

    _draws_as_eager(lambda _: lambda x: (noisy(x), torch.poisson(x.exp())), device)

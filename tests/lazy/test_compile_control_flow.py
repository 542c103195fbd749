"""Control flow that depends on values: compiled calls go the ways that plain ones go, whatever was changed before.

Invariant: a call compared with its plain twin from one seed gives the same results and leaves the same state behind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.run.sync_policy import SyncInside

pytestmark = pytest.mark.usefixtures("operator_by_operator")
CALLS: dict[str, tuple[Callable[..., Any], int]] = {}
TURNS = 30


def case(least: int) -> Callable[..., Any]:
    """A case makes a call of one tensor over the state that it gets; so many of its calls are replayed at least."""

    def enter(make: Any) -> Any:
        CALLS[make.__name__] = make, least
        return make

    return enter


@case(20)
def until_it_converges(state, count):
    def call(x):
        state.mul_(0.5).add_(x)
        count.add_(1)
        turns = 0
        while (state - x).abs().max().item() > 0.1 and turns < 50:
            state.add_(x).mul_(0.5)
            turns += 1
        return state.sum(), turns

    return call


@case(25)
def a_truth_value(state, count):
    def call(x):
        state.add_(x)
        total = (state * state).sum()
        if total > 4:
            state.mul_(0.5)
            count.sub_(1)
        return total

    return call


@case(15)
def two_branches_and_a_random_number(state, count):
    numbers = torch.Generator().manual_seed(7)

    def call(x):
        state.add_(x)
        noise = torch.rand(3, generator=numbers).to(state.device)
        if state.sum() > noise.sum():
            state.sub_(noise)
        if state.mean().item() < -1:
            state.zero_()
        return noise, state * count

    return call


@case(0)
def a_slice_by_a_value(state, count):
    def call(x):
        width = int(x.abs().sum().item()) % 3 + 1
        state[:width] += 1
        return state[:width].sum(), width

    return call


@case(0)
def lists_of_values(state, count):
    def call(x):
        state.add_(1)
        return [2 * value for value in x.tolist()], state.sum(), f"{x[0]:.3f}", x.cpu().numpy().sum()

    return call


@case(0)
def shapes_of_values(state, count):
    def call(x):
        state.add_(1)
        found = torch.nonzero(x > 0)
        return found.sum() + state.sum(), x[x > 0].sum(), torch.masked_select(x, x < 0).sum(), torch.unique(x.round())

    return call


@case(0)
def a_plain_float(state, count):
    def call(x):
        state.add_(x)
        return float((state * state).sum().item()), state * 2

    return call


@case(15)
def steps_that_are_taken_back(state, count):
    def call(x):
        before = state.clone()
        state.sub_(0.5 * (state - x))
        if (state * state).sum() > (before * before).sum():
            state.copy_(before)
            return count.add_(1) * 1
        return count * 1

    return call


def play(make: Any, device: str, compiled: bool) -> tuple[list[Any], Any]:
    state, count = torch.zeros(3).to(device), torch.zeros(()).to(device)
    call = make(state, count)
    run = torchlazy.compile(call, audit=False) if compiled else call
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(TURNS):
            found = run(torch.randn(3, generator=generator).to(device))
            seen += [found, state.clone(), count.clone()]
            if len(seen) == 45:
                state.add_(1)
    flat = torch.utils._pytree.tree_leaves(seen)
    return [v.cpu() if isinstance(v, torch.Tensor) else v for v in flat], run


OF_DEVICE = {"two_branches_and_a_random_number": ("lazy",)}  # plain calls on the CPU draw eager's own numbers


@pytest.mark.parametrize(
    ("name", "device"), [(name, device) for name in CALLS for device in OF_DEVICE.get(name, ("lazy", "cpu"))]
)
def test_calls_go_the_ways_that_plain_ones_go(name, device):
    make, least = CALLS[name]
    wanted, _ = play(make, device, False)
    found, run = play(make, device, True)
    for a, b in zip(found, wanted, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert type(a) is type(b) and a == (b if type(b) is str else pytest.approx(b, rel=1e-5))
    report = run.report()
    assert report.replays >= least, report
    assert report.captures <= 15, "where nothing can be replayed, captures pause"


@pytest.mark.parametrize("name", ["a_truth_value", "until_it_converges", "lists_of_values", "shapes_of_values"])
def test_fullgraph_raises_at_the_line(name):
    call = CALLS[name][0](torch.zeros(3).to("lazy"), torch.zeros(()).to("lazy"))
    with pytest.raises(SyncInside, match="test_compile_control_flow"):
        torchlazy.compile(call, fullgraph=True)(torch.ones(3).to("lazy"))


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_training_step_that_looks_at_its_new_loss(device):
    def train(compiled):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after = F.cross_entropy(model(x), y)
            if after.item() < loss.item():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.99)
                return loss.detach()
            return after.detach() * 2

        run = torchlazy.compile(step, audit=False) if compiled else step
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(16):
            x, y = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
            losses.append(run(x.to(device), y.to(device)).item())
        moments = [v.detach().cpu() for entry in optimizer.state.values() for v in entry.values()]
        return torch.tensor(losses), [p.detach().cpu() for p in model.parameters()] + moments, run

    wanted, state, _ = train(False)
    found, now, run = train(True)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(now, state)
    assert run.report().replays >= 10, run.report()


def test_a_program_that_fails_while_results_are_held_back():
    """What ran before it stands, as in eager, although a check was still to come."""
    state = torch.zeros(2).to("lazy")
    table = torch.arange(4.0).to("lazy")

    def call(x, index):
        state.add_(x)
        if state.sum() > 100:
            state.zero_()
        state.mul_(1)
        if table[index].sum() > 50:
            state.zero_()
        return state * 1

    run = torchlazy.compile(call, audit=False)
    for turn in range(4):
        run(torch.ones(2).to("lazy"), torch.tensor([turn]).to("lazy"))
    assert run.report().replays == 3 and state.tolist() == [4, 4]
    with pytest.raises(IndexError):
        run(torch.ones(2).to("lazy"), torch.tensor([9]).to("lazy"))
    assert state.tolist() == [5, 5]
    assert run(torch.ones(2).to("lazy"), torch.tensor([1]).to("lazy")).tolist() == [6, 6]


def test_host_tensors_copied_into_the_state_are_not_lost():
    state, number = torch.zeros(2, 3).to("lazy"), torch.zeros(()).to("lazy")

    def call(x, k):
        state.copy_(x)
        number.copy_(k)
        return state * 2 + number

    run = torchlazy.compile(call, audit=False)
    for turn in range(5):
        out = run(torch.full((3,), float(turn)), torch.tensor(float(turn)))
        assert out.tolist() == [[3.0 * turn] * 3] * 2 and state.tolist() == [[float(turn)] * 3] * 2
        assert number.item() == turn
    assert run.report().replays == 4, run.report()


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_what_follows_an_operator_that_raised(device: str) -> None:
    def step(x: torch.Tensor) -> None:
        try:
            x > 0  # noqa: B015
        except (NotImplementedError, RuntimeError):
            x.add_(-0.5)

    run = torchlazy.compile(step)
    for _ in range(6):
        x = torch.zeros(2, dtype=torch.complex64).to(device)
        run(x)
        assert x.tolist() == [-0.5 + 0j] * 2

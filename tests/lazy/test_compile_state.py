"""Compiled calls that leave new tensors, numbers and containers in their state: replays do what eager does.

Invariant: audits are off, and every case must be replayed at most of its calls, so that templates alone bring the state
about. Results and state are compared with those of the plain callable after each call.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torchlazy
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

Case = Callable[[str], tuple[Callable[..., Any], Callable[[], Any]]]
CASES: dict[str, tuple[Case, int]] = {}
CALLS = 12
pytestmark = pytest.mark.usefixtures("operator_by_operator")


def case(replays: int) -> Callable[[Case], Case]:
    """A case is given a device, and returns the callable and what shows its state; so many calls are replayed."""

    def enter(function: Case) -> Case:
        CASES[function.__name__] = function, replays
        return function

    return enter


def play(made: Case, device: str, compiled: bool) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    call, state = made(device)
    run = torchlazy.compile(call, audit=False) if compiled else call
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(CALLS):
        x = torch.randn(3, 4, generator=generator).to(device)
        value = run(x)
        seen.append(tree_map(_on_host, (value, state())))
    return seen, run


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def assert_same(found: Any, wanted: Any) -> None:
    (mine, spec), (theirs, other) = tree_flatten(found), tree_flatten(wanted)
    assert spec == other
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b)
        else:
            assert type(a) is type(b) and a == pytest.approx(b)


class Recurrent(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6, device="cpu")
        self.hidden: Any = torch.zeros(3, 6).to(device)
        self.to(device)


@case(10)
def attribute(device):
    class Model(Recurrent):
        def forward(self, x):
            with torch.no_grad():
                self.hidden = self.cell(x, self.hidden)
            return self.hidden.sum(0)

    model = Model(device)
    return model, lambda: model.hidden


@case(10)
def result_is_the_new_state(device):
    class Model(Recurrent):
        def forward(self, x):
            with torch.no_grad():
                self.hidden = self.cell(x, self.hidden)
            return self.hidden

    model = Model(device)
    return model, lambda: model.hidden


@case(10)
def tuple_of_states(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(4, 6)
            self.state = (torch.zeros(3, 6).to(device), torch.zeros(3, 6).to(device))

        def forward(self, x):
            with torch.no_grad():
                self.state = self.cell(x, self.state)
            return self.state[0] * 2

    model = Model().to(device)
    return model, lambda: model.state


@case(10)
def buffer(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            self.seen = self.seen * 0.9 + x.mean(0)
            return x - self.seen

    model = Model().to(device)
    return model, lambda: model.seen


@case(10)
def window_of_a_cache(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = torch.zeros(6, 4).to(device)

        def forward(self, x):
            self.cache = torch.cat([self.cache, x])[-6:]
            return self.cache.sum(0)

    model = Model()
    return model, lambda: model.cache


@case(10)
def items_of_a_dict(device):
    cache = {"k": torch.zeros(2, 5).to(device), "v": torch.zeros(2, 5).to(device), "name": "layer"}

    def call(x):
        cache["k"] = torch.roll(cache["k"], 1, 1) + x.mean()
        cache["v"] = cache["v"] * 0.5 + cache["k"]
        return (cache["k"] * cache["v"]).sum()

    return call, lambda: cache


@case(10)
def exchanged_items(device):
    """New state that is other state of before: what was the first is the second's memory now."""
    pair = {"now": torch.zeros(3, 4).to(device), "before": torch.ones(3, 4).to(device)}

    def call(x):
        pair["before"], pair["now"] = pair["now"], x + pair["before"]
        return pair["now"] - pair["before"]

    return call, lambda: pair


@case(9)
def the_argument_becomes_state(device):
    kept = {"x": torch.zeros(3, 4).to(device)}

    def call(x):
        difference = x - kept["x"]
        kept["x"] = x
        return difference

    return call, lambda: kept


@case(8)
def one_tensor_in_two_places(device):
    """An in-place write through one of them shows in the other."""
    kept = {"a": torch.zeros(3, 4).to(device), "b": torch.zeros(3, 4).to(device)}

    def call(x):
        kept["a"].add_(1)
        value = kept["b"] * 1
        kept["a"] = kept["b"] = x * 2
        return value

    return call, lambda: (kept, kept["a"] is kept["b"])


@case(6)
def losses_kept_to_a_length(device):
    losses: list[torch.Tensor] = []

    def call(x):
        loss = x.square().mean()
        losses.append(loss.detach())
        if len(losses) > 3:
            losses.pop(0)
        return torch.stack(losses).sum()

    return call, lambda: list(losses)


@case(6)
def deque_with_a_length(device):
    last: collections.deque[torch.Tensor] = collections.deque(maxlen=3)

    def call(x):
        last.append(x.mean())
        return sum(last) / len(last)

    return call, lambda: list(last)


@case(9)
def a_container_made_anew(device):
    class Holder:
        rows: Any = None

    holder = Holder()
    holder.rows = {"x": torch.zeros(3, 4).to(device), "parts": [torch.zeros(()).to(device)]}

    def call(x):
        holder.rows = {"x": x + holder.rows["x"], "parts": [x.sum() + holder.rows["parts"][0]]}
        return holder.rows["x"].sum()

    return call, lambda: holder.rows


@case(9)
def closure_cell(device):
    hidden = torch.zeros(3, 4).to(device)

    def call(x):
        nonlocal hidden
        hidden = torch.tanh(hidden + x)
        return hidden.sum()

    return call, lambda: hidden


@case(9)
def counter_in_arithmetic(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.scale = 0, 1.0

        def forward(self, x):
            self.calls += 1
            self.scale = self.scale * 0.9 + 0.01
            return x * self.calls * self.scale

    model = Model()
    return model, lambda: (model.calls, model.scale)


@case(6)
def counter_that_is_branched_on(device):
    state = {"calls": 0, "sum": torch.zeros(4).to(device)}

    def call(x):
        state["calls"] += 1
        state["sum"] = state["sum"] + x.sum(0)
        if state["calls"] % 3 == 0:
            state["sum"] = state["sum"] * 0.5
        return state["sum"] * 1

    return call, lambda: state


@case(9)
def average_of_items(device):
    class Meter:
        value, count = 0.0, 0

    meter = Meter()
    meter.value, meter.count = 0.0, 0

    def call(x):
        loss = x.square().mean()
        meter.value = 0.9 * meter.value + 0.1 * loss.item()
        meter.count += 1
        return loss

    return call, lambda: (meter.value, meter.count, type(meter.value).__name__)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_state_is_as_in_eager(name, device):
    made, replays = CASES[name]
    wanted, _ = play(made, device, False)
    found, run = play(made, device, True)
    assert_same(found, wanted)
    assert run.report().replays >= replays, run.report()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_module_with_state_whose_results_need_gradients(device):
    class Model(Recurrent):
        def forward(self, x):
            hidden = self.cell(x, self.hidden)
            self.hidden = hidden.detach()
            return hidden

    def train(compiled: bool):
        torch.manual_seed(0)
        model = Model(device)
        run = torchlazy.compile(model, audit=False) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for _ in range(9):
            optimizer.zero_grad()
            loss = run(torch.randn(3, 4).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            seen += [loss.detach().cpu(), model.hidden.cpu().sum()]
            assert not model.hidden.requires_grad
        return torch.stack(seen), run

    wanted, _ = train(False)
    found, run = train(True)
    torch.testing.assert_close(found, wanted)
    assert run.report().replays >= 5, run.report()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_state_that_somebody_else_replaces_between_calls(device):
    holder = {"mask": torch.ones(4).to(device)}
    run = torchlazy.compile(lambda x: x * holder["mask"], audit=False)
    for turn in range(8):
        mask = torch.full((4,), float(turn))
        holder["mask"] = mask.to(device)
        assert torch.equal(run(torch.ones(3, 4).to(device)).cpu(), mask.expand(3, 4))
    assert run.report().replays >= 6, run.report()
    argument = torch.arange(4.0).to(device)
    holder["mask"] = argument  # the argument's own memory
    assert torch.equal(run(argument).cpu(), torch.arange(4.0) ** 2)
    holder["mask"] = torch.ones(1, 4, dtype=torch.float64).to(device)
    assert run(argument).dtype == torch.float64


@pytest.mark.parametrize("how", ["closure", "rebound", "large"])
def test_arrays_of_numpy_are_never_stale(how):
    array = numpy.ones(2000 if how == "large" else 3, dtype=numpy.float32)

    def call(x):
        return x * float(array.sum())

    run = torchlazy.compile(call, audit=False)
    for turn in range(6):
        if how == "rebound":
            array = array + 1
        else:
            array[turn % 3] += 1
        assert run(torch.ones(2).to("lazy")).tolist() == [float(array.sum())] * 2
        if turn % 2:  # nothing has changed: a replay, but for arrays that are too large to compare
            run(torch.ones(2).to("lazy"))
    report = run.report()
    assert (
        (report.replays == 0 and any("NumPy array" in r for r in report.reasons)) if how == "large" else report.replays
    )


def test_captures_are_tried_again_after_a_pause():
    """A list grows to its length: none of the first captures serves, but later ones do."""
    last: collections.deque[torch.Tensor] = collections.deque(maxlen=40)

    def call(x):
        last.append(x.mean())
        return torch.stack(list(last)).sum()

    run = torchlazy.compile(call, audit=False)
    generator = torch.Generator().manual_seed(0)
    kept: collections.deque[float] = collections.deque(maxlen=40)
    with pytest.warns(RuntimeWarning, match="captured again|captures served|runs its Python"):
        for _ in range(120):
            x = torch.randn(3, generator=generator)
            kept.append(x.mean().item())
            assert run(x.to("lazy")).item() == pytest.approx(sum(kept), abs=1e-5)
    assert run.report().replays >= 40, run.report()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_batch_norm_that_runs_twice_before_its_backward(device):
    # Running statistics change behind autograd's back: a graph that holds them stays valid.
    def train(compiled):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)).to(device)
        run = torchlazy.compile(model, audit=False) if compiled else model
        for _ in range(4):
            first, second = run(torch.randn(5, 6).to(device)), run(torch.randn(5, 6).to(device))
            (first * second).sum().backward()
        return [*(p.grad.cpu() for p in model.parameters()), *(b.cpu() for b in model.buffers())], run

    wanted, _ = train(False)
    found, run = train(True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert run.report().replays == 7, run.report()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("what", ["state", "argument"])
def test_a_graph_over_what_a_replay_changed_is_stale_as_in_eager(device, what):
    weight = torch.ones(3, device="cpu").to(device).requires_grad_()
    total = torch.ones(3).to(device)

    def call(x):
        with torch.no_grad():
            (total if what == "state" else x).add_(1)
        return (total * x).sum()

    run = torchlazy.compile(call, audit=False)
    for _ in range(4):
        x = torch.ones(3).to(device)
        out = (weight * (total if what == "state" else x)).sum()
        run(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
    assert run.report().replays >= 2, run.report()

"""State that grows from call to call: what is only appended to is replayed, the rest is not captured at each call."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
import torchlazy
from torchlazy.lazy.compiled.guards.growing import is_only_appended_to

TURNS = 12
pytestmark = pytest.mark.filterwarnings("ignore:torchlazy.compile:RuntimeWarning")


def values(items):
    return [item.tolist() if isinstance(item, torch.Tensor) else item for item in items]


class Recorder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = []

    def forward(self, x):
        self.norms.append((x * x).sum())
        return x * 2


def _closure(device):
    losses, numbers = [], []

    def call(x):
        loss = (x * x).sum()
        losses.append(loss)
        numbers.extend([loss.item(), 1.0])
        return loss * 2

    return call, lambda: [*losses, *numbers]


def _attribute(device):
    module = Recorder().to(device)
    return torch.no_grad()(module), lambda: module.norms


KEPT = []


def _global(device):
    KEPT[:] = [0.0] * 300

    def call(x):
        KEPT.append(x.mean())
        return x + 1

    return call, lambda: KEPT


@pytest.mark.usefixtures("operator_by_operator")
@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("make", [_closure, _attribute, _global])
@pytest.mark.parametrize("audit", [False, True])
def test_what_is_only_appended_to_is_replayed(make, device, audit):
    def play(compiled):
        call, state = make(device)
        run = torchlazy.compile(call, audit=audit) if compiled else call
        generator = torch.Generator().manual_seed(0)
        found = [run(torch.randn(3, generator=generator).to(device)) for _ in range(TURNS)]
        assert all(type(item) is not list for item in state())
        return values(found), values(state()), run

    wanted, kept, _ = play(False)
    found, now, run = play(True)
    assert found == [pytest.approx(v) for v in wanted] and now == [pytest.approx(v) for v in kept]
    report = run.report()
    assert report.captures == 2 and report.replays + report.audits == TURNS - 2 and not report.alarm, report


@pytest.mark.usefixtures("operator_by_operator")
def test_somebody_else_empties_the_list():
    items = []

    def call(x):
        items.append(x * 2)
        return x + 1

    run = torchlazy.compile(call, audit=False)
    for turn in range(9):
        run(torch.full((2,), float(turn)).to("lazy"))
        if turn == 5:
            items.clear()
    assert values(items) == [[12.0, 12.0], [14.0, 14.0], [16.0, 16.0]]
    assert run.report().captures == 2, run.report()


def _mean(device):
    items = []

    def call(x):
        items.append((x * x).sum())
        return torch.stack(items).mean()

    return call, lambda: items


def _length(device):
    items = []

    def call(x):
        items.append(x.sum())
        return x * len(items)

    return call, lambda: items


def _last(device):
    items = []

    def call(x):
        total = x.sum() + (items[-1] if items else 0)
        items.append(total)
        return total

    return call, lambda: items


def _cache(device):
    cache = {"k": None}

    def call(x):
        key = x[None]
        cache["k"] = key if cache["k"] is None else torch.cat([cache["k"], key])
        return torch.softmax((cache["k"] * x).sum(-1), 0) @ cache["k"]

    return call, lambda: [cache["k"]]


def _parts(device):
    parts = []

    def call(x):
        parts.append(x[None])
        return torch.cat(parts).sum(0)

    return call, lambda: parts


@pytest.mark.usefixtures("operator_by_operator")
@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("make", [_mean, _length, _last, _parts])
def test_what_grows_otherwise_is_captured_a_few_times(make, device):
    def play(compiled):
        call, state = make(device)
        run = torchlazy.compile(call, audit=False) if compiled else call
        generator = torch.Generator().manual_seed(0)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = [run(torch.randn(3, generator=generator).to(device)) for _ in range(TURNS)]
        return found, state(), run, [str(w.message) for w in told if "torchlazy.compile" in str(w.message)]

    wanted, kept, _, _ = play(False)
    found, now, run, told = play(True)
    for a, b in zip([*found, *now], [*wanted, *kept], strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-5, atol=1e-5)
    report = run.report()
    assert report.captures <= 5 and report.verified == TURNS - report.captures, report
    assert len(told) == 1 and "has grown at each" in told[0], told


@pytest.mark.usefixtures("operator_by_operator")
def test_what_stops_growing_is_replayed():
    window = []

    def call(x):
        window.append(x.sum())
        if len(window) > 6:
            window.pop(0)
        return torch.stack(window).mean()

    run = torchlazy.compile(call, audit=False)
    sums = []
    for turn in range(20):
        x = torch.full((3,), float(turn))
        sums.append(x.sum())
        torch.testing.assert_close(run(x.to("lazy")).cpu(), torch.stack(sums[-6:]).mean())
    assert run.report().replays >= 8 and run.report().captures <= 6, run.report()


def test_a_growing_cache_shares_programs(compiled):
    """The first call, caches of one row and of three longer ones, and one program for all others."""
    call, _ = _cache("lazy")
    run = torchlazy.compile(call, audit=False)
    plain, _ = _cache("cpu")
    torchlazy.reset_metrics()
    before = 0
    for turn in range(16):
        x = torch.randn(3)
        torch.testing.assert_close(run(x.to("lazy")).cpu(), plain(x), rtol=1e-4, atol=1e-5)
        if turn == 5:
            before = torchlazy.metrics()["compiles"]
    assert before <= 6 and torchlazy.metrics()["compiles"] == before
    assert run.report().captures <= 5 and torchlazy.metrics()["generalised"] >= 8


def test_names_of_lists():
    items, other = [], []

    def appends(x):
        items.append(x)
        items.extend([x])

    def within(x):
        def inner():
            items.append(x)

        inner()

    def reads(x):
        items.append(x)
        return len(items)

    class Keeper:
        def __init__(self):
            self.items = []

        def add(self, x):
            self.items.append(x)

        def other(self, x):
            other.append(self.items)

    def code(function) -> list[types.CodeType]:
        return [function.__code__]

    assert is_only_appended_to("items (of f)", code(appends)) and is_only_appended_to("items (of f)", code(within))
    assert not is_only_appended_to("items (of f)", [*code(appends), *code(reads)])
    assert is_only_appended_to("keeper.items", [*code(Keeper.__init__), *code(Keeper.add)])
    assert is_only_appended_to("keeper (of f).items", [*code(Keeper.__init__), *code(Keeper.add)])
    assert not is_only_appended_to("keeper.items", [*code(Keeper.add), *code(Keeper.other)])
    assert not is_only_appended_to("table (of f)['items']", code(appends)), "a key is no name"


WRITES = {
    "at a position": lambda cache, at, new: cache.__setitem__((slice(None), at), new[:, 0]),
    "a slice": lambda cache, at, new: cache.__setitem__((slice(None), slice(at, at + 1)), new),
    "narrow": lambda cache, at, new: cache.narrow(1, at, 1).copy_(new),
    "select": lambda cache, at, new: cache.select(1, at).copy_(new[:, 0]),
    "index_copy": lambda cache, at, new: cache.index_copy_(1, torch.tensor([at], device=cache.device), new),
    "a list of one": lambda cache, at, new: cache.__setitem__((slice(None), [at]), new),
}


def _attends(device, write):
    """One step of decoding over a cache that is written where an argument says."""
    cache = torch.zeros(2, 32, 4).to(device)

    def step(x, at):
        write(cache, at, x)
        seen = cache[:, : at + 1]
        return torch.softmax(x @ seen.mT, -1) @ seen

    return step, cache


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("name", WRITES)
def test_a_cache_written_where_an_int_says_has_one_template(name, device, operator_by_operator):
    eager, wanted = _attends("cpu", WRITES[name])
    step, cache = _attends(device, WRITES[name])
    run = torchlazy.compile(step, audit=False)
    for at in range(2, TURNS + 6):
        x = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(at))
        torch.testing.assert_close(run(x.to(device), at).cpu(), eager(x, at))
        torch.testing.assert_close(cache.cpu(), wanted)
    report = run.report()
    assert report.captures <= 4 and report.replays >= TURNS, report


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_cache_written_where_an_int_says_compiles_twice(device, compiled):
    eager, _ = _attends("cpu", WRITES["a slice"])
    step, _ = _attends(device, WRITES["a slice"])
    run = torchlazy.compile(step, audit=False)
    before = torchlazy.metrics()["compiles"]
    for at in range(2, 10):
        x = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(at))
        torch.testing.assert_close(run(x.to(device), at).cpu(), eager(x, at))
    assert torchlazy.metrics()["compiles"] - before <= 2

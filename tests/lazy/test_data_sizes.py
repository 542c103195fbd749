"""Compiled calls whose data decides of sizes and branches: masks, `nonzero`, experts with token counts, early exits.

Invariant: values and state after each call are eager's, whichever template the call began with and went on in; most
calls are replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lazy.compare import data, ints

pytestmark = pytest.mark.usefixtures("operator_by_operator")
CALLS = 24
# A callable, its arguments at call number i, and what to compare beside its value.
Play = tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], Callable[[], Any]]
PROGRAMS: dict[str, Callable[[str], Play]] = {}


def program(make: Callable[[str], Play]) -> Callable[[str], Play]:
    PROGRAMS[make.__name__] = make
    return make


def of(function: Callable[[Tensor], Any], *shape: int) -> Callable[[str], Play]:
    return lambda device: (function, lambda i: (data(device, *(shape or (12, 4)), seed=i),), lambda: None)


PROGRAMS |= {
    "masked_select": of(lambda x: x.masked_select(x > 0).sum()),
    "a mask as index": of(lambda x: x[x > 0.5] * 2 + 1),
    "rows by a mask": of(lambda x: x[x[:, 0] > 0].mean(0).nan_to_num()),
    "nonzero": of(lambda x: (x > 0).nonzero().float().sum(0)),
    "where": of(lambda x: x[torch.where(x > 0.3)].tanh()),
    "unique": of(lambda x: x.round().unique()),
    "counts": of(lambda x: x.round().unique(return_counts=True)[1]),
    "repeat_interleave": of(lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long() + 1, dim=0)),
    "written where masked": of(lambda x: _written(x, x > 0.5)),
    "written rows": of(lambda x: _written(x, x[:, 0] > 0)),
    "added where masked": of(lambda x: _added(x, x > 0.5)),
    "written where masked, behind a slice": of(lambda x: _written(x, (slice(None), x[0] > -0.5))),
    "gradient of what is written": of(lambda x: _gradient_of_written(x)),
    "a list of floats": of(lambda x: x * sum(x[:3].sum(1).tolist())),
    "a list of one number": of(lambda x: x[: (x[:, 0] > 0).sum().tolist() + 2].sum(0)),
    "two masks": of(lambda x: x[x > 0].sum() - x[x < -0.2].prod()),
    "a mask of what a mask left": of(lambda x: (lambda y: y[y > 0.5] * y.shape[0])(x[x > 0])),
    "branch on a size": of(lambda x: x[x > 0] * 2 if (x > 0).sum() > 24 else x[x <= 0] * 3),
    "len of rows": of(lambda x: (lambda rows: rows * len(rows))(x[x[:, 1] > 0])),
    "numel in a factor": of(lambda x: x[x > 0] / x[x > 0].numel()),
    "equal": of(lambda x: x * 2 if torch.equal(x.sign(), x.sign().abs()) else x * 3),
    "int as bound": of(lambda x: x[: int((x[:, 0] > 0).sum()) + 2].sum(0)),
    "int as bound twice": of(lambda x: x[int((x[:, 0] > 0).sum()) :].sum(0) + x[: int((x[:, 1] > 0).sum())].sum(0)),
    "early exit": of(lambda x: _until(x)),
    "suppressed": of(lambda x: _suppressed(x), 8, 4),
    "few rows": of(lambda x: x[x[:, 0] > 0.8].sum(0), 4, 2),
}


def _written(x: Tensor, mask: Any) -> Tensor:
    made = x.clone()
    made[mask] = made[mask] * 2
    return made


def _added(x: Tensor, mask: Tensor) -> Tensor:
    made = x.clone()
    made[mask] += 1
    return made


def _gradient_of_written(x: Tensor) -> Tensor | None:
    x = x.clone().requires_grad_()
    made = x * 2
    made[x > 0.5] = x[x > 0.5] ** 2
    made.sum().backward()
    return x.grad


def _until(x: Tensor) -> tuple[Tensor, int]:
    steps = 0
    while x.norm() < 20 and steps < 8:
        x, steps = x * 1.5, steps + 1
    return x, steps


def _suppressed(x: Tensor) -> list[int]:
    """Rows kept one after another, each dropping those near to it."""
    left = x[:, 0].argsort()
    kept = []
    while left.numel() and len(kept) < 3:
        kept.append(int(left[0]))
        far = (x[left, 1] - x[left[0], 1]).abs() > 0.8
        left = left[far]
    return kept


def _experts(device: str, put: Callable[[Tensor, Tensor, Tensor, nn.Module], None]) -> Play:
    """Each of three layers gets the rows that a gate chooses for it; `put(out, x, mask, layer)` writes its results."""
    torch.manual_seed(0)
    gate = nn.Linear(4, 3).to(device)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(device)

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            chosen = gate(x).argmax(-1)
            out = torch.zeros_like(x)
            for number, layer in enumerate(layers):
                put(out, x, chosen == number, layer)
            return out

    return call, lambda i: (data(device, 40, 4, seed=i),), lambda: None


@program
def experts(device: str) -> Play:
    def put(out: Tensor, x: Tensor, mask: Tensor, layer: nn.Module) -> None:
        rows = torch.where(mask)[0]
        out[rows] = layer(x[rows])

    return _experts(device, put)


@program
def experts_by_masks(device: str) -> Play:
    def put(out: Tensor, x: Tensor, mask: Tensor, layer: nn.Module) -> None:
        if mask.any():
            out[mask] = layer(x[mask])

    return _experts(device, put)


@program
def words_hidden(device: str) -> Play:
    """What masked language models do to a batch: labels, a mask token, words from elsewhere."""

    def call(words: Tensor) -> tuple[Tensor, Tensor]:
        labels, words = words.clone(), words.clone()
        chosen = words % 7 < 2
        labels[~chosen] = -100
        words[chosen & (words % 2 == 0)] = 103
        others = torch.full_like(words, 5).cumsum(1)
        words[chosen & (words % 3 == 0)] = others[chosen & (words % 3 == 0)]
        return words, labels

    return call, lambda i: (ints(device, 4, 16, high=100, seed=i),), lambda: None


@program
def experts_trained(device: str) -> Play:
    torch.manual_seed(0)
    gate = nn.Linear(4, 2).to(device)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).to(device)
    both = nn.ModuleList([gate, layers])
    optimizer = torch.optim.Adam(both.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        weight, chosen = gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, layer in enumerate(layers):
            rows = torch.where(chosen == number)[0]
            out[rows] = layer(x[rows]) * weight[rows, None]
        loss = (out - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: (data(device, 40, 4, seed=i),), lambda: list(both.parameters())


@program
def skipped_where_the_loss_is_no_number(device: str) -> Play:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    counts = {"skipped": 0}

    def step(x: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if loss.isnan():
            counts["skipped"] += 1
            return -1.0
        loss.backward()
        optimizer.step()
        return loss.item()

    def arguments(i: int) -> tuple[Tensor]:
        x = data(device, 6, 4, seed=i)
        return (x * float("nan") if i % 5 == 3 else x,)

    return step, arguments, lambda: [*model.parameters(), counts["skipped"]]


@program
def state_written_before_the_mask(device: str) -> Play:
    """What is written before the data decides is held back until it has."""
    seen = torch.zeros(4).to(device)
    rows = {"all": 0}

    def call(x: Tensor) -> Tensor:
        seen.add_(x.sum(0))
        picked = x[x[:, 0] > 0]
        seen.mul_(0.5).add_(picked.sum(0))
        rows["all"] += 1
        if picked.sum() > 0:
            seen.sub_(1)
        return seen * 2

    return call, lambda i: (data(device, 12, 4, seed=i),), lambda: [seen, rows["all"]]


@program
def an_argument_written_before_the_mask(device: str) -> Play:
    kept: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        x.mul_(2)
        picked = x[x > 0.5]
        x.add_(picked.sum())
        return picked

    def arguments(i: int) -> tuple[Tensor]:
        kept[:] = [data(device, 12, 4, seed=i)]
        return (kept[0],)

    return call, arguments, lambda: kept[0]


@program
def counts_on_the_host(device: str) -> Play:
    """Ordinary tensors among lazy ones, written before and after the data decides."""
    steps = torch.zeros((), dtype=torch.int64)

    def call(x: Tensor) -> Tensor:
        steps.add_(1)
        picked = x[x > 0]
        steps.add_(10)
        return picked.sum() * steps.item()

    return call, lambda i: (data(device, 12, 4, seed=i),), lambda: steps


@program
def a_module_that_stops_early(device: str) -> Play:
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).to(device)
    head = nn.Linear(4, 3).to(device)

    def call(x: Tensor) -> tuple[Tensor, int]:
        with torch.no_grad():
            depth = 0
            for layer in layers:
                depth += 1
                x = torch.tanh(layer(x) * 2)
                scores = F.softmax(head(x) * 3, -1)
                if scores.max(-1).values.mean() > 0.75:
                    break
            return scores, depth

    return call, lambda i: (data(device, 3, 4, seed=i),), lambda: None


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _played(make: Callable[[str], Play], device: str, compiled: bool, audit: bool = False) -> tuple[list[Any], Any]:
    function, arguments, state = make(device)
    run = torchlazy.compile(function, audit=audit) if compiled else function
    return [(_plain(run(*arguments(i))), _plain(state())) for i in range(CALLS)], run


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_state_are_eagers(name: str, device: str) -> None:
    wanted, _ = _played(PROGRAMS[name], "cpu", False)
    found, run = _played(PROGRAMS[name], device, True)
    for number, (have, want) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5, msg=lambda text, n=number: f"call {n}: {text}")
    report = run.report()
    # A program of three positions of 8 has hundreds of ways.
    assert report.replays >= (0 if name == "suppressed" else 5), str(report)
    assert not report.alarm


@pytest.mark.parametrize("name", ["masked_select", "experts", "state_written_before_the_mask", "early exit"])
def test_audits_find_nothing(name: str) -> None:
    wanted, _ = _played(PROGRAMS[name], "cpu", False)
    found, run = _played(PROGRAMS[name], "cpu", True, audit=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    report = run.report()
    assert report.audits and report.replays and not report.alarm, str(report)


@pytest.mark.usefixtures("device_in_python")  # draws as in compiled calls
def test_random_numbers_drawn_before_the_data_decides_are_drawn_once() -> None:
    def call(x: Tensor) -> Tensor:
        noise = torch.rand_like(x[:, 0])
        picked = x[noise + x[:, 0] > 0.5]
        return picked.sum() + torch.rand_like(x[0])

    def play(function: Any) -> list[Tensor]:
        torch.manual_seed(3)
        found = []
        for i in range(CALLS):
            found += [function(data("lazy", 12, 4, seed=i)).cpu(), torch.rand(1)]
        return found

    run = torchlazy.compile(call, audit=False)
    torch.testing.assert_close(play(run), play(call))
    assert run.report().replays >= 10


def test_a_replay_goes_on_where_another_template_parts_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs before a branch run once, whichever way it takes."""
    from torchlazy.lazy.compiled.replay.replay import Replay

    ran: list[Any] = []
    segment = Replay._segment
    monkeypatch.setattr(Replay, "_segment", lambda self, step, state: (ran.append(step), segment(self, step, state))[1])

    def call(x: Tensor) -> Tensor:
        y = torch.tanh(x @ x.T)
        return y * 2 if y.sum() > 0 else y - 1

    run = torchlazy.compile(call, audit=False)
    signs = [1, -1, 1, -1, 1, 1, -1, -1, 1]
    for i, sign in enumerate(signs):
        x = torch.eye(4) * 2 + torch.full((4, 4), 0.1 * sign * i)
        x[0] *= 3 * sign
        before = len(ran)
        torch.testing.assert_close(run(x), call(x))
        assert len(ran) - before <= 2
    assert run.report().captures <= 2, run.report()


def test_what_raises_after_the_data_has_decided_is_eagers_error() -> None:
    def call(x: Tensor, table: Tensor) -> Tensor:
        table.add_(1)
        rows = torch.where(x > 0)[0]
        return table[rows * 10]

    run = torchlazy.compile(call, audit=False)
    for i in range(8):
        x = data("cpu", 6, seed=i)
        plain, other = torch.zeros(60, 2), torch.zeros(60, 2)
        torch.testing.assert_close(run(x, other), call(x, plain))
    x, small = torch.ones(6), torch.zeros(60, 2)[:51]
    torch.testing.assert_close(run(x, small.clone()), call(x, small.clone()))
    with pytest.raises(IndexError):
        run(torch.ones(7), torch.zeros(60, 2)).sum().item()


def test_turns_of_a_loop_over_sizes_that_operators_give() -> None:
    """At 19 the sizes are 10, 5 and 3, where at 10 and 13 they end with 2: another turn is to be taken."""

    def call(x: Tensor) -> Tensor:
        means = []
        while x.shape[-1] > 2:
            x = F.avg_pool2d(x, 2, ceil_mode=True)
            means.append(x.mean())
        return torch.stack(means)

    run = torchlazy.compile(call, audit=False)
    for number in (7, 10, 13, 16, 19, 22, 34, 40, 10, 13, 16, 19):
        x = data("cpu", 1, 2, number, number, seed=number)
        torch.testing.assert_close(run(x), call(x), msg=lambda text, n=number: f"size {n}: {text}")
    assert not run.report().alarm


def test_a_size_that_is_read_and_not_asked_is_the_operators_own() -> None:
    def call(x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.avg_pool2d(x, 2, ceil_mode=True)
        return x.sum() * x.shape[-1]

    run = torchlazy.compile(call, audit=False)
    for number in (14, 10, 19, 13, 22, 16, 34, 40, 28, 36, 24, 30):
        x = data("cpu", 1, 2, number, number, seed=number)
        torch.testing.assert_close(run(x), call(x), msg=lambda text, n=number: f"size {n}: {text}")
    assert run.report().replays, run.report()


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_lengths_that_are_arguments_are_read_at_each_call(device: str) -> None:
    def call(x: Tensor, words: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), words, rows, lengths)

    def parted(x: Tensor, at: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in torch.tensor_split(x, at)])

    losses, parts = torchlazy.compile(call, audit=False), torchlazy.compile(parted, audit=False)
    for i in range(8):
        given = data("cpu", 12, 2, 6, seed=i), ints("cpu", 2, 4, low=1, high=6, seed=i)
        lengths = ints("cpu", 2, low=9, high=13, seed=i), ints("cpu", 2, low=2, high=5, seed=i)
        have = losses(*[tensor.to(device) for tensor in (*given, *lengths)])
        torch.testing.assert_close(have.cpu(), call(*given, *lengths))
        at = ints("cpu", 2, low=2, high=7, seed=i).sort().values
        torch.testing.assert_close(parts(given[0].to(device), at).cpu(), parted(given[0], at))


def test_plain_values_of_a_list_are_not_captured_one_by_one() -> None:
    def call(x: Tensor) -> Tensor:
        return x * torch.tensor(x.sum(1).tolist(), device=x.device)[:, None]

    run = torchlazy.compile(call, audit=False)
    for i in range(10):
        x = data("lazy", 3, 4, seed=i)
        torch.testing.assert_close(run(x).cpu(), call(x.cpu()))
    assert run.report().captures <= 4 and "plain values of a list" in str(run.report()), run.report()


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_results_that_are_a_part_of_their_memory(device: str) -> None:
    """`lstsq` with more rows than columns: the solution is the first rows of a copy of the right side."""

    def call(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        solution, residuals, rank, _ = torch.linalg.lstsq(a, b, driver="gelsd")
        return solution * 2, residuals, rank, solution.mT @ solution

    run = torchlazy.compile(call, audit=False)
    for i in range(5):
        given = data("cpu", 2, 4, 3, seed=i), data("cpu", 2, 4, 3, seed=i + 9)
        have = run(*[tensor.to(device) for tensor in given])
        for mine, theirs in zip(have, call(*given), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-4)

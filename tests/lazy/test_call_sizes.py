"""Compiled calls at other sizes: few captures, one template for all sizes, none where Python would go another way."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor
from torch.nn import functional as F
from torchlazy.lazy.compiled import families

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def values(result: Any) -> Any:
    """The result with tensors as plain numbers, to compare."""
    if isinstance(result, Tensor):
        return result.detach().cpu().double().numpy().round(4).tolist(), tuple(result.shape), str(result.dtype)
    if isinstance(result, (tuple, list)):
        return [values(item) for item in result]
    return result


def swept(function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], device: str = "cpu", **settings: Any) -> Any:
    """The report after calls on all inputs, each of which gave what the function itself gives."""
    run = torchlazy.compile(function, **settings)
    for given in inputs:
        there = [x.to(device) if isinstance(x, Tensor) else x for x in given]
        assert values(run(*there)) == values(function(*given)), [x.shape for x in given if isinstance(x, Tensor)]
    report = run.report()
    assert not report.alarm, report
    return report


def rows(sizes: Sequence[int], width: int = 6) -> list[tuple[Tensor]]:
    return [(torch.arange(n * width, dtype=torch.float32).reshape(n, width).sin(),) for n in sizes]


SIZES = (3, 4, 5, 6, 7, 9, 12, 17, 20, 33, 40, 64, 65)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_module_over_batch_sizes(device: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    inputs = rows(SIZES)
    with torch.no_grad():
        wanted = [values(module(*given)) for given in inputs]
        module.to(device)
        run = torchlazy.compile(module)
        found = [values(run(given.to(device))) for (given,) in inputs]
    assert found == wanted
    report = run.report()
    assert report.captures <= 3 and report.replays + report.audits == len(SIZES) - report.captures, report


@pytest.mark.parametrize(("dynamic", "captures"), [(None, 3), (True, 2), (False, 0)])
def test_how_many_captures(dynamic: bool | None, captures: int) -> None:
    report = swept(lambda x: (x.softmax(-1) @ x.T).sum(0), rows(SIZES[::-1]), dynamic=dynamic)
    assert report.captures == captures if captures else not report.replays, report


def test_two_sizes_change() -> None:
    def call(x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = x.view(batch, length, 2, width // 2).transpose(1, 2)
        scores = heads @ heads.mT / math.sqrt(width // 2) + torch.ones(length, length).tril().log().to(x.device)
        return (scores.softmax(-1) @ heads).transpose(1, 2).reshape(batch, length, width)

    shapes = [(2, 5, 4), (3, 5, 4), (2, 7, 4), (5, 6, 4), (4, 9, 4), (6, 11, 4), (9, 3, 4), (7, 7, 4)]
    report = swept(call, [(torch.randn(shape, generator=torch.Generator().manual_seed(1)),) for shape in shapes])
    assert report.captures <= 5 and report.replays + report.audits >= 3, report


# ---- where Python goes another way at another size


def _above(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 16 else x + 1


def _at_one_size(x: Tensor) -> Tensor:
    return x - 1 if len(x) == 12 else x + 1


def _every_fourth(x: Tensor) -> Tensor:
    return x.cos() if x.size(0) % 4 == 0 else x.sin()


def _clamped(x: Tensor) -> Tensor:
    return x[: min(x.shape[0], 10)].sum(0)


def _cut_off(x: Tensor) -> Tensor:
    return x[:10].cumsum(0)


def _last_ones(x: Tensor) -> Tensor:
    return x[-10:] * 2


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[0] % 8)).view(-1, 8, x.shape[1]).sum(1)


def _in_chunks(x: Tensor) -> list[Tensor]:
    return [part.sum(0) for part in x.split(8)]


def _in_a_loop(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[1]).to(x.device)
    for start in range(0, x.shape[0], 16):
        total = total * 0.5 + x[start : start + 16].sum(0)
    return total


def _window_of_a_window(x: Tensor) -> Tensor:
    return x[:11][::3]  # a result that no operator of the program makes


def _window_from_the_end(x: Tensor) -> Any:
    return x[-9:], x.split(8)[0]


def _halves(x: Tensor) -> Tensor:
    half = x.shape[0] // 2
    return x[:half].sum(0) - x[half:].sum(0)


def _scaled(x: Tensor) -> Tensor:
    return x / math.sqrt(x.shape[0])


def _taken_as_float(x: Tensor) -> Tensor:
    return x * (1.0 if float(x.shape[0]) < 20 else 2.0)


def _by_a_table(x: Tensor) -> Tensor:
    return x * {3: 1.0, 4: 2.0, 5: 3.0}.get(x.shape[0], 5.0)


def _by_its_digits(x: Tensor) -> Tensor:
    return x * len(str(x.shape[0]))


def _of_a_result(x: Tensor) -> Tensor:
    wide = torch.cat([x, x])
    return wide * 2 if wide.numel() > 300 else wide


def _gives_sizes(x: Tensor) -> Any:
    return x.shape[0], x.shape[0] + 1, tuple(x.shape), {"rows": len(x) * 2}["rows"], x.shape


def _strided(x: Tensor) -> Tensor:
    return x[::3].sum(0) + x[1::2].mean(0)


def _two_products(x: Tensor) -> Tensor:
    return x if x.shape[0] * x.shape[1] < 100 else x * 2


@pytest.mark.parametrize(
    "function",
    [_above, _at_one_size, _every_fourth, _clamped, _cut_off, _last_ones, _padded, _in_chunks, _in_a_loop,
     _window_of_a_window, _window_from_the_end, _halves, _scaled, _taken_as_float, _by_a_table, _by_its_digits,
     _of_a_result, _gives_sizes, _strided, _two_products],
)  # fmt: skip
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_python_that_depends_on_sizes(function: Callable[[Tensor], Any], device: str, dynamic: bool | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        swept(function, rows(range(3, 41)), device, dynamic=dynamic, audit=False)


def test_sizes_are_plain_ints_after_the_call() -> None:
    kept: list[Any] = []

    class Keeps:
        def __init__(self) -> None:
            self.rows: Any = 0

    holder = Keeps()

    def call(x: Tensor) -> Any:
        holder.rows = x.shape[0] + 1
        return x * 2, x.shape[0], {"n": x.size(0)}

    run = torchlazy.compile(call)
    for (x,) in rows(SIZES):
        _, size, named = run(x)
        kept += [size, named["n"], holder.rows]
        assert (size, named["n"], holder.rows) == (len(x), len(x), len(x) + 1)
    assert {type(value) for value in kept} == {int}


# ---- caches that grow


class Decoder(torch.nn.Module):
    """One layer of attention over a cache that its caller keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 24)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, ids: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.mix(self.embed(ids)).view(*ids.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mask = torch.ones(q.shape[2], k.shape[2], device=ids.device).tril(k.shape[2] - q.shape[2]).bool()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(mixed.transpose(1, 2).flatten(2))[:, -1], (k, v)


def decoded(call: Callable[..., Any], device: str, steps: int) -> list[Any]:
    ids, past, found = torch.tensor([[1, 2, 3], [4, 5, 6]]).to(device), None, []
    with torch.no_grad():
        for _ in range(steps):
            logits, past = call(ids, past)
            ids = logits.argmax(-1, keepdim=True)
            found.append(values(logits))
    return found


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_cache_over_many_lengths(device: str) -> None:
    torch.manual_seed(0)
    model = Decoder()
    wanted = decoded(model, "cpu", 60)
    run = torchlazy.compile(model.to(device))
    assert decoded(run, device, 60) == wanted
    first = run.report()
    assert first.captures <= 2 + 3 and first.verified == 0, first
    assert decoded(run, device, 60) == wanted
    second = run.report()
    assert second.captures == first.captures and not second.alarm, second


class Remembers(torch.nn.Module):
    """A cache that the module keeps, and a place in it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x if self.cache is None else torch.cat([self.cache, x])
        return ((self.cache @ x.T).softmax(0) * self.cache).sum(0)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_cache_of_the_module(device: str) -> None:
    inputs = [torch.full((1, 4), float(turn)).sin() for turn in range(40)]
    model = Remembers()
    wanted = [values(model(x)) for x in inputs]
    model = Remembers()
    run = torchlazy.compile(model)
    assert [values(run(x.to(device))) for x in inputs] == wanted
    report = run.report()
    assert report.captures <= 6 and report.verified == 0, report


# ---- training


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_training_step_over_batch_sizes(device: str) -> None:
    def play(compiled: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        model.to(device if compiled else "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        run = torchlazy.compile(step) if compiled else step
        found = []
        for (x,) in rows(SIZES + SIZES[::-1]):
            y = torch.arange(len(x)) % 3
            found.append(values(run(*(t.to(device if compiled else "cpu") for t in (x, y)))))
        return [*found, *map(values, model.parameters())], run.report() if compiled else None

    wanted, _ = play(False)
    found, report = play(True)
    assert str(found) == str(wanted) or _close(found, wanted)
    assert report.captures <= 5 and report.replays > 10 and not report.alarm, report


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_close, a, b))
    return bool(a == pytest.approx(b, abs=1e-3)) if isinstance(a, float) else a == b


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_gradients_from_outside_over_batch_sizes(device: str) -> None:
    def play(compiled: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        where = device if compiled else "cpu"
        run = torchlazy.compile(model.to(where)) if compiled else model
        found = []
        for (x,) in rows(SIZES):
            model.zero_grad()
            run(x.to(where)).pow(2).mean().backward()
            found.append([values(p.grad) for p in model.parameters()])
        return found, run.report() if compiled else None

    wanted, _ = play(False)
    found, report = play(True)
    assert _close(found, wanted)
    assert report.captures <= 4 and report.replays > 4, report


# ---- audits


_PLACES = tuple(range(64))


def test_what_python_does_unseen_is_caught() -> None:
    def call(x: Tensor) -> Tensor:
        return x * (2.0 if len(_PLACES[: x.shape[0]]) > 16 else 1.0)  # C code takes the size

    run = torchlazy.compile(call)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (x,) in rows(range(3, 60)):
            run(x)
    assert any("at some sizes" in str(w.message) for w in caught)
    big = rows([61])[0][0]
    assert torch.equal(run(big), call(big))


def _from_a_place(x: Tensor, place: int) -> Tensor:
    return x[:, place : place + 2].sum(0) if place < 30 else x[:, :2].sum(0)


def _up_to_a_place(x: Tensor, place: int) -> Any:
    return x[:, :place].sum(1), place + 1


@pytest.mark.parametrize("function", [_from_a_place, _up_to_a_place])
@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_integers_among_the_arguments(function: Callable[..., Any], device: str) -> None:
    inputs = [(*rows([3], 48)[0], place) for place in range(40)]
    report = swept(function, inputs, device, audit=False)
    assert report.captures <= 12 and report.replays > 25, report


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_training_and_evaluation_in_turns(device: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)).to(device)
    twin = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    twin.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    run = torchlazy.compile(model, audit=False)
    with torch.no_grad():
        for turn, (x,) in enumerate(rows([*SIZES, *range(70, 90)])):
            run.train(turn % 2 == 0)
            twin.train(turn % 2 == 0)
            torch.testing.assert_close(run(x.to(device)).cpu(), twin(x), rtol=1e-4, atol=1e-5)
    assert run.report().captures <= 10, run.report()


def test_a_number_of_the_state_that_moves_with_the_sizes() -> None:
    class Model(torch.nn.Module):
        longest = 0

        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(0)

    model = Model()
    run = torchlazy.compile(model)
    for (x,) in rows(SIZES):
        model.longest = 2 * len(x)
        torch.testing.assert_close(run(x), x.cumsum(0))
    assert run.report().captures <= 5, run.report()


def test_results_are_not_kept() -> None:
    run = torchlazy.compile(lambda x: x * 2)
    kept = []
    for (x,) in rows(SIZES):
        kept.append(weakref.ref(run(x)))
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_counts_that_come_apart_between_sizes() -> None:
    def play(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = torchlazy.compile(step, audit=False) if compiled else step
        found = []
        for turn, (x,) in enumerate(rows([*SIZES, *range(70, 80)])):
            if turn == 9:
                optimizer.state[model[0].weight]["step"] += 7
            found.append(values(run(x)))
        assert not compiled or run.report().captures <= 8, run.report()
        return [*found, *map(values, model.parameters())]

    assert _close(play(True), play(False))


def _way_up(x: Tensor) -> Tensor:
    """A U-Net's skip connection: the pooled and enlarged image is padded to what it was."""
    low = F.interpolate(F.max_pool2d(x, 2), scale_factor=2)
    high, wide = x.shape[2] - low.shape[2], x.shape[3] - low.shape[3]
    return torch.cat([x, F.pad(low, [wide // 2, wide - wide // 2, high // 2, high - high // 2])], 1) * 2


def _rounded_up(x: Tensor) -> Tensor:
    means = []
    for _ in range(3):
        means.append(x.mean((2, 3)))
        x = F.max_pool2d(x, 2, ceil_mode=True)
    return torch.cat(means, 1)


def _enlarged(x: Tensor, size: int) -> Tensor:
    return F.interpolate(x, size=(size, size + 1), mode="nearest")


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (_way_up, [(torch.randn(1, 2, 12 + 5 * i % 9, 12 + 3 * i % 7),) for i in range(40)]),
        (_rounded_up, [(torch.randn(1, 2, 9 + 2 * (i % 7), 11 + i % 5),) for i in range(40)]),
        (_enlarged, [(torch.randn(1, 2, 8, 9), 5 + i % 11) for i in range(40)]),
    ],
    ids=["a U-Net's way up", "a pyramid, rounded up", "enlarged to a number and the next one"],
)
def test_sizes_that_odd_and_even_images_have(function: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> None:
    report = swept(function, inputs, audit=False)
    assert report.captures <= 6 and not report.verified, report


def test_a_ring_of_forty_places() -> None:
    """The position and the count of what was written move; the ring is full in the end."""

    def play(compiled: bool) -> tuple[list[Tensor], Any]:
        ring, at = torch.zeros(40, 3), {"position": 0, "count": 0}

        def step(x: Tensor) -> Tensor:
            ring[at["position"]] = x
            at["position"], at["count"] = (at["position"] + 1) % 40, min(at["count"] + 1, 40)
            return ring[: at["count"]].mean(0)

        run: Any = torchlazy.compile(step, audit=False) if compiled else step
        return [run(torch.full((3,), float(i))) for i in range(100)], run

    found, run = play(True)
    torch.testing.assert_close(found, play(False)[0])
    assert run.report().captures + run.report().verified <= 16, run.report()


def test_a_number_that_was_none_and_is_stored_anew_at_each_size_is_no_alarm() -> None:
    """What the call leaves is what is there: a replay that writes it, and an audit that sees no change, are one."""

    class Pools(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pooled: int | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.pooled = 1
            x = x + self.pooled
            self.pooled *= 2
            return x

    module = Pools()
    run = torchlazy.compile(module)
    for rows in (2, 4, 2, 4, 2, 3, 5, 2):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(run(x), x + 1)
        assert module.pooled == 2
    report = run.report()
    assert not report.alarm and report.captures <= 5 and report.verified == 0, report


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("graph", [True, False])
def test_sizes_that_come_once_run_their_python(graph: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a template for them takes longer than it saves. They are replayed from the second call on."""
    monkeypatch.setattr(families, "_MOST_BINDING", 0.0)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    other = copy.deepcopy(module)
    run, runs = torchlazy.compile(module.to(device)), []
    for sizes in (SIZES[:5], SIZES[5:], SIZES[5:]):
        before = run.report()
        for size in sizes:
            x = torch.full((size, 6), size / 7)
            with torch.set_grad_enabled(graph):
                found, want = run(x.to(device)), other(x)
                torch.testing.assert_close(found.cpu(), want)
                if graph:
                    found.square().sum().backward()
                    want.square().sum().backward()
        after = run.report()
        runs.append((after.verified - before.verified, after.captures - before.captures))
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert not graph or p.grad is not None
        torch.testing.assert_close(*(None if t.grad is None else t.grad.cpu() for t in (p, q)))
    assert runs[1:] == [(len(SIZES) - 5, 0), (0, 0)] and runs[0][0] <= 2, (runs, run.report())
    assert "sizes that came once" in str(run.report())

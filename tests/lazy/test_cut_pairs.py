"""A compiled step that reads its loss before `backward()`: forward and backward planned as one, with equal values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.api import driver
from torchlazy.lazy.compiled.replay import pairs as replay_pairs
from torchlazy.lazy.deferred import DeferredDriver
from torchlazy.lazy.run.segments import watch


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[replay_pairs.CutPair]:
    """Programs at first sight, pairs whatever they hold; lists the pairs of each second half that ran."""
    monkeypatch.setattr(torchlazy.config, "tiers", "off")
    monkeypatch.setattr(torchlazy.config, "strict", True)
    monkeypatch.setattr(watch, "LEAST_BYTES", 0)
    ran: list[replay_pairs.CutPair] = []
    second = replay_pairs.PairRun.run_second

    def run_second(self: replay_pairs.PairRun, *args: Any) -> list[Any]:
        ran.append(self.pair)
        return second(self, *args)

    monkeypatch.setattr(replay_pairs.PairRun, "run_second", run_second)
    return ran


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.LayerNorm(32), torch.nn.Linear(32, 5)
    )


def convnet() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 2, 3)), torch.nn.Conv2d(1, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.SiLU(),
        torch.nn.Flatten(), torch.nn.Linear(48, 5),
    )  # fmt: skip


Step = Callable[[torch.Tensor, torch.Tensor], Any]


def read_first(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        number = loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return number

    return step


def look_at_outputs(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """What the backward reads is the caller's as well."""

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = model[:2](x)
        logits = model[2:](hidden)
        loss = F.cross_entropy(logits, y)
        number = loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return number, hidden.detach(), logits.detach().sum()

    return step


def branch_on_loss(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        if not loss.item() < 100.0:
            raise RuntimeError("the loss has exploded")
        (loss * 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def half_precision(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        number = loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return number

    return step


STEPS = {
    "read first": read_first,
    "look at outputs": look_at_outputs,
    "branch on loss": branch_on_loss,
    "half precision": half_precision,
}


def train(
    make_model: Callable[[], torch.nn.Module], make_step: Any, compiled: bool
) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = make_model().to("lazy")
    step = make_step(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True))
    run = torchlazy.compile(step) if compiled else step
    inputs, labels = torch.randn(12, 16, 6), torch.randint(0, 5, (12, 16))
    torch.manual_seed(1)
    results = [run(x.to("lazy"), y.to("lazy")) for x, y in zip(inputs, labels, strict=True)]
    flat = [
        [v.cpu() if isinstance(v, torch.Tensor) else v for v in (r if isinstance(r, tuple) else (r,))] for r in results
    ]
    return flat, {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("make_step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("make_model", [mlp, convnet])
def test_values_are_those_of_the_call_itself(make_model: Any, make_step: Any, pairs: list[Any]):
    if make_step is look_at_outputs and make_model is convnet:
        make_step = read_first
    wanted, found = train(make_model, make_step, False), train(make_model, make_step, True)
    assert len(pairs) >= 3
    tolerance = {"rtol": 0.02, "atol": 0.02} if make_step is half_precision else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found[0], wanted[0], **tolerance)
    torch.testing.assert_close(found[1], wanted[1], **tolerance)


def test_less_crosses_than_autograd_holds(pairs: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Of a chain of elementwise operators autograd holds every operand; of those one is enough."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(16, 64).to("lazy"), torch.nn.Linear(64, 4).to("lazy")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)

    def step(x: torch.Tensor) -> float:
        h = first(x)
        h = h * h * (h + 1.0) * (h - 1.0)
        loss = second(h).square().mean()
        number = loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return number

    run = torchlazy.compile(step)
    x = torch.randn(32, 16).to("lazy")
    held: list[int] = []
    target = driver.real() if isinstance(driver, DeferredDriver) else driver
    run_half = target.run_half

    def count(compiled: Any, first: Any, memory: list[torch.Tensor], scalars: list[Any]) -> list[Any]:
        if compiled.trace.half.is_second:
            names = [name for name, _ in compiled.program.inputs]
            held.append(sum(t.nbytes for n, t in zip(names, memory, strict=True) if n.startswith("held")))
        return run_half(compiled, first, memory, scalars)

    monkeypatch.setattr(target, "run_half", count)
    for _ in range(9):
        run(x)
    pair = pairs[-1]
    hidden = sum(pair.first.trace.outputs[i][1].nbytes for i in pair.hidden)
    assert held and max(held) < 0.7 * hidden, (held, hidden)


@pytest.mark.parametrize("is_paired", [False, True])
def test_what_the_backward_holds_alone_is_freed_as_it_goes_on(
    is_paired: bool, pairs: list[Any], monkeypatch: pytest.MonkeyPatch
):
    """A program that returns has let go of every kept value, and so has whoever ran it."""
    if not is_paired:
        monkeypatch.setattr(watch, "LEAST_BYTES", 1 << 60)
    torch.manual_seed(0)
    model = mlp().to("lazy")
    step = torchlazy.compile(read_first(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    x, y = torch.randn(8, 6).to("lazy"), torch.randint(0, 5, (8,)).to("lazy")
    for _ in range(9):
        step(x, y)
    target = driver.real() if isinstance(driver, DeferredDriver) else driver
    name = "run_half" if is_paired else "run_compiled"
    run = getattr(target, name)
    alive: list[int] = []
    gone: list[int] = []

    def watched(compiled: Any, trace: Any, memory: list[torch.Tensor], scalars: list[Any]) -> list[Any]:
        refs = [weakref.ref(value) for value in memory if value.dim()]
        values = run(compiled, trace, memory, scalars)
        alive.append(len(refs) - sum(ref() is None for ref in refs))
        gone.append(sum(ref() is None for ref in refs))
        return list(values)

    monkeypatch.setattr(target, name, watched)
    step(x, y)
    assert bool(pairs) is is_paired
    assert len(gone) == 2 and gone[1] >= 4, (gone, alive)
    state = len(list(model.parameters())) + 2  # the arguments
    assert alive[1] <= state, alive


def test_an_index_out_of_range_is_eagers_error_and_the_next_call_is_right(pairs: list[Any]):
    def make(compiled: bool) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(7, 6), torch.nn.GELU(), torch.nn.Linear(6, 5)).to("lazy")
        step = read_first(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return torchlazy.compile(step) if compiled else step

    x, y = torch.randint(0, 7, (8,)), torch.randint(0, 5, (8,))
    results = []
    for run in (make(False), make(True)):
        for _ in range(9):
            run(x.to("lazy"), y.to("lazy"))
        with pytest.raises(IndexError):
            run(torch.full((8,), 9).to("lazy"), y.to("lazy"))
        results.append([run(x.to("lazy"), y.to("lazy")) for _ in range(3)])
    assert pairs
    torch.testing.assert_close(results[1], results[0])


def test_memory_changed_between_the_halves_is_no_pair(pairs: list[Any]):
    """Two backwards, each after a read of its loss: a segment with a backward of its own is no first half."""

    def make(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            numbers = []
            for part in (slice(0, 8), slice(8, 16)):
                loss = F.cross_entropy(model(x[part]), y[part])
                numbers.append(loss.item())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return tuple(numbers)

        return step

    wanted, found = train(mlp, make, False), train(mlp, make, True)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-5)


def test_small_steps_are_not_paired(monkeypatch: pytest.MonkeyPatch, pairs: list[Any]):
    monkeypatch.setattr(watch, "LEAST_BYTES", 8 << 20)
    train(mlp, read_first, True)
    assert not pairs

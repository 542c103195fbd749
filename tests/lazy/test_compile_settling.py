"""Training programs whose Python keeps counts, places and bests: their steps come to be replayed.

Invariant: each step gives what it gives eagerly, and after a handful of calls most of them are replays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 32
Step = Callable[[Tensor, Tensor], Tensor]


def drawn(i: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(i))


class Contrast(nn.Module):
    """A momentum encoder and a queue of its last keys; the place in the queue is a buffer, or an int."""

    def __init__(self, kind: type, places: int = 64) -> None:
        super().__init__()
        self.query, self.key, self.places = nn.Linear(6, 8), nn.Linear(6, 8), places
        self.register_buffer("queue", F.normalize(torch.randn(8, places), dim=0))
        if kind is not Tensor:
            self.place = 0
        else:
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def keys(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return F.normalize(self.key(x), dim=1)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        place = self.place if type(self.place) is not Tensor else int(self.place)
        self.queue[:, place : place + keys.shape[0]] = keys.T
        place = (place + keys.shape[0]) % self.places
        if isinstance(self.place, Tensor):
            self.place[0] = place
        else:
            self.place = place

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        query, keys = F.normalize(self.query(a), dim=1), self.keys(b)
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.clone()], 1) / 0.1
        self.enqueue(keys)
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


def contrast(kind: type) -> Step:
    model = Contrast(kind)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.05)

    def step(a: Tensor, b: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(a, b)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trained(after: Callable[[int, Tensor, Any], None]) -> Step:
    """A regression; `after` is called with the number of the step, the loss and the optimizer."""
    model, count = nn.Linear(6, 6), [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(a: Tensor, b: Tensor) -> Tensor:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count[0] += 1
        after(count[0], loss, optimizer)
        return loss.detach()

    return step


def early_stopping() -> Step:
    class Stopper:
        best, bad, stops = float("inf"), 0, False

    stopper = Stopper()

    def look(count: int, loss: Tensor, optimizer: Any) -> None:
        value = loss.item()
        if value < stopper.best - 1e-3:
            stopper.best, stopper.bad = value, 0
        else:
            stopper.bad += 1
            stopper.stops = stopper.bad >= 50

    return trained(look)


def plateau() -> Step:
    schedules: list[Any] = []

    def look(count: int, loss: Tensor, optimizer: Any) -> None:
        if not schedules:
            schedules.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3))
        schedules[0].step(loss.item())

    return trained(look)


def logged() -> Step:
    log: list[Any] = []

    def look(count: int, loss: Tensor, optimizer: Any) -> None:
        if count % 5 == 0:
            log.append((count, loss.item()))

    return trained(look)


PROGRAMS: dict[str, Callable[[], Step]] = {
    "place in a tensor": lambda: contrast(Tensor),
    "place in an int": lambda: contrast(int),
    "early stopping": early_stopping,
    "plateau": plateau,
    "logged each fifth step": logged,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_comes_to_be_replayed(name: str) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(1)
        step = PROGRAMS[name]()
        run = torchlazy.compile(step) if compiled else step
        found.append([run(drawn(i, 4, 6), drawn(i + 99, 4, 6)).clone() for i in range(STEPS)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    report = run.report()  # type: ignore[attr-defined]
    assert not report.alarm and report.captures <= 10 and report.verified <= 2, report


def test_an_int_is_written_as_eager_writes_it() -> None:
    """To tensors of each integer type, at places and where a mask says."""

    def written(x: Tensor, at: Tensor, n: int) -> Tensor:
        x[0], x[1:3], x[at] = n, n + 1, n - 1
        x[x == n + 1] = -n
        return x

    run = torchlazy.compile(written)
    for dtype in (torch.int64, torch.int32):
        for n in (3, 5, 9, 4, 100, 7):
            results = [call(torch.zeros(6, dtype=dtype), torch.tensor([4, 5]), n) for call in (written, run)]
            torch.testing.assert_close(results[1], results[0])

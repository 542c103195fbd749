"""A steady loop keeps nothing: the number of objects, storages and known traces stays what it is, step after step."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.api import driver, recorder
from torchlazy.lazy.native.programs import KnownLog, Programs
from torchlazy.lazy.report import metrics
from torchlazy.lazy.run.programs import KnownTrace
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import CutTrace


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators run one by one, but a trace that was seen is known, and one that was not counts as a miss."""
    torchlazy.wait_for_compile()  # what other tests left in the background has objects as well
    seen: dict[object, KnownTrace] = {}

    def look_up(trace: CutTrace, *_: object) -> tuple[KnownTrace, str]:
        known = seen.setdefault(trace.signature(), KnownTrace())
        known.seen += 1
        metrics.misses += known.seen == 1
        return known, "tier 0: nothing is compiled"

    monkeypatch.setattr(driver.tiers, "look_up", look_up)
    learn = Programs._learn

    def unless_short(self: Programs, known: KnownLog) -> str:  # these are learned once they are slow: at any time
        return "short" if len(known.log["entries"]) < 8 else learn(self, known)

    monkeypatch.setattr(Programs, "_learn", unless_short)


def loop(way: str):
    """One training step with new data, which reads its loss before its backward."""
    torch.manual_seed(0)
    device = "cpu" if way in ("mode", "step on ordinary tensors", "module on ordinary tensors") else "lazy"
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    called = torchlazy.compile(model) if way.startswith("module") else model

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(called(x), y)
        if loss.item() != loss.item():
            raise FloatingPointError
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.detach()

    run = torchlazy.compile(step) if way.startswith("step") else step

    def once() -> None:
        x, y = torch.rand(4, 6).to(device), torch.randint(0, 3, (4,)).to(device)
        if way == "mode":
            with torchlazy.lazy_mode():
                loss = run(x, y)
        else:
            loss = run(x, y)
        loss.item()

    return once


def counts() -> tuple[int, int, int]:
    torchlazy.sync()
    gc.unfreeze()  # what tests/conftest.py froze is not told, and what takes its place would be
    gc.collect()
    objects = gc.get_objects()
    storages = sum(type(found) is LazyStorage for found in objects)
    return len(objects), storages, torchlazy.metrics()["misses"]


@pytest.mark.parametrize(
    "way", ["lazy", "mode", "step", "module", "step on ordinary tensors", "module on ordinary tensors"]
)
def test_a_steady_loop_keeps_nothing(way):
    once = loop(way)
    for _ in range(40):  # past the audit of the 32nd replay: what replays keep is let go at a trace's start
        once()
    objects, storages, misses = counts()
    for _ in range(20):
        once()
    assert len(recorder._held) <= 2, "a replay holds its arguments"
    now = counts()
    assert now[1:] == (storages, misses)
    assert now[0] - objects < 20


LEFT_BEHIND = """
import threading, torch, torchlazy
w = torch.ones(8, 8).to("lazy").requires_grad_()
for _ in range(6):
    (torch.rand(4, 8).to("lazy") @ w).square().sum().backward()
    torchlazy.flush()
print(w.grad.sum().item() > 0, [t.name for t in threading.enumerate() if not t.daemon])
"""


def test_a_process_with_workers_ends_by_itself():
    """With programs being compiled in the background: no thread and no worker keeps the process."""
    found = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0 and found.stdout.startswith("True ['MainThread']"), found.stderr
    assert not found.stderr
    assert threading.active_count() < 10

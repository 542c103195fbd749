"""Every learning rate scheduler of torch in a compiled whole step, and numbers looked up as schedules do.

Invariant: over 30 steps a compiled step leaves the learning rates and the state that a plain one leaves, of the same
types, and is captured a few times at most.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torchlazy
from torch.optim import lr_scheduler as schedules
from torch.optim import swa_utils

pytestmark = pytest.mark.usefixtures("operator_by_operator")
STEPS = 30

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedules.StepLR(o, 3, 0.5),
    "constant": lambda o: schedules.ConstantLR(o, 0.3, 4),
    "linear": lambda o: schedules.LinearLR(o, 0.3, total_iters=5),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedules.PolynomialLR(o, 6, 2.0),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 8),
    "warm restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.001, 0.05, 3),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.05, total_steps=40),
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.95),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.3, 4), schedules.ExponentialLR(o, 0.9)]),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.ExponentialLR(o, 0.9)], [3]
    ),
    "averaging": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=3),
    "milestones": lambda o: schedules.MultiStepLR(o, [4, 9, 15, 22], 0.5),
    "a milestone twice": lambda o: schedules.MultiStepLR(o, [4, 9, 9, 15, 22, 22], 0.5),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1, factor=0.5, cooldown=1),
    "plateau of a maximum": lambda o: schedules.ReduceLROnPlateau(
        o, "max", patience=0, factor=0.5, min_lr=[0.01], threshold=0.01, threshold_mode="abs"
    ),
}
# Captures: of each way that the scheduler takes, and two until its state is there and its numbers are known to vary.
MOST = {"plateau": 9, "plateau of a maximum": 9}


def play(name: str, compiled: bool) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    device = "lazy" if compiled else "cpu"
    weight = torch.ones(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.05, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SequentialLR, about itself
        schedule = SCHEDULES[name](optimizer)

    def step(x):
        optimizer.zero_grad()
        loss = (weight * x).square().sum()
        loss.backward()
        optimizer.step()
        if name.startswith("plateau"):
            schedule.step(loss.detach())
        else:
            schedule.step()
        return loss.detach()

    run = torchlazy.compile(step, audit=False) if compiled else step
    generator = torch.Generator().manual_seed(1)
    found: list[Any] = []
    for _ in range(STEPS):
        run(torch.rand(3, generator=generator).to(device))
        found.append((optimizer.param_groups[0]["lr"], state_of(schedule)))
    return found, run


def state_of(schedule: Any) -> dict[str, Any]:
    parts = getattr(schedule, "_schedulers", ())
    state = {name: value for name, value in schedule.state_dict().items() if not name.startswith("_schedulers")}
    return {**state, "parts": [state_of(part) for part in parts]}


def alike(found: Any, wanted: Any) -> bool:
    """The metric of a plateau is computed by other kernels; all else is Python's."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(alike(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return found == (pytest.approx(wanted, rel=1e-5) if type(wanted) is float else wanted)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name):
    wanted, _ = play(name, False)
    found, run = play(name, True)
    for now, then in zip(found, wanted, strict=True):
        assert alike(now, then), (now, then)
    report = run.report()
    assert report.captures <= MOST.get(name, 6), report
    assert report.verified <= 1 and report.replays == STEPS - report.captures - report.verified, report


class Holder:
    of_class: ClassVar = {3: "three"}
    slotted: Any

    def __init__(self) -> None:
        self.table: Any = {4: 0.5, 6: 0.5, 9: 2.0, "a": 1}
        self.marks: Any = {2, 3, 5}
        self.counts: Any = collections.Counter({3: 2, 5: 1, 6: 1})
        self.count = 0

    @property
    def made(self) -> Any:
        self.asked = getattr(self, "asked", 0) + 1
        return {self.asked, 3}


TABLE = {2: 1.0, 4: 2.0, 6: 1.0}
LOOKS: dict[str, Callable[[Holder, Any], Any]] = {
    "set": lambda h, n: 2.0 if n in h.marks else 1.0,
    "not in": lambda h, n: 2.0 if n not in h.marks else 1.0,
    "table": lambda h, n: h.table[n] + 1 if n in h.table else 3.0,
    "global": lambda h, n: TABLE[n] + 1 if n in TABLE else 3.0,
    "counter": lambda h, n: h.counts[n],
    "constant": lambda h, n: 2.0 if n in {1, 4, 6} else 1.0,
    "sum": lambda h, n: 2.0 if n in {5, 7} and n + 1 in h.marks else 1.0,
    "of the class": lambda h, n: len(h.of_class) if n in h.of_class else 0,
}
# What is not found by names alone is asked for by the number itself: each has a capture, or the Python runs.
FIXED: dict[str, Callable[[Holder, Any], Any]] = {
    "get": lambda h, n: h.table.get(n, 3.0),
    "chosen": lambda h, n: 2.0 if n in (h.marks if h.table else h.counts) else 1.0,
    "property": lambda h, n: 2.0 if n in h.made else 1.0,
    "key of a key": lambda h, n: h.table[n] if (n, 1) in {(4, 1)} else 1.0,
}


def counted(look: Callable[[Holder, Any], Any], calls: int = 12, change: Any = None) -> tuple[list[float], Any]:
    holder = Holder()

    def step(x):
        holder.count += 1
        return x * look(holder, holder.count)

    run = torchlazy.compile(step, audit=False)
    found = []
    for number in range(1, calls + 1):
        if number == 9 and change is not None:
            change(holder)
        found.append(run(torch.ones(2, device="lazy"))[0].item())
    holder.count = 0
    assert vars(holder)["count"] == 0
    return found, run.report()


def plainly(look: Callable[[Holder, Any], Any], calls: int = 12, change: Any = None) -> list[float]:
    holder = Holder()
    found = []
    for number in range(1, calls + 1):
        if number == 9 and change is not None:
            change(holder)
        found.append(float(look(holder, number)))
    return found


@pytest.mark.parametrize("name", LOOKS)
def test_numbers_that_are_looked_up(name):
    found, report = counted(LOOKS[name])
    assert found == plainly(LOOKS[name])
    assert report.captures <= 5 and report.replays >= 7, report


@pytest.mark.filterwarnings("ignore:torchlazy.compile:RuntimeWarning")
@pytest.mark.parametrize("name", FIXED)
def test_numbers_that_are_looked_up_in_what_names_do_not_lead_to(name):
    assert counted(FIXED[name])[0] == plainly(FIXED[name])


@pytest.mark.parametrize("name", ["set", "table", "counter"])
def test_a_container_that_is_changed_is_noticed(name):
    def change(holder):
        holder.marks.add(10)
        holder.table[11] = 7.0
        holder.counts[10] = 3

    assert counted(LOOKS[name], change=change)[0] == plainly(LOOKS[name], change=change)

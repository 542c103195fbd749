"""Training a case of the zoo on a device, and comparing what two trainings left behind.

Invariant: a training is a function of the case, the seed and the device: its model, batches and noise come from the CPU
generator, so eager and lazy trainings differ by rounding alone.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torchlazy
from torchlazy.lazy.api import driver
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.run.driver import CutEvent
from torchlazy.runtime.native.recorder_library import LIBRARY

from tests.zoo.case import Case
from tests.zoo.compile_forms import STEPS, prepare

# Rounding in another order grows by a factor of ten or so in three steps of AdamW.
RTOL, ATOL = 2e-3, 2e-4


@dataclass(frozen=True)
class Training:
    """The losses of the steps, the parameters and buffers after them, and what the steps cost."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    seconds: float
    cuts: list[tuple[str, str]] = field(default_factory=list)  # (cause, frame) of the last step
    metrics: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)  # what became of compiled calls, by callable


def train(
    case: Case, device: str, dtype: torch.dtype = torch.float32, form: str = "plain", compiled: bool = False
) -> Training:
    """Some steps from seed 0, then inference where the form has it. Losses are read after the last step, so that no
    reading cuts a step."""
    torch.manual_seed(0)
    if device == "lazy":
        LIBRARY.wait()  # else the device's tensors are recorded in Python
    model = case.make().to(device, dtype)
    optimizers = case.optimizers(model)
    batches = [
        {n: t.to(device, dtype) if t.is_floating_point() else t.to(device) for n, t in case.batch().items()}
        for _ in range(STEPS[form])
    ]
    ways = prepare(form, case, model, optimizers, compiled)
    torchlazy.sync()
    torchlazy.reset_metrics()
    events: list[CutEvent] = []
    losses = []
    start = time.perf_counter()
    told = driver.listeners if not DEVICE.is_in_use() else []  # the native recorder serves where nobody listens
    told.append(events.append)
    try:
        for batch in batches:
            events.clear()
            losses.append(ways.step(batch))
            torchlazy.flush()
        losses += ways.outside(batches)
    finally:
        told.remove(events.append)
    seconds = time.perf_counter() - start
    found = [(event.cause, event.frame) for event in events]
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    read = [loss.item() for loss in losses]
    return Training(read, state, seconds, found, torchlazy.metrics(), ways.reports())


@dataclass(frozen=True)
class Verdict:
    """How far two trainings are apart: the largest difference, where it is, and whether it is more than rounding."""

    equal: bool
    largest: float
    where: str


def compare_trainings(have: Training, want: Training, case: Case, form: str = "plain") -> Verdict:
    """Every loss, parameter and buffer within the tolerance, or as close to a float64 training as eager is."""
    mine, theirs = _values(have), _values(want)
    if mine.keys() != theirs.keys():
        return Verdict(False, float("inf"), f"names differ: {sorted(mine.keys() ^ theirs.keys())[:3]}")
    largest, where, wrong = 0.0, "", ""
    exact: dict[str, torch.Tensor] | None = None
    for name, value in mine.items():
        other = theirs[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            return Verdict(
                False,
                float("inf"),
                f"{name}: {value.dtype}{list(value.shape)} against {other.dtype}{list(other.shape)}",
            )
        a, b = value.double(), other.double()
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
        worst = apart.max().item() if apart.numel() else 0.0
        if worst > largest:
            largest, where = worst, name
        if not bool((apart <= ATOL + RTOL * b.abs()).all()):
            exact = exact if exact is not None else _in_float64(case, form)
            reference = exact[name].double() if exact else b
            if not (a - reference).abs().max() <= 3 * (b - reference).abs().max():
                wrong = wrong or name
    return Verdict(not wrong, largest, wrong or where)


def _in_float64(case: Case, form: str) -> dict[str, torch.Tensor]:
    """The same training in float64; nothing for a model that makes float32 tensors of its own."""
    try:
        return _values(train(case, "cpu", torch.float64, form))
    except RuntimeError:
        return {}


def _values(training: Training) -> dict[str, torch.Tensor]:
    return {"losses": torch.tensor(training.losses), **training.state}


def causes(cuts: list[tuple[str, str]]) -> dict[str, int]:
    """Cuts of a step by cause, but for the end of the step itself."""
    counted = Counter(cause for cause, _ in cuts)
    return dict(counted)

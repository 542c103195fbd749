"""Whether a training loop of a zoo's model becomes steady: after some steps nothing is new to the recorder, the
compiler or a compiled call, whatever the data.

Invariant: a verdict counts what the runtime itself tells (`torchlazy.metrics()`, `report()` of compiled callables);
what still moves in the watched steps is given with the reason that the runtime has for it.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torchlazy
from torchlazy.lazy.api import driver
from torchlazy.lazy.report import metrics
from torchlazy.lazy.run.programs import KnownTrace
from torchlazy.lazy.trace.diff import summary
from torchlazy.lazy.trace.trace import CutTrace

from tests.zoo.case import Batch, Case
from tests.zoo.compile_forms import Form, prepare

FORMS = {"lazy": "plain", "step": "step", "module": "module"}
ONE_SIZE, THREE_SIZES = (1,), (1, 2, 3)  # of batches, in draws of the case's own batch
_MOVING = ("misses", "compiles", "templates", "generalised")
_CALLS = ("captures", "verified", "variants")


@dataclass(frozen=True)
class Loop:
    """One loop: where its loss is read, the sizes that its batches take in turn, rounds to warm up and to watch."""

    read: str
    sizes: tuple[int, ...] = ONE_SIZE
    warm: int = 7
    watched: int = 6

    @property
    def name(self) -> str:
        """ "after, 3 sizes"."""
        return self.read if len(self.sizes) == 1 else f"{self.read}, {len(self.sizes)} sizes"


# Each size is met often enough before: for the optimizer's state, a capture, audits of the first and second replay, and
# the first replay without one, which runs the halves of a joint as programs of their own.
LOOPS = (Loop("after"), Loop("between"), Loop("between", THREE_SIZES, warm=5, watched=2))


def measure_steadiness(
    case: Case, way: str, loops: tuple[Loop, ...] = LOOPS, *, target: str = "cpu", compiles: bool = False
) -> dict[str, Any]:
    """The verdict of each loop over a model of its own, one after the other; plain data.

    `way` is "lazy", "step" or "module". With `compiles` every cut is compiled at first sight; without, nothing is, and
    each trace that a program would be wanted for counts as a miss when it is new. "moved" counts what the watched steps
    did anew, "reasons" are the runtime's, "at once" what a step runs apart from programs, "cuts" its cuts.
    """
    if way not in FORMS:
        raise ValueError(f"way {way!r}: there are {tuple(FORMS)}")
    torchlazy.set_target(target)
    torchlazy.config.tiers, torchlazy.config.store = "off", "off"
    torch.manual_seed(0)
    with nullcontext() if compiles else _nothing_compiled():
        verdicts = {loop.name: _watch(case, way, loop) for loop in loops if len(loop.sizes) == 1 or grows(case)}
    steady = not any(verdict["moved"] for verdict in verdicts.values())
    return {"outcome": "steady" if steady else "moving", "loops": verdicts}


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Operators run one by one; a trace's first sight is a miss, the next ones are hits."""
    tiers = driver.tiers
    seen: dict[Any, KnownTrace] = {}

    def look_up(trace: CutTrace, *_: Any) -> tuple[KnownTrace, str]:
        known = seen.setdefault(trace.signature(), KnownTrace())
        known.seen += 1
        metrics.misses += known.seen == 1
        metrics.hits += known.seen > 1
        return known, "tier 0: nothing is compiled"

    tiers.look_up = look_up  # type: ignore[method-assign]
    try:
        yield
    finally:
        del tiers.look_up


def grows(case: Case) -> bool:
    """Whether batches of the case can be put together to larger ones: all tensors have one first dimension."""
    firsts = {tensor.shape[:1] for tensor in case.batch().values()}
    return case.name not in _FIXED_BATCH and len(firsts) == 1 and firsts != {()}


# Losses or models are about as many rows as their batch has.
_FIXED_BATCH = frozenset({"ppo_torch_func", "packed_lstm", "speech_ctc", "set_detector"})


def _watch(case: Case, way: str, loop: Loop) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run, form = _loop(case, way, loop)
        for _ in range(loop.warm):
            run()
        torchlazy.sync()
        torchlazy.reset_metrics()  # and the account of divergences
        before = _calls(form)
        for _ in range(loop.watched):
            run()
        torchlazy.sync()
    steps = loop.watched * len(loop.sizes)
    account = torchlazy.report()
    counts = account.counts
    moved = Counter({name: counts[name] for name in _MOVING})
    moved["numbers that are no inputs"] = sum(counts["not_generalised"].values())
    moved.update({name: now - before[name] for name, now in _calls(form).items()})
    at_once = {f"{use.op}: {use.reason}": use.count / steps for use in account.eager}
    for reason, times in counts["fallbacks"].items():
        if reason not in at_once:
            moved[f"fallback {reason}"] += times
    reasons = [f"{times} x {found}" for times, found in summary(account.divergences)]
    reasons += [f"{times} x {reason}" for reason, times in counts["not_generalised"].items()]
    reports = form.reports()
    if any(moved.values()):
        reasons += [reason for report in reports.values() for reason in report["reasons"]]
    reasons += [report["alarm"] for report in reports.values() if report["alarm"]]
    reasons += sorted({str(w.message)[:300] for w in told if "torchlazy" in str(w.message)})
    return {
        "moved": {name: times for name, times in moved.items() if times},
        "reasons": reasons,
        "at once": at_once,
        "cuts": {cause: round(times / steps, 2) for cause, times in counts["cuts"].items()},
    }


def _calls(form: Form) -> dict[str, int]:
    """What becomes of compiled calls, counted; alarms among it."""
    counts = dict.fromkeys((*_CALLS, "alarms"), 0)
    for made in form.callables.values():
        report = made.report()
        for name in _CALLS:
            counts[name] += getattr(report, name)
        counts["alarms"] += bool(report.alarm)
    return counts


def _loop(case: Case, way: str, loop: Loop) -> tuple[Callable[[], None], Form]:
    """One round of the loop over a new model: a step with new data for each of the sizes."""
    model = case.make().to("lazy")
    read = loop.read == "between"
    case = dataclasses.replace(case, loss=_reading(case.loss)) if read and case.step is None else case
    form = prepare(FORMS[way], case, model, case.optimizers(model), True)

    def run() -> None:
        for size in loop.sizes:
            batch = {name: tensor.to("lazy") for name, tensor in batch_of(case, size).items()}
            with _reads_before_backward(read and case.step is not None):
                loss = form.step(batch)
            if not read:
                loss.item()

    return run, form


def batch_of(case: Case, draws: int) -> Batch:
    """So many draws of the case's batch as one."""
    found = [case.batch() for _ in range(draws)]
    return {name: torch.cat([batch[name] for batch in found]) for name in found[0]} if draws > 1 else found[0]


def _reading(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss that is looked at before its backward, as loops do that stop where it is no number."""

    def read(model: Any, batch: Batch) -> torch.Tensor:
        value = loss(model, batch)
        if not math.isfinite(value.item()):
            raise FloatingPointError("the loss is not finite")
        return value

    return read


_backward = torch.Tensor.backward


def _read_and_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    self.item()
    _backward(self, *args, **kwargs)


@contextmanager
def _reads_before_backward(wanted: bool) -> Iterator[None]:
    """For cases with a step of their own: whatever they call backward on is read before. Compiled calls look at which
    function it is, so it is the same at each call."""
    if not wanted:
        yield
        return
    torch.Tensor.backward = _read_and_backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = _backward  # type: ignore[method-assign]

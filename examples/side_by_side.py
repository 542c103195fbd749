"""Runs one training loop on eager tensors, on the lazy device or in lazy mode, and prints the runs side by side.

Invariant: the loop that is measured is the same Python for every way; only where tensors live and what stands around a
step differ. Losses are read at the end of a window of steps, never inside it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torchlazy
from progress import Progress
from torch import Tensor

Way = Literal[
    "eager",
    "compile",
    "compile_graph",
    "compile_autotune",
    "lazy",
    "lazy_mode",
    "lazy_module",
    "lazy_module_graph",
    "lazy_compile",
    "lazy_graph",
    "lazy_autotune",
]
PEER_MODES = {"compile": "default", "compile_graph": "reduce-overhead", "compile_autotune": "max-autotune"}
MODULE_MODES = {"lazy_module": "default", "lazy_module_graph": "reduce-overhead"}
OUR_MODES = {"lazy_compile": "default", "lazy_graph": "reduce-overhead", "lazy_autotune": "max-autotune"}


@dataclass(frozen=True)
class Placement:
    """Where tensors live and how a step runs: `way` on hardware `target` ("cpu", "cuda", "cuda:1")."""

    way: Way
    target: str

    def __post_init__(self) -> None:
        if self.is_lazy:
            torchlazy.set_target(self.target)

    @property
    def is_lazy(self) -> bool:
        return self.way.startswith("lazy")

    @property
    def device(self) -> torch.device:
        return torch.device("lazy" if self.is_lazy and self.way not in ("lazy_mode", *MODULE_MODES) else self.target)

    def around_step(self) -> contextlib.AbstractContextManager[Any]:
        """The only difference that a training loop sees in lazy mode."""
        return torchlazy.lazy_mode() if self.way == "lazy_mode" else contextlib.nullcontext()

    def autocast(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        if not enabled:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def prepare(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The peer and "lazy_module" compile the model; every other way calls it as it is."""
        if self.way in MODULE_MODES:
            return torchlazy.compile(function, mode=MODULE_MODES[self.way])
        mode = PEER_MODES.get(self.way)
        return torch.compile(function, mode=mode) if mode else function

    def prepare_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`torchlazy.compile` takes the whole step; every other way calls it as it is."""
        mode = OUR_MODES.get(self.way)
        return torchlazy.compile(step, mode=mode) if mode else step

    def wait(self) -> None:
        """Returns when all work sent off so far is done, so that a clock may be read."""
        if self.is_lazy:
            torchlazy.sync()
        if self.target.startswith("cuda"):
            torch.cuda.synchronize(self.target)

    def metrics(self) -> dict[str, Any]:
        return torchlazy.metrics() if self.is_lazy else {}


@dataclass
class Run:
    """What one training run showed. `step_seconds` holds one mean a window of steps, the first (warm-up) included."""

    way: Way
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    total_seconds: float = 0.0
    kernels_a_step: float | None = None
    externs_a_step: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    result: str = ""  # what the example wants to show beside losses, "accuracy 97.2 %"

    @property
    def steady_seconds(self) -> float:
        """The median over windows without the first, which compiles and warms up."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds)


def add_arguments(parser: argparse.ArgumentParser, *, steps: int, print_every: int) -> None:
    """The options that both training examples share."""
    parser.add_argument("--device", choices=("eager", "lazy", "lazy_mode"), default="lazy", help="how the model runs")
    parser.add_argument("--target", help="hardware: cpu, cuda or cuda:1 (default: cuda where there is one)")
    parser.add_argument("--compare", action="store_true", help="run eagerly first, then lazily, and show both")
    parser.add_argument("--compile", action="store_true", help="with --compare: add torch.compile; else: use it")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--print-every", type=int, default=print_every, metavar="N")
    parser.add_argument("--seed", type=int, default=0)


def chosen_placements(options: argparse.Namespace) -> list[Placement]:
    """The runs that the options ask for, eager first."""
    target = options.target or ("cuda" if torch.cuda.is_available() else "cpu")
    ways: list[Way]
    if options.compare:
        lazy_way: Way = "lazy_mode" if options.device == "lazy_mode" else "lazy"
        ways = ["eager", "compile", lazy_way] if options.compile else ["eager", lazy_way]
    else:
        ways = ["compile" if options.compile else options.device]
    return [Placement(way, target) for way in ways]


def train(placement: Placement, steps: int, print_every: int, step: Callable[[int], Tensor]) -> Run:
    """Call `step(number) -> loss` for every step, and read losses and clock at the end of each window."""
    if placement.is_lazy:
        torchlazy.reset_metrics()
    run = Run(placement.way)
    pending: list[Tensor] = []
    bar = Progress(steps, placement.way)
    started = window_started = time.perf_counter()
    before = placement.metrics()
    for number in bar:
        with placement.around_step():
            pending.append(step(number).detach())
        if (number + 1) % print_every and number + 1 < steps:
            continue
        if placement.is_lazy and not run.step_seconds:
            torchlazy.wait_for_compile()  # the first window holds the compile time, the others none
        placement.wait()
        run.step_seconds.append((time.perf_counter() - window_started) / len(pending))
        after = placement.metrics()
        if after:
            run.kernels_a_step = (after["kernels"] - before["kernels"]) / len(pending)
            run.externs_a_step = (sum(after["extern_calls"].values()) - sum(before["extern_calls"].values())) / len(
                pending
            )
        run.losses += [float(loss) for loss in pending]
        pending.clear()
        bar.note(f"loss {run.losses[-1]:.4f}")
        bar.say(f"step {number + 1:>5}  loss {run.losses[-1]:.4f}  {1e3 * run.step_seconds[-1]:.1f} ms a step")
        before, window_started = placement.metrics(), time.perf_counter()
    run.total_seconds = time.perf_counter() - started
    run.metrics = placement.metrics()
    return run


def largest_difference(first: Run, second: Run) -> float:
    """The largest relative difference between two runs' losses at the same step."""
    pairs = zip(first.losses, second.losses, strict=True)
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=0.0)


def comparison_table(runs: list[Run]) -> str:
    """One column a run, one line a fact; what a run does not know is a dash."""
    eager = runs[0]

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    def metric(run: Run, name: str, form: str) -> str:
        return number(run.metrics.get(name), form)

    def speed(run: Run) -> str:  # one run alone is compared with nobody
        return "-" if len(runs) == 1 else f"{eager.steady_seconds / run.steady_seconds:.2f}x"

    rows: list[tuple[str, list[str]]] = [
        ("", [run.way for run in runs]),
        ("first loss", [f"{run.losses[0]:.6f}" for run in runs]),
        ("last loss", [f"{run.losses[-1]:.6f}" for run in runs]),
        ("largest difference from eager", ["-", *(f"{largest_difference(eager, run):.1e}" for run in runs[1:])]),
        ("milliseconds a step (median window)", [f"{1e3 * run.steady_seconds:.2f}" for run in runs]),
        ("speed against eager", [speed(run) for run in runs]),
        ("whole run, seconds", [f"{run.total_seconds:.1f}" for run in runs]),
        ("kernels a step", [number(run.kernels_a_step, ".1f") for run in runs]),
        ("extern calls a step", [number(run.externs_a_step, ".1f") for run in runs]),
        ("compile seconds", [metric(run, "compile_seconds", ".1f") for run in runs]),
        ("programs compiled", [metric(run, "compiles", "d") for run in runs]),
        ("cache hits / misses", [f"{metric(run, 'hits', 'd')} / {metric(run, 'misses', 'd')}" for run in runs]),
    ]
    if any(run.result for run in runs):
        rows.append(("result", [run.result or "-" for run in runs]))
    lines = [f"{label:<38}" + "".join(f"{cell:>16}" for cell in cells) for label, cells in rows]
    for run in runs:
        lines += [f"cut   {count:>6} x  {cause}" for cause, count in run.metrics.get("cuts", {}).items()]
        lines += [f"fallback {count:>3} x  {reason}" for reason, count in run.metrics.get("fallbacks", {}).items()]
    return "\n".join(lines)

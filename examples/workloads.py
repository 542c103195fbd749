"""Four programs that people run on CPUs, by every way: eager, torch.compile, the mode, the device, a compiled step.

    python examples/workloads.py
    python examples/workloads.py --torch-compile                 torch.compile too: its cold start is most of the time
    python examples/workloads.py --only network physics

Ways take turns in one process, so that a slow moment of the machine falls on all of them. Cold seconds are those of the
first steps, until nothing more is compiled; a way is measured after that. What each way computed in all its steps is
compared with eager.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchlazy
from side_by_side import Placement, Way
from tiny_gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

WAYS: tuple[Way, ...] = ("eager", "lazy_mode", "lazy", "lazy_compile")
NAMES = {"lazy_mode": "mode", "lazy": "device", "lazy_compile": "compiled step", "compile": "torch.compile"}
TOLERANCE = 1e-3  # of a step's result, relative; another order of sums, amplified by some hundred steps of training
LIBRARY_CALLS = ("mm", "convolution", "attention")  # in an operator's name: also addmm, bmm
AUDITED = 72  # calls of a compiled step, of which some are compared with its Python
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Workload:
    """`prepare` makes the step of one way: tensors where it wants them, weights and data always the same ones."""

    name: str
    text: str
    prepare: Callable[[Placement], Step]
    warm_up: int = 60  # steps before anything is measured, at least


def gpt(placement: Placement) -> Step:
    """A training step of the demo's GPT, without dropout."""
    sizes = GPTConfig(dropout=0.0)
    model = GPT(sizes).to(placement.device)
    codes = torch.randint(sizes.vocabulary, (2, 16, sizes.block)).to(placement.device)
    return training(placement, model, lambda forward: forward(codes[0], codes[1])[1])


def network(placement: Placement) -> Step:
    """A training step of a small network at batch 1: the host is what takes time."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(64, 3)).to(placement.device)
    x, y = torch.randn(1, 64).to(placement.device), torch.randint(3, (1,)).to(placement.device)
    return training(placement, model, lambda forward: F.cross_entropy(forward(x), y))


def training(placement: Placement, model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Step:
    """Forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    forward: nn.Module = placement.prepare(model)  # type: ignore[assignment]

    def step() -> Tensor:
        loss = loss_of(forward)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return placement.prepare_step(step)


def mobilenet() -> nn.Module:
    """Inverted residuals, the blocks of MobileNetV3."""

    def part(inside: int, outside: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        convolution = nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False)
        return [convolution, nn.BatchNorm2d(outside), nn.Hardswish()]

    found = part(3, 16, 3, 2)
    for inside, outside, stride in ((16, 24, 2), (24, 40, 2), (40, 40, 1), (40, 80, 2)):
        wide = 4 * inside
        found += [*part(inside, wide, 1), *part(wide, wide, 3, stride, wide), *part(wide, outside, 1)[:2]]
    return nn.Sequential(*found, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, 10))


def images(placement: Placement) -> Step:
    """Inference over eight images."""
    model = mobilenet().to(placement.device).eval()
    forward, x = placement.prepare(model), torch.randn(8, 3, 96, 96).to(placement.device)

    def step() -> Tensor:
        with torch.no_grad():
            return forward(x).square().sum()  # type: ignore[no-any-return]

    return placement.prepare_step(step)


def physics(placement: Placement) -> Step:
    """Fits the friction of 100,000 pendulums: 10 steps in time, gradients through all of them."""
    angle = torch.rand(100_000).to(placement.device)
    wanted = 0.5 * angle
    friction = torch.full_like(angle, 0.1).requires_grad_()

    def swing(friction: Tensor) -> Tensor:
        now, speed = angle, torch.zeros_like(angle)
        for _ in range(10):
            speed = speed - 0.02 * (9.81 * now.sin() + friction * speed)
            now = now + 0.02 * speed
        return (now - wanted).square().mean()

    swing = placement.prepare(swing)

    def step() -> Tensor:
        loss = swing(friction)
        (grad,) = torch.autograd.grad(loss, friction)
        with torch.no_grad():
            friction.sub_(grad, alpha=10.0)
        return loss.detach()

    return placement.prepare_step(step)


WORKLOADS = (
    Workload("gpt", "GPT, 4 layers x 128, training", gpt, 24),
    Workload("network", "small network at batch 1, training", network),
    Workload("images", "convolutions, inference of 8 images", images, 40),
    Workload("physics", "10 steps of 100,000 pendulums, gradients", physics, 40),
)


class Runs:
    """One way of one workload: its step, and what its steps gave."""

    def __init__(self, way: Way, workload: Workload) -> None:
        torch.manual_seed(0)
        self.placement = Placement(way, "cpu")
        self.step = workload.prepare(self.placement)
        self.results: list[float] = []
        begun = time.perf_counter()
        steps = max(workload.warm_up, AUDITED if way == "lazy_compile" else 0)
        for _ in range(4):  # what the first ones show is compiled, and then seen to work
            self.run(steps // 4)
            torchlazy.wait_for_compile()
        self.cold = time.perf_counter() - begun

    def run(self, steps: int) -> float:
        """Milliseconds a step; every result is read, as a loop that logs does."""
        begun = time.perf_counter()
        for _ in range(steps):
            with self.placement.around_step():
                found = self.step()
            self.results.append(float(found))
        return (time.perf_counter() - begun) / steps * 1e3

    def difference(self, eager: Runs) -> float:
        """The largest relative difference from eager's results at the same step."""
        pairs = zip(self.results, eager.results, strict=False)
        return max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)


class LibraryClock(TorchDispatchMode):
    """The seconds that products, convolutions and attention take, which no fusion shortens."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.perf_counter()
        found = func(*args, **(kwargs or {}))
        if any(name in str(func) for name in LIBRARY_CALLS):
            self.seconds += time.perf_counter() - begun
        return found


def measure(workload: Workload, ways: tuple[Way, ...], turns: int) -> tuple[list[str], dict[Way, float], float]:
    """A row of the table, eager's time by each way's, and the largest difference."""
    runs = {way: Runs(way, workload) for way in ways}
    steps = max(1, min(100, int(400 / runs["eager"].run(3))))
    rows = [{way: run.run(steps) for way, run in runs.items()} for _ in range(turns)]
    speed = {way: statistics.median(row["eager"] / row[way] for row in rows) for way in ways}
    eager = statistics.median(row["eager"] for row in rows)
    cells = [f"{speed[way]:.2f}x ({run.cold:.0f} s)" for way, run in runs.items() if way != "eager"]
    worst = max(run.difference(runs["eager"]) for run in runs.values())
    with LibraryClock() as clock:
        for _ in range(3):
            runs["eager"].step()
    share = f"{min(100.0, 100 * clock.seconds / 3 * 1e3 / eager):.0f} %"
    return [workload.text, f"{eager:.2f}", share, *cells, f"{worst:.0e}"], speed, worst


def main() -> int:
    parser = argparse.ArgumentParser(description="Times of programs that people run on CPUs, against eager's.")
    parser.add_argument("--torch-compile", action="store_true", help="torch.compile too")
    parser.add_argument("--only", nargs="+", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    # The peer first: it replaces functions of torch.optim, and what was captured before would be captured again.
    ways: tuple[Way, ...] = ("eager", "compile", *WAYS[1:]) if options.torch_compile else WAYS
    widths = [44, 11, 9, *[15 for _ in ways[1:]], 9]

    def show(*cells: str) -> None:
        print("".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)

    names = [NAMES[way] for way in ways[1:]]
    show("eager's time by the way's (cold seconds)", "eager, ms", "library", *names, "differs")
    speeds: list[dict[Way, float]] = []
    differences: list[float] = []
    for workload in WORKLOADS:
        if options.only and workload.name not in options.only:
            continue
        cells, speed, worst = measure(workload, ways, options.turns)
        show(*cells)
        speeds.append(speed)
        differences.append(worst)
    means = [f"{statistics.geometric_mean(speed[way] for speed in speeds):.2f}x" for way in ways[1:]]
    show("geometric mean", "", "", *means, "")
    print('"library": the share of products, convolutions and attention in eager\'s time, which no fusion shortens')
    if max(differences) > TOLERANCE:
        print(f"results DIFFER: {max(differences):.0e} against a tolerance of {TOLERANCE:.0e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a whole training step costs on the host: milliseconds of Python, dispatch and launching.

python benchmarks/host_cost.py                              eager, recorded and followed, under torchlazy.compile
python benchmarks/host_cost.py --torch-compile              torch.compile too; its cold start takes a minute a model
python benchmarks/host_cost.py --target cuda --models gpt
python benchmarks/host_cost.py --cpu-time                   processor time of the process, where others load the machine

The models have the operators of a 12-layer GPT and of a ResNet-50, and tensors so small that the host is what takes
time: 12 blocks of width 32 over 2 x 16 tokens, and 16 bottlenecks of an eighth of the usual width over 2 images of
32 x 32. A step is forward, cross-entropy, backward, AdamW (foreach) and zero_grad. All ways of a model live in one
process and take turns; no clock runs while programs are compiled. With CUDA the clock stops when the step's call
returns, and the device is waited for outside of it: what is measured is how fast the host can send work off.

Columns: the median of all steps, and the least; how it compares with eager's in the same turn (median of ratios); for
the recorded way the part of it that is not the cut's own run (Python, autograd and recording; not with --cpu-time, as a
cut tells the clock's seconds); operators, and kernels and library calls that were launched.

Exits with 1 if a way failed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from side_by_side import Placement, Way
from tiny_gpt import GPT, GPTConfig

WARMUP = 5
SETTLING = 70  # calls under torchlazy.compile after which the next audit is far away


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a residual stream."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.first, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.third, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != out:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        y = F.relu(self.norm2(self.second(y)))
        return F.relu(self.norm3(self.third(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """The layers of ResNet-50, `width` channels in its first stage (64 in the original)."""

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        inside = width
        for stage, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                blocks.append(Bottleneck(inside, width << stage, 2 if stage and not number else 1))
                inside = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    """Model, input and targets of the 12-layer GPT."""
    sizes = GPTConfig(layers=12, heads=2, width=32, block=16, dropout=0.0)
    codes = torch.randint(sizes.vocabulary, (2, sizes.block))
    return GPT(sizes), codes, codes.flatten()


def resnet50() -> tuple[nn.Module, Tensor, Tensor]:
    """Model, input and targets of the narrow ResNet-50."""
    return ResNet50(8), torch.randn(2, 3, 32, 32), torch.randint(10, (2,))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {"gpt": gpt, "resnet50": resnet50}


@dataclass
class Measured:
    """One way of one model; times in milliseconds, one entry a step."""

    way: Way
    steps: list[float] = field(default_factory=list)
    runs: list[float] = field(default_factory=list)  # inside the cut: looking the program up and launching it
    operators: float | None = None
    launches: float | None = None
    error: str = ""

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.steps)


def make_step(name: str, placement: Placement) -> Callable[[], Tensor]:
    """The training step of one way."""
    torch.manual_seed(0)
    model, inputs, targets = MODELS[name]()
    model.to(placement.device).train()
    inputs, targets = inputs.to(placement.device), targets.to(placement.device)
    forward = placement.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> Tensor:
        output = forward(inputs)
        logits = output[0].flatten(0, 1) if isinstance(output, tuple) else output
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return placement.prepare_step(step)


def warm_up(step: Callable[[], Tensor], placement: Placement) -> None:
    """Until every program is compiled and in use."""
    for _ in range(WARMUP):
        step()
    if placement.is_lazy:
        for _ in range(2):
            torchlazy.wait_for_compile()
            step()
    for _ in range(SETTLING if placement.way in ("lazy_compile", "lazy_graph") else 0):
        step()
    placement.wait()


def time_turn(
    step: Callable[[], Tensor], placement: Placement, measured: Measured, steps: int, clock: Callable[[], float]
) -> None:
    """One turn of a way."""
    inside: list[float] = []
    is_wall = clock is time.perf_counter
    note = lambda event: inside.append(event.seconds * is_wall)  # noqa: E731
    before = placement.metrics()
    if placement.way == "lazy":
        _listeners().append(note)
    for _ in range(steps):
        placement.wait()
        inside.clear()
        gc.collect()
        gc.disable()
        started = clock()
        step()
        measured.steps.append(1e3 * (clock() - started))
        gc.enable()
        measured.runs.append(1e3 * sum(inside))
    placement.wait()
    if placement.way == "lazy":
        _listeners().remove(note)
    after = placement.metrics()
    if after:
        measured.operators = (after["ops"] - before["ops"]) / steps
        calls = sum(after["extern_calls"].values()) - sum(before["extern_calls"].values())
        measured.launches = (after["kernels"] - before["kernels"] + calls) / steps


def _listeners() -> list[Any]:
    """Who is told of each cut: there is no public way to the time that a cut took."""
    from torchlazy.lazy.api import driver

    return driver.listeners


def measure(name: str, options: argparse.Namespace) -> list[Measured]:
    """All ways of one model, taking turns."""
    results: list[Measured] = []
    alive: list[tuple[Measured, Placement, Callable[[], Tensor]]] = []
    for way in options.ways:
        measured = Measured(way)
        results.append(measured)
        placement = Placement(way, options.target)
        try:
            step = make_step(name, placement)
            warm_up(step, placement)
            alive.append((measured, placement, step))
        except Exception as error:  # a way that fails leaves a line in the table
            traceback.print_exc()
            measured.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
    for turn in range(options.turns):
        for measured, placement, step in alive if turn % 2 == 0 else reversed(alive):
            clock = time.process_time if options.cpu_time else time.perf_counter
            time_turn(step, placement, measured, options.steps, clock)
    return results


def table(rows: list[tuple[str, list[Measured]]]) -> str:
    """Markdown, one line a model and way."""
    lines = [
        "| model | way | host ms a step (least) | against eager | of it outside the cut's run | operators | launches |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, results in rows:
        eager = next((m for m in results if m.way == "eager" and not m.error), None)
        for m in results:
            if m.error:
                lines.append(f"| {name} | {m.way} | {m.error} | | | | |")
                continue
            ratio = "-"
            if eager is not None:
                ratio = f"{statistics.median(a / b for a, b in zip(m.steps, eager.steps, strict=True)):.2f}x"
            outside = "-"
            if any(m.runs):
                outside = f"{statistics.median(a - b for a, b in zip(m.steps, m.runs, strict=True)):.2f}"
            counts = ["-" if n is None else f"{n:.0f}" for n in (m.operators, m.launches)]
            milliseconds = f"{m.milliseconds:.2f} ({min(m.steps):.2f})"
            lines.append(f"| {name} | {m.way} | {milliseconds} | {ratio} | {outside} | {' | '.join(counts)} |")
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--ways", nargs="+", choices=get_args(Way), help="default: eager lazy lazy_compile")
    parser.add_argument("--torch-compile", action="store_true", help="add torch.compile with its defaults")
    parser.add_argument("--target", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of the process instead of the clock's")
    options = parser.parse_args()
    if options.ways is None:
        options.ways = ["eager", "lazy", *(["lazy_compile"] if hasattr(torchlazy, "compile") else [])]
        options.ways += ["lazy_graph"] if options.target.startswith("cuda") and "lazy_compile" in options.ways else []
    if options.torch_compile and "compile" not in options.ways:
        options.ways.append("compile")
    return options


def main() -> int:
    options = parse_options()
    torch.set_num_threads(1)
    rows = [(name, measure(name, options)) for name in options.models]
    device = torch.cuda.get_device_name() if options.target.startswith("cuda") else "CPU, 1 thread"
    print(f"\ntorch {torch.__version__}, {device}, medians of {options.turns} turns of {options.steps} steps\n")
    print(table(rows))
    return int(any(m.error for _, results in rows for m in results))


if __name__ == "__main__":
    sys.exit(main())

"""What recording costs: Python microseconds an operator, on eager CPU tensors and on the lazy device.

python benchmarks/record_cost.py [--rounds 60] [--limit 7]

Each round times eager and lazy one after the other (which goes first alternates), with the same Python code on tiny
tensors. The clock of the lazy side covers recording only: the cut that runs the operators stands after it. Garbage
collection is off while a clock runs and one thread computes, so that eager's time is its Python and dispatch time.
The last column is the median of lazy minus eager within a round. Exits with 1 if one is above --limit.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F

CHAIN = 200


@dataclass(frozen=True)
class Case:
    """`prepare(device)` returns the function that is timed; it returns what must stay alive until the cut."""

    name: str
    prepare: Callable[[str], Callable[[], object]]


@dataclass
class Times:
    """Microseconds an operator, one entry a round."""

    eager: list[float] = field(default_factory=list)
    lazy: list[float] = field(default_factory=list)

    @property
    def above(self) -> float:
        return statistics.median(b - a for a, b in zip(self.eager, self.lazy, strict=True))


def chain(requires_grad: bool) -> Callable[[str], Callable[[], object]]:
    """`CHAIN` dependent adds and multiplications of four numbers."""

    def prepare(device: str) -> Callable[[], object]:
        x = torch.ones(4, device=device, requires_grad=requires_grad)
        y = torch.full((4,), 0.5, device=device)

        def run() -> Tensor:
            z = x
            for _ in range(CHAIN // 2):
                z = z + y
                z = z * y
            return z

        return run

    return prepare


def in_place_chain(device: str) -> Callable[[], object]:
    """The same with in-place operators, as optimizers write them."""
    x = torch.ones(4, device=device)
    y = torch.full((4,), 0.5, device=device)

    def run() -> Tensor:
        for _ in range(CHAIN // 2):
            x.add_(y)
            x.mul_(y)
        return x

    return run


def view_chain(device: str) -> Callable[[], object]:
    """Views of views, four deep: half of what a transformer dispatches.

    Deeper chains cost more on the lazy device: autograd composes the functions of a chain of views of a subclass anew
    at each link, so link number 100 costs a hundred times the first.
    """
    x = torch.ones(4, 2, device=device)

    def run() -> Tensor:
        for _ in range(CHAIN // 4):
            z = x.transpose(0, 1).unsqueeze(0).squeeze(0).transpose(0, 1)
        return z + z  # a trace of which nothing is computed is not remembered

    return run


def detach_chain(device: str) -> Callable[[], object]:
    """What autograd calls most often."""
    x = torch.ones(4, 2, device=device)

    def run() -> Tensor:
        for _ in range(CHAIN):
            z = x.detach()
        return z + z

    return run


def perceptron(train: bool) -> Callable[[str], Callable[[], object]]:
    """Four small layers; with `train` also loss and backward, without an optimizer (its step is a cut)."""

    def prepare(device: str) -> Callable[[], object]:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()]
        model = nn.Sequential(*layers).to(device)
        x, target = torch.randn(4, 8).to(device), torch.randn(4, 8).to(device)

        def run() -> object:
            if not train:
                # Ten times: 16 operators alone would measure the caches that the collection before each round empties.
                with torch.no_grad():
                    for _ in range(10):
                        y = model(x)
                return y
            model.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            return loss

        return run

    return prepare


CASES = (
    Case("elementwise chain", chain(requires_grad=False)),
    Case("elementwise chain, grad", chain(requires_grad=True)),
    Case("in-place chain", in_place_chain),
    Case("view chain", view_chain),
    Case("detach chain", detach_chain),
    Case("MLP forward, no grad", perceptron(train=False)),
    Case("MLP forward and backward", perceptron(train=True)),
)


def count_operators(run: Callable[[], object]) -> int:
    """How many operators one call of the lazy side records."""
    torchlazy.sync()
    torchlazy.reset_metrics()
    kept = run()
    torchlazy.sync()
    del kept
    return int(torchlazy.metrics()["ops"])


def time_once(run: Callable[[], object]) -> float:
    """Seconds of one call; the cut and the release of its results come after the clock."""
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - started
    gc.enable()
    torchlazy.sync()
    del kept
    return seconds


def measure(case: Case, rounds: int, warmup: int = 5) -> tuple[int, Times]:
    """Operators a call, and the times of all rounds after the warm-up."""
    eager, lazy = case.prepare("cpu"), case.prepare("lazy")
    operators = count_operators(lazy)
    if not operators:
        raise RuntimeError(f"{case.name}: the lazy side recorded no operator; is the device registered?")
    times = Times()
    for number in range(warmup + rounds):
        pair = {}
        order = (("eager", eager), ("lazy", lazy))
        for way, run in order if number % 2 else reversed(order):
            pair[way] = 1e6 * time_once(run) / operators
        if number >= warmup:
            times.eager.append(pair["eager"])
            times.lazy.append(pair["lazy"])
    return operators, times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--limit", type=float, default=7.0, help="microseconds an operator above eager")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torchlazy.set_target("cpu")
    print(f"torch {torch.__version__}, {options.rounds} rounds, medians, microseconds an operator\n")
    print(f"{'case':<28}{'operators':>10}{'eager':>10}{'lazy':>10}{'above':>10}")
    worst = 0.0
    for case in CASES:
        operators, times = measure(case, options.rounds)
        eager, lazy = statistics.median(times.eager), statistics.median(times.lazy)
        print(f"{case.name:<28}{operators:>10}{eager:>10.2f}{lazy:>10.2f}{times.above:>10.2f}", flush=True)
        worst = max(worst, times.above)
    print(f"\nworst: {worst:.2f} above eager; the limit is {options.limit:g}")
    return 0 if worst <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())

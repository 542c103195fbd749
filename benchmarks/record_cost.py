"""What following costs: Python microseconds an operator, beside eager and torch's builtin lazy backend.

python benchmarks/record_cost.py [--rounds 60] [--limit 5.5]

Each round times all sides one after the other (which goes first alternates), with the same Python code on tiny tensors.
The clock of a lazy side covers recording only: the cut that runs the operators stands after it. Garbage collection is
off while a clock runs and one thread computes, so that eager's time is its Python and dispatch time. The builtin
backend (C++, the same device type) runs in a process of its own, `--no-builtin` leaves it out. `above` is the median of
lazy minus eager within a round. Exits with 1 if the elementwise chain with grad takes more than --limit, or a view or
detach more than that chain.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

IS_BUILTIN = sys.argv[1:2] == ["--serve-builtin"]
if IS_BUILTIN:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torchlazy would claim the device

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

if not IS_BUILTIN:
    import torchlazy

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
    builtin: list[float] = field(default_factory=list)

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


WITH_GRAD = "elementwise chain, grad"
CASES = (
    Case("elementwise chain", chain(requires_grad=False)),
    Case(WITH_GRAD, chain(requires_grad=True)),
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


def time_once(run: Callable[[], object], finish: Callable[[], object]) -> float:
    """Seconds of one call; the cut and the release of its results come after the clock."""
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - started
    gc.enable()
    finish()
    del kept
    return seconds


class Builtin:
    """Torch's own lazy backend in a child process, which times one call for each line that it reads."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve-builtin"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def time_once(self, case: Case) -> float:
        """Seconds of one call of the case there; NaN where it does not work there."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(case.name + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline() or "nan")


def serve_builtin() -> None:
    """The child's side."""
    from torch._lazy import mark_step, wait_device_ops
    from torch._lazy.ts_backend import init

    torch.set_num_threads(1)
    init()
    cases = {case.name: case for case in CASES}
    prepared: dict[str, Callable[[], object]] = {}

    def finish() -> None:
        mark_step()
        wait_device_ops()

    for line in sys.stdin:
        name = line.strip()
        try:
            if name not in prepared:
                prepared[name] = cases[name].prepare("lazy")
            seconds = time_once(prepared[name], finish)
        except RuntimeError:  # an operator that it lacks
            seconds = float("nan")
        print(seconds, flush=True)


def measure(case: Case, rounds: int, builtin: Builtin | None, warmup: int = 5) -> tuple[int, Times]:
    """Operators a call, and the times of all rounds after the warm-up."""
    eager, lazy = case.prepare("cpu"), case.prepare("lazy")
    operators = count_operators(lazy)
    if not operators:
        raise RuntimeError(f"{case.name}: the lazy side recorded no operator; is the device registered?")
    times = Times()
    for number in range(warmup + rounds):
        sides: list[tuple[list[float], Callable[[], float]]] = [
            (times.eager, lambda: time_once(eager, torchlazy.sync)),
            (times.lazy, lambda: time_once(lazy, torchlazy.sync)),
        ]
        if builtin is not None:
            sides.append((times.builtin, lambda: builtin.time_once(case)))
        for kept, run in sides if number % 2 else reversed(sides):
            seconds = run()
            if number >= warmup:
                kept.append(1e6 * seconds / operators)
    return operators, times


def main() -> int:
    if IS_BUILTIN:
        serve_builtin()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--limit", type=float, default=5.5, help="microseconds an operator with grad")
    parser.add_argument("--no-builtin", action="store_true", help="without torch's builtin lazy backend")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torchlazy.set_target("cpu")
    builtin = None if options.no_builtin else Builtin()
    print(
        f"torch {torch.__version__}, {options.rounds} rounds, medians (least in brackets), microseconds an operator\n"
    )
    print(f"{'case':<28}{'operators':>10}{'eager':>16}{'lazy':>16}{'builtin':>16}{'above':>10}")
    lazy: dict[str, float] = {}
    for case in CASES:
        operators, times = measure(case, options.rounds, builtin)
        columns = "".join(
            f"{f'{statistics.median(side):.2f} ({min(side):.2f})' if side else '-':>16}"
            for side in (times.eager, times.lazy, times.builtin)
        )
        lazy[case.name] = statistics.median(times.lazy)
        print(f"{case.name:<28}{operators:>10}{columns}{times.above:>10.2f}", flush=True)
    if builtin is not None:
        builtin.process.kill()
    chain_cost = lazy[WITH_GRAD]
    cheap = max(lazy["view chain"], lazy["detach chain"])
    print(f"\nwith grad: {chain_cost:.2f}, the limit is {options.limit:g}; the dearest view: {cheap:.2f}")
    return int(chain_cost > options.limit or cheap > chain_cost)


if __name__ == "__main__":
    sys.exit(main())

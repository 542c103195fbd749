"""What each door costs a user: milliseconds a training step of a small model, slow cases included.

python benchmarks/doors.py                 eager, the compiled call, the mode and the device, in turns
python benchmarks/doors.py --steps 200     more steps of each kind

The model of the README's first example. Columns: `first`, the mean of the first five steps; `steady`, the median once
`wait_for_compile()` has returned and ten more steps were made; `lengths`, the median of steps of which each has a batch
size of its own, once such steps are known (`--steps` of them and `wait_for_compile()`); `first lengths`, the mean of
those before, compilation in the background included. Empty `TORCHLAZY_CACHE_DIR` for a first run of a machine.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[Tensor, Tensor], Tensor]
WAYS = ("eager", "compile", "mode", "device")
_FIRST = 5
_BATCH = 64
_TURN = 10  # steps


def make(way: str) -> Step:
    """One training step, through this door."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(64, 3)).to("lazy" if way == "device" else "cpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return torchlazy.compile(step) if way == "compile" else step


def timed(way: str, step: Step, batches: list[int]) -> list[float]:
    """Milliseconds of each step, its result read."""
    device = "lazy" if way == "device" else "cpu"
    found = []
    for batch in batches:
        x, y = torch.randn(batch, 64, device=device), torch.randint(3, (batch,), device=device)
        if way == "device":
            torchlazy.sync()
        start = time.perf_counter()
        with torchlazy.lazy_mode() if way == "mode" else nullcontext():
            loss = step(x, y)
        loss.item()
        found.append(1000 * (time.perf_counter() - start))
    return found


def in_turns(steps: dict[str, Step], batches: list[int]) -> dict[str, list[float]]:
    """Milliseconds of each way's steps, ways taking turns."""
    found: dict[str, list[float]] = {way: [] for way in steps}
    for start in range(0, len(batches), _TURN):
        for way, step in steps.items():
            found[way] += timed(way, step, batches[start : start + _TURN])
    return found


def measure(steps: dict[str, Step], count: int) -> dict[str, dict[str, float]]:
    """The columns."""
    sizes = iter(range(_BATCH + 1, _BATCH + 1 + 2 * count + _TURN))

    def fresh(count: int) -> list[int]:
        return [next(sizes) for _ in range(count)]

    def mean(found: dict[str, list[float]]) -> dict[str, float]:
        return {way: statistics.mean(times) for way, times in found.items()}

    def median(found: dict[str, list[float]]) -> dict[str, float]:
        return {way: statistics.median(times) for way, times in found.items()}

    first = mean(in_turns(steps, [_BATCH] * _FIRST))
    in_turns(steps, [_BATCH] * count)
    torchlazy.wait_for_compile()
    in_turns(steps, [_BATCH] * _TURN)
    steady = median(in_turns(steps, [_BATCH] * count))
    first_lengths = mean(in_turns(steps, fresh(count)))
    torchlazy.wait_for_compile()
    in_turns(steps, fresh(_TURN))
    return {
        "first": first,
        "steady": steady,
        "first lengths": first_lengths,
        "lengths": median(in_turns(steps, fresh(count))),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=60, help="steps of each kind")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    columns = measure({way: make(way) for way in given.ways}, given.steps)
    print(f"{'ms a step':10}" + "".join(f"{name:>16}" for name in columns))
    for way in given.ways:
        print(f"{way:10}" + "".join(f"{column[way]:16.2f}" for column in columns.values()))


if __name__ == "__main__":
    main()

"""Whether a step is recorded while the GPU runs the one before: host time, GPU time, and both together.

    python benchmarks/overlap.py [--models gpt_example] [--steps 10] [--turns 5]

Steps follow each other and nobody asks for a value. `host` is the time until the calls have returned, `GPU` the time
of the same steps on the GPU's own clock, sent off behind a pause so that the host is not in the way, `together` the
time from the first call to the end of the last kernel. Without overlap `together` is the sum of the two, with it the
larger of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torchlazy
from models import JOBS
from side_by_side import Placement, Way
from train_table import make_step

WAYS: tuple[Way, ...] = ("eager", "lazy", "lazy_compile")
SETTLING = 70  # calls under torchlazy.compile after which the next audit is far away


def prepare(name: str, way: Way) -> tuple[Callable[[], object], Placement]:
    """A training step of the way, warmed up."""
    placement = Placement(way, "cuda")
    step = make_step(JOBS[name], placement, argparse.Namespace(batch=0, job="train", bf16=True))
    for _ in range(5):
        step()
    for _ in range(2 if placement.is_lazy else 0):
        torchlazy.wait_for_compile()
        step()
    for _ in range(SETTLING if way == "lazy_compile" else 0):
        step()
    placement.wait()
    return step, placement


def measure(step: Callable[[], object], placement: Placement, steps: int) -> tuple[float, float, float]:
    """Milliseconds a step: host, GPU, together."""
    placement.wait()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    if placement.is_lazy:
        torchlazy.flush()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    together = time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(3e9 * host))  # cycles: at 2 GHz or less longer than the host needs to send everything off
    begin.record()
    for _ in range(steps):
        step()
    if placement.is_lazy:
        torchlazy.flush()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * host / steps, begin.elapsed_time(end) / steps, 1e3 * together / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(JOBS), default=["gpt_example"])
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU")
        return 2
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, ms a step, medians of {options.turns} turns\n")
    print("| model | way | host | GPU | together | together against the larger |")
    print("|---|---|---|---|---|---|")
    for name in options.models:
        ready = [(way, *prepare(name, way)) for way in WAYS]
        found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.turns):
            for way, step, placement in ready:
                found[way].append(measure(step, placement, options.steps))
        for way, rows in found.items():
            host, gpu, together = (statistics.median(column) for column in zip(*rows, strict=True))
            ratio = statistics.median(row[2] / max(row[0], row[1]) for row in rows)
            print(f"| {name} | {way} | {host:.2f} | {gpu:.2f} | {together:.2f} | {ratio:.2f}x |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

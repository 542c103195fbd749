"""Rules that look for the windows covering a position, beside ATen's kernels: microseconds of GPU kernels.

python benchmarks/window_rules.py [--layouts rows channels]

Each operator runs forward, and backward by itself (its output is asked for no more than its gradient), compiled and
eagerly, on (64, 64, 112, 112) bfloat16 unless it says otherwise. The clock is the profiler's: kernels alone, no launch.
What is measured here decides `prims/decomps/cpu_kernels.py` for GPUs: where ATen wins, a rule should leave it the call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torchlazy
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

STEPS = 5
LAYOUTS = {"rows": torch.contiguous_format, "channels": torch.channels_last}
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d(3, 2, 1)": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d(2)": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d(3, 2, 1)": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool2d(2)": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d(5)": lambda x: F.adaptive_avg_pool2d(x, 5),
    "adaptive_max_pool2d(5)": lambda x: F.adaptive_max_pool2d(x, 5),
    "bilinear, doubled": lambda x: F.interpolate(x[:16], scale_factor=2, mode="bilinear"),
    "bicubic, doubled": lambda x: F.interpolate(x[:16], scale_factor=2, mode="bicubic"),
    "nearest, doubled": lambda x: F.interpolate(x[:16], scale_factor=2, mode="nearest"),
    "reflection pad 3": lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"),
    "replication pad 3": lambda x: F.pad(x, (3, 3, 3, 3), mode="replicate"),
    "unfold 3": lambda x: F.unfold(x[:16], 3, padding=1),
}


def kernel_time(step: Callable[[], object]) -> float:
    """Microseconds of GPU kernels a step."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    return sum(row.self_device_time_total for row in seen.key_averages()) / STEPS


def measure(operator: Callable[[Tensor], Tensor], layout: torch.memory_format) -> list[float]:
    """Forward and backward, eager and compiled: four times."""
    x = torch.randn(64, 64, 112, 112, device="cuda", dtype=torch.bfloat16).to(memory_format=layout)
    grad = torch.randn_like(operator(x))

    def forward() -> Tensor:
        return operator(x)

    def both() -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(operator(leaf), leaf, grad)[0]

    times = []
    for function in (forward, both):
        times.append(kernel_time(function))
        times.append(kernel_time(torchlazy.compile(function, audit=False)))
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("window_rules: needs a GPU; on the CPU see the figures in prims/decomps/cpu_kernels.py")
    torchlazy.config.tiers = "off"
    print("| operator | layout | forward: eager | compiled | forward and backward: eager | compiled |")
    print("|---|---|---|---|---|---|")
    for name, operator in OPERATORS.items():
        for layout in options.layouts:
            try:
                cells = [f"{time:.0f}" for time in measure(operator, LAYOUTS[layout])]
            except Exception as error:
                cells = [f"{type(error).__name__}: {error}".splitlines()[0]]
            print(f"| {name} | {layout} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

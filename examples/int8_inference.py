"""Int8 for inference: trains a classifier of noisy points, and compares its accuracy and time in float32 and in int8.

`python examples/int8_inference.py`: some seconds on a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, FEATURES, WIDTH = 50, 64, 1024


def points(centres: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """So many noisy points, (count, FEATURES), and their classes, (count,)."""
    classes = torch.randint(len(centres), (count,))
    return centres[classes] + 2.2 * torch.randn(count, FEATURES), classes


def milliseconds(call: Callable[[Tensor], Any], x: Tensor) -> float:
    """The median time of a call, once its programs are there."""
    for _ in range(10):
        call(x)
    torchlazy.wait_for_compile()
    times = []
    for _ in range(31):
        start = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Train, then print both accuracies and times."""
    torch.manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES)
    inner = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), *inner, nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    for _ in range(150):
        x, classes = points(centres, 128)
        optimizer.zero_grad()
        F.cross_entropy(model(x), classes).backward()
        optimizer.step()
    model.eval()
    quantized = torchlazy.compile(model, quantize="int8-dynamic")
    x, classes = points(centres, 8192)
    with torch.no_grad():
        for name, call in (("float32", model), ("int8", quantized)):
            right = torch.cat([call(part).argmax(1) for part in x.split(1024)]) == classes
            times = ", ".join(f"{milliseconds(call, x[:rows]):.2f} ms for {rows}" for rows in (1, 16, 256))
            print(f"{name:8} {100 * right.float().mean():.2f} % right; {times}")
    print(quantized.report())


if __name__ == "__main__":
    main()

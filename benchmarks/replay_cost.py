"""What calls of small compiled models cost beside eager's: microseconds, in inference and in a training loop.

`python benchmarks/replay_cost.py [--turns 9] [--calls 400]`: one thread, compiled modules in an ordinary loop. Both
sides take turns; medians of the turns' ratios. Exits with 1 where a model is slower than eager by more than a tenth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchlazy
from torch import nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def normed() -> nn.Module:
    layers = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(64, 10))


class Attention(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(8, 8, 4, 16).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(found.transpose(1, 2).reshape(8, 8, 64))
        return x + self.mlp(x)  # type: ignore[no-any-return]


def convolutions() -> nn.Module:
    def block(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]

    return nn.Sequential(*block(3, 8), *block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp, batch 1": (mlp, (1, 64)),
    "mlp, batch 32": (mlp, (32, 64)),
    "norms and dropout": (normed, (16, 64)),
    "attention": (Attention, (8, 8, 64)),
    "convolutions": (convolutions, (4, 3, 16, 16)),
}


def inference(model: nn.Module, call: Any, x: torch.Tensor) -> Callable[[], Any]:
    model.eval()

    def step() -> torch.Tensor:
        with torch.no_grad():
            return call(x)  # type: ignore[no-any-return]

    return step


def training(model: nn.Module, call: Any, x: torch.Tensor) -> Callable[[], Any]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()

    return step


def microseconds(step: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--calls", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    slower = 0
    print("| model | way | eager | compiled | eager / compiled | replays in C++ |\n|---|---|---|---|---|---|")
    for name, (make, shape) in MODELS.items():
        for way in (inference, training):
            torch.manual_seed(0)
            eager, model, x = make(), make(), torch.randn(shape)
            compiled = torchlazy.compile(model)
            sides = [way(eager, eager, x), way(model, compiled, x)]
            for _ in range(4):
                microseconds(sides[1], 16)
                torchlazy.wait_for_compile()
            rows = [[microseconds(side, given.calls) for side in sides] for _ in range(given.turns)]
            ratio = statistics.median(a / b for a, b in rows)
            slower += ratio < 0.9
            a, b = (statistics.median(column) for column in zip(*rows, strict=True))
            report = compiled._compiled_call.report()
            share = report.native / max(report.replays, 1)
            print(
                f"| {name} | {way.__name__} | {a:.0f} | {b:.0f} | {ratio:.2f} | {share:.0%} {report.in_python} |",
                flush=True,
            )
    return int(slower > 0)


if __name__ == "__main__":
    raise SystemExit(main())

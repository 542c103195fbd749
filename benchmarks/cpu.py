"""Models that people try first, on the CPU: eager, `torch.compile` and torchlazy's doors, training and inference.

`python benchmarks/cpu.py [--models gpt resnet ...] [--ways torch.compile compiled mode device] [--jobs infer train]`

Own small models in float32, random weights; `OMP_NUM_THREADS` says on how many cores. A step in training is forward,
mean square, backward, AdamW; in inference the call alone, under `no_grad`. Ways take turns; milliseconds are medians,
and the ratios (eager's time by the way's: above 1 is faster) medians of the turns' ratios. `compiled` is a compiled
module in an ordinary loop. Compilation is over before anything is measured.
"""

from __future__ import annotations

import argparse
import copy
import functools
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torchlazy.lazy.compiled.quantized import LEAST

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from workloads import mobilenet

WAYS = ("eager", "torch.compile", "compiled", "mode", "device", "int8")  # the last for inference alone
JOBS = ("infer", "train")


class Basic(nn.Module):
    """A block of a ResNet."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)])
        down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.down = down if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + self.down(x)).relu()  # type: ignore[no-any-return]


class Next(nn.Module):
    """A block of a ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, 1, 3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.down(F.gelu(self.up(y))) * self.scale).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class ChannelNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Layer(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 4, c // 4).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


def pooled(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]


def gpt(width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, width), *[Layer(width) for _ in range(4)], nn.Linear(width, 1000))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, Basic(32, 32, 1), Basic(32, 64, 2), Basic(64, 128, 2), Basic(128, 256, 2), *pooled(256))


def convnext() -> nn.Module:
    found: list[nn.Module] = [nn.Conv2d(3, 32, 4, 4), ChannelNorm(32), Next(32), Next(32)]
    for width in (64, 128):
        found += [ChannelNorm(width // 2), nn.Conv2d(width // 2, width, 2, 2), Next(width)]
    return nn.Sequential(*found, *pooled(128))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (gpt, lambda: torch.randint(1000, (4, 128))),
    "gpt, 1 x 16": (gpt, lambda: torch.randint(1000, (1, 16))),
    "gpt, width 768, 1 x 16": (lambda: gpt(768), lambda: torch.randint(1000, (1, 16))),
    "gpt, width 768, 4 x 64": (lambda: gpt(768), lambda: torch.randint(1000, (4, 64))),
    "resnet": (resnet, lambda: torch.randn(8, 3, 96, 96)),
    "mobilenet": (mobilenet, lambda: torch.randn(8, 3, 96, 96)),
    "convnext": (convnext, lambda: torch.randn(8, 3, 96, 96)),
    "lstm": (Recurrent, lambda: torch.randn(16, 32, 64)),
    "mlp, batch 1": (mlp, lambda: torch.randn(1, 256)),
    "mlp, batch 1024": (mlp, lambda: torch.randn(1024, 256)),
}


def make(way: str, job: str, model: nn.Module, x: Tensor) -> Callable[[], Any]:
    """One step, or one call, this way, its result read."""
    model = copy.deepcopy(model).train(job == "train")
    if way == "device":
        model, x = model.to("lazy"), x.to("lazy")
    by_way = {
        "compiled": torchlazy.compile,
        "torch.compile": torch.compile,
        "int8": functools.partial(torchlazy.compile, quantize="int8-dynamic"),
    }
    call: Any = by_way.get(way, lambda one: one)(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def train() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = call(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def infer() -> Tensor:
        with torch.no_grad():
            return call(x)  # type: ignore[no-any-return]

    step = train if job == "train" else infer

    def run() -> None:
        if way == "mode":
            with torchlazy.lazy_mode():
                found = step()
        else:
            found = step()
        found.sum().item()

    return run


def has_large_layers(model: nn.Module) -> bool:
    """Whether `quantize` finds a layer to compute in int8."""
    return any(isinstance(layer, nn.Linear) and layer.weight.numel() >= LEAST for layer in model.modules())


def milliseconds(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e3


def measure(name: str, job: str, ways: list[str], turns: int) -> dict[str, tuple[float, float]]:
    """By way the milliseconds, and eager's time by the way's."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = MODELS[name][0](), MODELS[name][1]()
    ways = [way for way in ways if way != "int8" or (job == "infer" and has_large_layers(model))]
    runs = {way: make(way, job, model, x) for way in ways}
    for _ in range(4):
        for run in runs.values():
            milliseconds(run, 8)
        torchlazy.wait_for_compile()
    calls = max(2, min(40, int(40 / milliseconds(runs["eager"], 3))))
    rows = [{way: milliseconds(run, calls) for way, run in runs.items()} for _ in range(turns)]
    return {
        way: (statistics.median(r[way] for r in rows), statistics.median(r["eager"] / r[way] for r in rows))
        for way in ways
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--turns", type=int, default=11)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    ways = ["eager", *(way for way in given.ways if way != "eager")]
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads; ms (eager / way)\n")
    print(f"| model | job | {' | '.join(ways)} |\n|{'---|' * (len(ways) + 2)}")
    ratios: dict[tuple[str, str], list[float]] = {}
    for job in given.jobs:
        for name in given.models:
            found = measure(name, job, ways, given.turns)
            told = {way: f"{ms:.2f}" + f" ({ratio:.2f})" * (way != "eager") for way, (ms, ratio) in found.items()}
            cells = [told.get(way, "") for way in ways]
            print(f"| {name} | {job} | {' | '.join(cells)} |", flush=True)
            for way, (_, ratio) in found.items():
                ratios.setdefault((job, way), []).append(ratio)
    for job in given.jobs:
        means = [f"{statistics.geometric_mean(ratios.get((job, way), [1.0])):.2f}" for way in ways]
        print(f"| geometric mean | {job} | {' | '.join(means)} |")


if __name__ == "__main__":
    main()

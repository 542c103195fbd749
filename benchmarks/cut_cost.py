"""What reading the loss before `backward()` costs a compiled step on the CPU: with and without it, turn by turn.

python benchmarks/cut_cost.py                              the models of examples/: the GPT, the convnet (batch 1024)
python benchmarks/cut_cost.py --models resnet --turns 20   a ResNet-50 of a quarter's width: minutes of compiling

A step is forward, cross-entropy, backward, AdamW (foreach) and zero_grad under `torchlazy.compile`. The ways alternate
in one process, so that what else the machine does meets both; ratios are those of single turns, their median is told.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torchlazy
from host_cost import ResNet50
from tiny_gpt import GPT, GPTConfig
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.cut_pairs import PairRun
from train_convnet import make_model

WAYS = ("one graph", "loss read")


@dataclass
class Way:
    """One model and its step; `seconds` of wall time and `cpu` seconds of each measured step."""

    step: Callable[[], Any]
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def make_way(name: str, *, reads_loss: bool) -> Way:
    torch.manual_seed(0)
    model, inputs, targets = _model(name)
    model, inputs, targets = model.to("lazy"), inputs.to("lazy"), targets.to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> torch.Tensor:
        output = model(inputs)
        output = output[0] if isinstance(output, tuple) else output
        loss = F.cross_entropy(output.flatten(0, -2), targets.flatten())
        if reads_loss:
            loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Way(torchlazy.compile(step))


def _model(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    if name == "convnet":
        return make_model(32), torch.randn(1024, 1, 8, 8), torch.randint(0, 10, (1024,))
    if name == "resnet":
        return ResNet50(16, 10), torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
    sizes = GPTConfig()
    return GPT(sizes), *(torch.randint(0, sizes.vocabulary, (16, sizes.block)) for _ in range(2))


def measure(ways: list[Way], turns: int) -> None:
    for _ in range(12):  # captures, programs, then programs of pairs
        for way in ways:
            way.step()
        torchlazy.wait_for_compile()
    for _ in range(turns):
        for way in ways:
            torchlazy.sync()
            wall, cpu = time.perf_counter(), time.process_time()
            way.step()
            torchlazy.sync()
            way.seconds.append(time.perf_counter() - wall)
            way.cpu.append(time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "convnet"], choices=["gpt", "convnet", "resnet"])
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    for name in options.models:
        ways = [make_way(name, reads_loss=reads) for reads in (False, True)]
        measure(ways, options.turns)
        paired = sum(isinstance(found, PairRun) and found.has_programs for found in gc.get_objects())
        for text, way in zip(WAYS, ways, strict=True):
            wall, cpu = (1e3 * statistics.median(found) for found in (way.seconds, way.cpu))
            print(f"{name:8} {text:10} {wall:8.1f} ms, {cpu:8.1f} ms of CPU")
        plain, cut = ways
        time_ratio = statistics.median(b / a for a, b in zip(plain.seconds, cut.seconds, strict=True))
        cpu_ratio = statistics.median(b / a for a, b in zip(plain.cpu, cut.cpu, strict=True))
        how = "planned together" if paired else "planned apart"
        print(f"{name:8} loss read, {how} / one graph: time {time_ratio:.3f}, CPU time {cpu_ratio:.3f}", flush=True)
        del ways, plain, cut
        gc.collect()


if __name__ == "__main__":
    main()

"""What reading the loss before `backward()` costs a compiled step: with and without it, turn by turn.

python benchmarks/cut_cost.py                              the models of examples/: the GPT, the convnet (batch 1024)
python benchmarks/cut_cost.py --models resnet --turns 20   a ResNet-50 of a quarter's width: minutes of compiling
python benchmarks/cut_cost.py --target cuda --models gpt_example resnet50 --turns 17 --steps 10 [--mode reduce-overhead]

A step is forward, cross-entropy, backward, AdamW (foreach) and zero_grad under `torchlazy.compile`, on CUDA under
bfloat16 autocast. The ways alternate in one process, so that what else the machine does meets both; ratios are those of
single turns, their median is told.
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
from models import JOBS
from tiny_gpt import GPT, GPTConfig
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.compiled.replay.pairs import PairRun
from train_convnet import make_model

WAYS = ("one graph", "loss read")


@dataclass
class Way:
    """One model and its step; `seconds` of wall time and `cpu` seconds of each measured step."""

    step: Callable[[], Any]
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def make_way(name: str, options: argparse.Namespace, *, reads_loss: bool) -> Way:
    torch.manual_seed(0)
    model, inputs, targets = _model(name)
    model, inputs, targets = model.to("lazy"), inputs.to("lazy"), targets.to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> torch.Tensor:
        with torch.autocast("lazy", dtype=torch.bfloat16, enabled=options.target != "cpu"):
            output = model(inputs)
            output = output[0] if isinstance(output, tuple) else output
            loss = F.cross_entropy(output.float().flatten(0, -2), targets.flatten())
        if reads_loss:
            loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Way(torchlazy.compile(step, mode=options.mode))


def _model(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    if name in JOBS:
        job = JOBS[name]
        (inputs,), targets = job.inputs(job.batch)
        return job.build(), inputs, targets
    if name == "convnet":
        return make_model(32), torch.randn(1024, 1, 8, 8), torch.randint(0, 10, (1024,))
    if name == "resnet":
        return ResNet50(16, 10), torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
    sizes = GPTConfig()
    return GPT(sizes), *(torch.randint(0, sizes.vocabulary, (16, sizes.block)) for _ in range(2))


def measure(ways: list[Way], options: argparse.Namespace) -> None:
    def wait() -> None:
        torchlazy.sync()
        if options.target != "cpu":
            torch.cuda.synchronize()

    for _ in range(12):  # captures, programs, then programs of pairs
        for way in ways:
            way.step()
        torchlazy.wait_for_compile()
    for _ in range(70 if options.target != "cpu" else 0):  # audits are rare after these
        for way in ways:
            way.step()
    for turn in range(options.turns):
        for way in ways if turn % 2 else reversed(ways):
            way.step()
            wait()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                way.step()
            wait()
            way.seconds.append((time.perf_counter() - wall) / options.steps)
            way.cpu.append((time.process_time() - cpu) / options.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["gpt", "convnet", "resnet", *sorted(JOBS)]
    parser.add_argument("--models", nargs="+", default=["gpt", "convnet"], choices=names)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--mode", default="default", choices=["default", "reduce-overhead", "max-autotune"])
    options = parser.parse_args()
    torchlazy.set_target(options.target)
    warnings.simplefilter("ignore", FutureWarning)
    for name in options.models:
        ways = [make_way(name, options, reads_loss=reads) for reads in (False, True)]
        measure(ways, options)
        paired = sum(type(found) is PairRun and found.has_programs for found in gc.get_objects())
        for text, way in zip(WAYS, ways, strict=True):
            wall, cpu = (1e3 * statistics.median(found) for found in (way.seconds, way.cpu))
            print(f"{name:8} {text:10} {wall:8.2f} ms, {cpu:8.2f} ms of CPU")
        plain, cut = ways
        time_ratio = statistics.median(b / a for a, b in zip(plain.seconds, cut.seconds, strict=True))
        cpu_ratio = statistics.median(b / a for a, b in zip(plain.cpu, cut.cpu, strict=True))
        how = "planned together" if paired else "planned apart"
        print(f"{name:8} loss read, {how} / one graph: time {time_ratio:.3f}, CPU time {cpu_ratio:.3f}", flush=True)
        del ways, plain, cut
        gc.collect()


if __name__ == "__main__":
    main()

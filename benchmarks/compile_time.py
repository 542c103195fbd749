"""Compile seconds of a deep GPT against those of a shallow one: equal layers share their kernels.

    python benchmarks/compile_time.py [--layers 12 48] [--width 128] [--turns 3] [--target cpu] [--torch-compile]

Every measurement is a process of its own with empty caches; depths take turns, medians are reported. A training step is
forward, cross-entropy, backward, AdamW and zero_grad. `compile` is what the worker took for the step's program, kernels
included; `planning` its part before the kernels; `CPU` the processor seconds of the worker and of the compilers that it
started, its own start included. torch.compile has no such figures: `first step` is its first step less its last.
Exits with 1 where the ratio of `compile` is above --limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.api import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tiny_gpt import GPT, GPTConfig

Figures = dict[str, float]


def gpt_and_codes(layers: int, width: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    sizes = GPTConfig(layers=layers, width=width, dropout=0.0)
    return GPT(sizes), torch.randint(sizes.vocabulary, (4, sizes.block))


def training_step(model: nn.Module, forward: nn.Module, codes: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One step, as a function that gives the loss, not read yet; `forward` is the model, or its compiled form."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> torch.Tensor:
        loss = F.cross_entropy(forward(codes)[0].flatten(0, 1), codes.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def run_child(way: str, layers: int, width: int, target: str) -> Figures:
    """The figures of one depth, in this process."""
    device = target if way == "torch.compile" else "lazy"
    if device == "lazy":
        torchlazy.set_target(target)
    model, codes = gpt_and_codes(layers, width)
    model = model.to(device)
    forward = torch.compile(model) if way == "torch.compile" else model
    run = training_step(model, forward, codes.to(device))

    def step() -> float:
        started = time.perf_counter()
        run().item()
        return time.perf_counter() - started

    seconds = [step() for _ in range(4)]
    if way == "torch.compile":
        return {"first step": seconds[0] - seconds[-1]}
    torchlazy.wait_for_compile()
    step()
    timings = driver.last_compiled.timings
    driver.tiers.pool.close()  # its processor seconds are known once it has ended
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    kernels = timings.get("kernels", 0.0)
    return {
        "compile": torchlazy.metrics()["compile_seconds"],
        "planning": sum(timings.values()) - kernels - timings.get("load kernels", 0.0) - timings.get("load", 0.0),
        "kernels": kernels,
        "CPU": used.ru_utime + used.ru_stime,
        "sources": len(driver.last_compiled.program.kernels),
    }


def measure(way: str, layers: int, options: argparse.Namespace) -> Figures:
    """One depth in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory(prefix="torchlazy-compile-time-") as folder:
        environment = os.environ | {
            "TORCHLAZY_CACHE_DIR": os.path.join(folder, "lazy"),
            "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
            "TORCHLAZY_TIERS": "on",
            "TORCHLAZY_WORKER_NICE": "0",
        }
        command = [sys.executable, __file__, "--child", way, str(layers), str(options.width), options.target]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way}, {layers} layers: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        way, layers, width, target = sys.argv[2:]
        print(json.dumps(run_child(way, int(layers), int(width), target)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=[12, 48])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--torch-compile", action="store_true", help="add torch.compile of the model")
    parser.add_argument("--limit", type=float, default=1.3, help="of the deeper model's compile seconds to the other's")
    options = parser.parse_args()
    shallow, deep = options.layers
    print(
        f"torch {torch.__version__}, {options.target}, GPT of width {options.width}, medians of {options.turns} turns\n"
    )
    print(f"| way | figure | {shallow} layers | {deep} layers | ratio |\n|---|---|---|---|---|")
    found: dict[str, float] = {}
    for way in ("torchlazy", *(["torch.compile"] if options.torch_compile else [])):
        pairs = [(measure(way, shallow, options), measure(way, deep, options)) for _ in range(options.turns)]
        for figure in pairs[0][0]:
            a, b = (statistics.median(pair[side][figure] for pair in pairs) for side in (0, 1))
            found[figure] = statistics.median(pair[1][figure] / max(pair[0][figure], 1e-9) for pair in pairs)
            print(f"| {way} | {figure} | {a:.2f} | {b:.2f} | {found[figure]:.2f}x |", flush=True)
    return int(found["compile"] > options.limit)


if __name__ == "__main__":
    sys.exit(main())

"""One program for all sizes against a program of its own, on the GPT example, and what a sweep over lengths compiles.

python benchmarks/dynamic.py                      full size under bfloat16 autocast on CUDA, else the demo's sizes
python benchmarks/dynamic.py --length 384 --sweep 64 128 200 333

A training step at one length runs as its static program and as the template made from two other lengths, in turns in
one process; the clock stands around whole steps, and on CUDA a profiler also adds up the kernels of one step, which is
what the programs differ in. The sweep then trains at lengths never seen, each once: compiles, and the milliseconds that
finding and binding the program takes at the cut.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchlazy
from models import JOBS
from tiny_gpt import GPT, GPTConfig
from torch import Tensor
from torchlazy.lazy.api import driver


def make_step(options: argparse.Namespace) -> Callable[[int], Tensor]:
    """A training step at any length: forward, loss, backward, AdamW, zero_grad."""
    torch.manual_seed(0)
    base: GPTConfig = GPTConfig(layers=12, heads=12, width=768, block=1024) if options.full else GPTConfig()
    config = GPTConfig(options.layers or base.layers, base.heads, base.width, max(base.block, 256), 0.0)
    model = GPT(config).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(length: int) -> Tensor:
        codes = torch.randint(config.vocabulary, (options.batch, length)).to("lazy")
        targets = torch.randint(config.vocabulary, (options.batch, length)).to("lazy")
        with torch.autocast("lazy", torch.bfloat16, enabled=options.full):
            _, loss = model(codes, targets)
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def finish() -> None:
    """Wait for the last step."""
    torchlazy.sync()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_turn(step: Callable[[int], Tensor], length: int, steps: int) -> float:
    """Milliseconds a step."""
    finish()
    start = time.perf_counter()
    for _ in range(steps):
        step(length)
    finish()
    return (time.perf_counter() - start) * 1e3 / steps


def kernel_milliseconds(step: Callable[[int], Tensor], length: int) -> float | None:
    """The sum of the GPU's kernels in one step."""
    if not torch.cuda.is_available():
        return None
    finish()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step(length)
        finish()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 3e3


def prepare(step: Callable[[int], Tensor], way: str, options: argparse.Namespace) -> dict[Any, Any]:
    """Compile what the way needs; returns what the driver then knows."""
    driver.forget()
    torchlazy.config.dynamic = "on" if way == "all sizes" else "off"
    torchlazy.reset_metrics()
    start = time.perf_counter()
    lengths = (*options.samples, options.length) if way == "all sizes" else (options.length,)
    for length in lengths:
        for _ in range(2 if length != options.length else 3):
            step(length)
            finish()
    counts = torchlazy.metrics()
    print(
        f"{way:10} {counts['compiles']} compiles, {counts['templates']} templates, {counts['generalised']} traces "
        f"bound, {time.perf_counter() - start:.1f} s {counts['not_generalised'] or ''}"
    )
    return driver.tiers._known


def sweep(step: Callable[[int], Tensor], lengths: list[int]) -> None:
    """Lengths seen once each; the look-up at the cut is what a new length costs beside recording it."""
    torchlazy.reset_metrics()
    spent: list[float] = []
    look_up = driver.tiers.look_up

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = look_up(*args, **kwargs)
        spent.append((time.perf_counter() - start) * 1e3)
        return found

    driver.tiers.look_up = timed  # type: ignore[method-assign]
    try:
        for length in lengths:
            step(length)
            finish()
    finally:
        driver.tiers.look_up = look_up  # type: ignore[method-assign]
    counts = torchlazy.metrics()
    print(
        f"sweep over {len(lengths)} new lengths: {counts['compiles']} compiles, {counts['generalised']} bound; look-up "
        f"at a cut median {statistics.median(spent):.1f} ms, most {max(spent):.1f} ms"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    full = torch.cuda.is_available()
    parser.add_argument("--full", action="store_true", default=full, help="12 layers x 768 under bfloat16 autocast")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=JOBS["gpt_example"].batch if full else 4)
    parser.add_argument("--length", type=int, default=512 if full else 96)
    parser.add_argument("--samples", type=int, nargs=2, default=(448, 480) if full else (80, 112))
    parser.add_argument(
        "--sweep", type=int, nargs="*", default=[320, 333, 400, 415, 496, 500] if full else [33, 57, 120]
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10 if full else 5)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torchlazy.config.tiers, torchlazy.config.store = "off", "off"
    step = make_step(options)
    known = {way: dict(prepare(step, way, options)) for way in ("its own", "all sizes")}
    turns: dict[str, list[float]] = {way: [] for way in known}
    kernels: dict[str, float | None] = {}
    for turn in range(options.turns):
        for way in known:
            driver.tiers._known = known[way]
            turns[way].append(run_turn(step, options.length, options.steps))
            if turn == 0:
                kernels[way] = kernel_milliseconds(step, options.length)
    for way, found in turns.items():
        gpu = f", kernels {kernels[way]:.2f} ms" if kernels[way] is not None else ""
        print(f"{way:10} {statistics.median(found):.2f} ms a step (least {min(found):.2f}){gpu}")
    ratios = [b / a for a, b in zip(turns["its own"], turns["all sizes"], strict=True)]
    line = f"all sizes / its own: {statistics.median(ratios):.3f} of a step"
    if kernels["its own"] and kernels["all sizes"]:
        line += f", {kernels['all sizes'] / kernels['its own']:.3f} of the kernels' time"
    print(line)
    torchlazy.config.dynamic = "on"
    driver.tiers._known = known["all sizes"]
    sweep(step, list(options.sweep))


if __name__ == "__main__":
    main()

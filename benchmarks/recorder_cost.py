"""What `lazy_mode` costs and gains against eager, where the host is the limit: first sight, known traces, new traces.

python benchmarks/recorder_cost.py                          all programs
python benchmarks/recorder_cost.py --programs skips --python   the recorder in Python beside the native one

Programs of tiny tensors: training steps of an MLP, of the 12-layer GPT and of the ResNet-50 of host_cost.py, their
forwards under `no_grad` and autocast, a net whose 12 blocks are skipped with probability 1/2 each (a new trace at each
step), and the GPT with a new length at each step. One process, one thread, ways taking turns; programs are really run.

Columns are times eager's in the same turn (medians of ratios; below 1 is faster): `first`, every step is seen for the
first time; `known`, after `--warm` steps and `wait_for_compile()`; `python`, the same by the recorder in Python.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TORCHLAZY_NATIVE", "on")
os.environ.setdefault("TORCHLAZY_NATIVE_DEVICE", "on")

import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.runtime.native.recorder_library import LIBRARY

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from host_cost import ResNet50
from tiny_gpt import GPT, GPTConfig

Step = Callable[[], Tensor]


def _training(model: nn.Module, loss_of: Callable[[], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> Tensor:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def mlp() -> Step:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    return _training(model, lambda: F.mse_loss(model(x), y))


def _gpt(block: int = 16) -> tuple[nn.Module, Tensor]:
    sizes = GPTConfig(layers=12, heads=2, width=32, block=block, dropout=0.0)
    return GPT(sizes), torch.randint(sizes.vocabulary, (2, block))


def _logits(output: object) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[return-value]


def gpt() -> Step:
    model, codes = _gpt()
    return _training(model, lambda: F.cross_entropy(_logits(model(codes)).flatten(0, 1), codes.flatten()))


def gpt_infer() -> Step:
    model, codes = _gpt()

    def step() -> Tensor:
        with torch.no_grad():
            return _logits(model(codes))

    return step


def gpt_autocast() -> Step:
    model, codes = _gpt()

    def step() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return _logits(model(codes))

    return step


def resnet50() -> Step:
    model, x, y = ResNet50(8), torch.randn(2, 3, 32, 32), torch.randint(10, (2,))
    return _training(model, lambda: F.cross_entropy(model(x), y))


def resnet50_infer() -> Step:
    model, x = ResNet50(8).eval(), torch.randn(2, 3, 32, 32)

    def step() -> Tensor:
        with torch.no_grad():
            return model(x)

    return step


class _Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(12)
        )
        self.head = nn.Linear(32, 4)
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.random.random() < 0.5:
                x = x + block(x)
        return self.head(x)


def skips() -> Step:
    model, x, y = _Skipping(), torch.randn(8, 32), torch.randn(8, 4)
    return _training(model, lambda: F.mse_loss(model(x), y))


def lengths() -> Step:
    model, codes = _gpt(256)
    count = [0]

    def loss() -> Tensor:
        count[0] += 1
        part = codes[:, : 8 + (count[0] * 37) % 240]
        return F.cross_entropy(_logits(model(part)).flatten(0, 1), part.flatten())

    return _training(model, loss)


PROGRAMS = {f.__name__: f for f in (mlp, gpt, gpt_infer, gpt_autocast, resnet50, resnet50_infer, skips, lengths)}


def _made(program: Callable[[], Step]) -> Step:
    torch.manual_seed(0)
    return program()


def _on_device(program: Callable[[], Step]) -> Step:
    torch.manual_seed(0)
    with torch.device("lazy"):
        return program()


def _in_mode(step: Step) -> Step:
    def inside() -> Tensor:
        with torchlazy.lazy_mode():
            return step()

    return inside


def _first(step: Step) -> Step:
    def unknown() -> Tensor:
        BLOCKS.library.forget()
        return step()

    return unknown


def _by_python(step: Step) -> Step:
    inside = _in_mode(step)

    def recorded() -> Tensor:
        torchlazy.config.native = "off"
        try:
            return inside()
        finally:
            torchlazy.config.native = "on"

    return recorded


def _timed(step: Step, steps: int) -> float:
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    for _ in range(steps):
        kept = step()  # what nobody holds the device does not compute
    taken = time.perf_counter() - start
    del kept
    gc.enable()
    return 1e3 * taken / steps


def _warmed(step: Step, warm: int) -> None:
    for _ in range(warm):
        step()
    for _ in range(8):
        torchlazy.wait_for_compile()
        for _ in range(5):
            step()


def measure(name: str, options: argparse.Namespace) -> str:
    """One line of the table."""
    program = PROGRAMS[name]
    eager = _made(program)
    ways = {"known": _in_mode(_made(program)), "device": _on_device(program)}
    if options.python:
        ways["python"] = _by_python(_made(program))
    for _ in range(3):
        eager()
    for way in ways.values():
        _warmed(way, options.warm)
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    times: list[float] = []
    for turn in range(options.turns):
        base = _timed(eager, options.steps)
        times.append(base)
        for way in ways if turn % 2 else reversed(ways):
            ratios[way].append(_timed(ways[way], options.steps) / base)
    traces = BLOCKS.library.traces()
    counts = BLOCKS.library.counts()
    firsts = {"first": _first(_in_mode(_made(program))), "device first": _first(_on_device(program))}
    for way, first in firsts.items():
        ratios[way] = []
        for _ in range(3):
            first()
        for _ in range(options.turns):
            base = _timed(eager, options.steps)
            ratios[way].append(_timed(first, options.steps) / base)
    columns = [f"{statistics.median(ratios[way]):.2f} ({min(ratios[way]):.2f})" for way in (*firsts, *ways)]
    followed = sum(state == 2 for _, _, state, _ in traces)
    shares = f"{counts['deferred']} deferred, {counts['logged']} logged, {counts['partings']} partings"
    if options.verbose:
        print(sorted(traces, key=lambda t: -t[1])[:12], BLOCKS.library.causes(), BLOCKS.library.ran_at_once())
    BLOCKS.library.forget()
    BLOCKS.library.reset_counts()
    return (
        f"| {name} | {statistics.median(times):.2f} | {' | '.join(columns)} | {followed} of {len(traces)} | {shares} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=sorted(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--warm", type=int, default=40, help="steps before anything is timed")
    parser.add_argument("--python", action="store_true", help="the recorder in Python, too")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if LIBRARY.wait() is None:
        raise SystemExit(f"there is no native recorder: {LIBRARY.reason}")
    ways = ("first", "device first", "known", "device", *(["python"] if options.python else []))
    print(f"torch {torch.__version__}, one thread; times eager's, medians (least)")
    print(f"| program | eager ms | {' | '.join(ways)} | traces followed | operators |")
    print("|---" * (len(ways) + 4) + "|")
    for name in options.programs:
        print(measure(name, options), flush=True)


if __name__ == "__main__":
    main()

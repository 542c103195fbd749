"""Cold start: time to the first step, seconds until full speed, and step time while the compile workers are busy.

    python benchmarks/cold_start.py                        gpt and convnet on the CPU, and on CUDA if there is one
    python benchmarks/cold_start.py --models gpt_dropout --ways eager tier0 cold warm compile --threads 1 --nice 10

A training step is forward, cross-entropy, backward, AdamW and zero_grad; each way runs in a process of its own, which
imports and builds the model before the clock starts. Ways: eager; tier0 (lazy, nothing is ever compiled); cold (lazy,
empty cache folder); warm (lazy, the folder that cold has filled); busy (as cold, but the compile workers are stopped
for every second handful of steps); compile (torch.compile of the model, empty caches). Full speed is reached by ours
with the first step whose programs are all compiled, by torch.compile with the first step that takes at most twice its
final time.

Other load on the machine is told apart: the busy ratio compares steps of one process that take turns, with the workers
at work and stopped; the first step and the worst one are also given in processor time of the thread that runs them.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torchlazy.lazy.api import driver
from torchlazy.lazy.run.programs import KnownTrace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tiny_gpt import GPT, GPTConfig

WAYS = ("eager", "tier0", "cold", "warm", "busy", "compile")
STEPS_AFTER = 6
TURN = 5  # steps with the workers at work, then as many with the workers stopped; the first of each is left out
Build = Callable[[], tuple[nn.Module, Tensor, Tensor]]


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norms beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def build_gpt(dropout: float, layers: int = 4) -> Build:
    def build() -> tuple[nn.Module, Tensor, Tensor]:
        sizes = GPTConfig(layers=layers, dropout=dropout)
        codes = torch.randint(sizes.vocabulary, (16, sizes.block))
        return GPT(sizes), codes, torch.randint(sizes.vocabulary, codes.shape)

    return build


def build_convnet() -> tuple[nn.Module, Tensor, Tensor]:
    """Six residual blocks on 32 x 32 images."""
    widths = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    blocks = [Residual(*sizes) for sizes in widths]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return model, torch.randn(32, 3, 32, 32), torch.randint(10, (32,))


MODELS: dict[str, Build] = {
    "gpt": build_gpt(0.0),
    "gpt12": build_gpt(0.0, 12),
    "gpt48": build_gpt(0.0, 48),
    "gpt_dropout": build_gpt(0.1),
    "convnet": build_convnet,
}


class Turns:
    """Stops the compile workers, and lets them go on, in turns of a few steps."""

    def __init__(self) -> None:
        self._steps, self._stopped = 0, False
        self.seconds: dict[bool, list[float]] = {True: [], False: []}  # by whether the workers were stopped

    def after(self, seconds: float, is_slow: bool) -> None:
        """A step is over that took so long."""
        pool = driver.tiers.pool
        workers = pool.process_ids() if is_slow else []
        if not workers and not self._stopped:
            return
        if self._steps:
            self.seconds[self._stopped].append(seconds)
        self._steps += 1
        if self._steps == TURN or not workers:
            self._steps, self._stopped = 0, not self._stopped and bool(workers)
            for worker in pool.process_ids():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker, signal.SIGSTOP if self._stopped else signal.SIGCONT)


def run_child(model_name: str, way: str, device: str, limit: float) -> dict[str, float]:
    """The figures of one way, in this process."""
    torch.manual_seed(0)
    model, inputs, targets = MODELS[model_name]()
    place = device if way in ("eager", "compile") else "lazy"
    if place == "lazy":
        torchlazy.set_target(device)
    model, inputs, targets = model.to(place), inputs.to(place), targets.to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = torch.compile(model) if way == "compile" else model
    outcomes: list[str] = []
    if way == "tier0":
        driver.tiers.look_up = lambda trace, device, frame: (KnownTrace(), "tier 0")  # type: ignore[method-assign]

    def step() -> None:
        output = forward(inputs)
        logits = output[0].flatten(0, 1) if isinstance(output, tuple) else output
        loss = F.cross_entropy(logits, targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    torchlazy.sync()
    start = time.perf_counter()
    ends: list[float] = []
    seconds: list[float] = []
    processor: list[float] = []
    turns = Turns()
    slow: list[bool] = []
    while time.perf_counter() - start < limit:
        outcomes.clear()
        began, worked = time.perf_counter(), time.thread_time()
        step()
        processor.append(time.thread_time() - worked)
        ends.append(time.perf_counter() - start)
        seconds.append(time.perf_counter() - began)
        if len(seconds) == 1:  # not before: what the first cut imports belongs to the first step
            driver.listeners.append(lambda event: outcomes.append(event.outcome))
            slow.append(way not in ("eager", "compile") and torchlazy.metrics()["misses"] > 0)
            continue
        slow.append(any(outcome.startswith("tier 0") for outcome in outcomes))
        if way == "busy":
            turns.after(seconds[-1], slow[-1])
        if len(slow) > STEPS_AFTER + 2 and (way == "tier0" or not any(slow[-STEPS_AFTER:])):
            break
    final = statistics.median(seconds[-STEPS_AFTER:])
    if way == "compile":
        slow = [taken > 2 * final for taken in seconds]
    reached = max((number + 1 for number, is_slow in enumerate(slow) if is_slow), default=0)
    busy, alone = (statistics.median(turns.seconds[kind] or [float("nan")]) for kind in (False, True))
    waiting = [taken for taken, is_slow in zip(processor[2:], slow[2:], strict=True) if is_slow]
    usual = statistics.median(waiting or processor[2:])
    if "--steps" in sys.argv:
        for number, (wall, own, is_slow) in enumerate(zip(seconds, processor, slow, strict=True), 1):
            print(f"{number:5} {1e3 * wall:8.1f} {1e3 * own:8.1f} {'tier 0' if is_slow else ''}", file=sys.stderr)
    return {
        "first": seconds[0],
        "first processor": processor[0],
        "second": seconds[1],
        "full": ends[reached] if reached < len(ends) else float("nan"),
        "busy": busy,
        "alone": alone,
        "worst processor": max(processor[1 : reached + 2]) / usual if way in ("cold", "warm", "busy") else float("nan"),
        "final": final,
        "compiles": torchlazy.metrics()["compiles"],
        "compile seconds": torchlazy.metrics()["compile_seconds"],
    }


def measure(model: str, way: str, device: str, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """One way in a fresh process; caches of all kinds are in `folder`."""
    place = os.path.join(folder, "lazy" if way in ("cold", "warm", "tier0") else way)
    environment = os.environ | {
        "TORCHLAZY_CACHE_DIR": place if way != "tier0" else os.path.join(folder, "unused"),
        "TRITON_CACHE_DIR": os.path.join(place, "triton-cache"),
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(place, "inductor"),
        "TORCHLAZY_WORKER_NICE": str(options.nice),
        "TORCHLAZY_TIERS": "on",
        "TORCHLAZY_STORE": "on",
        "OMP_NUM_THREADS": str(options.threads),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "--child", model, way, device, str(options.limit)]
    done = subprocess.run([*command, *options.steps], env=environment, capture_output=True, text=True)
    if options.steps:
        print(f"{model} {way}: steps, milliseconds, and those of the main thread's processor time\n{done.stderr}")
    if done.returncode:
        print(f"{model} {way}: exit status {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def print_table(model: str, device: str, options: argparse.Namespace) -> None:
    """One model on one device, all ways in turns, medians of `--repeat` fresh processes each."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory(prefix="torchlazy-cold-start-") as folder:
            for way in options.ways:
                found = measure(model, way, device, folder, options)
                if found:
                    found["busy"] /= found["alone"]
                    runs[way].append(found)
    eager = {name: _median(runs.get("eager", []), name) for name in ("first", "first processor")}
    print(
        f"\n{model} on {device}: seconds, medians of {options.repeat}. Ratios: first step to eager's first, in seconds "
        "and in processor seconds of the main thread; worst step until full speed to the usual one at tier 0, in "
        "processor seconds; steps with the workers at work to steps with the workers stopped"
    )
    print("way         first  ratio  processor   second  full speed  worst  busy      step  compiles  seconds")
    for way, found in runs.items():
        if not found:
            print(f"{way:8} failed")
            continue
        row = {name: _median(found, name) for name in found[0]}
        ratios = [row[name] / eager[name] for name in eager]
        others = [f"{row[name]:6.2f}" if row[name] == row[name] else f"{'':6}" for name in ("worst processor", "busy")]
        print(
            f"{way:8} {row['first']:8.3f} {ratios[0]:6.2f} {ratios[1]:10.2f} {row['second']:8.3f} {row['full']:11.3f} "
            f"{others[0]} {others[1]} {row['final']:8.4f} {row['compiles']:9.0f} {row['compile seconds']:8.1f}",
            flush=True,
        )


def _median(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median([run[name] for run in runs] or [float("nan")])


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        model, way, device, limit = sys.argv[2:6]
        print(json.dumps(run_child(model, way, device, float(limit))))
        return
    parser = argparse.ArgumentParser(description="Cold start of eager, torchlazy and torch.compile.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["gpt", "convnet"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--devices", nargs="+", default=["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--nice", type=int, default=7, help="of the compile workers")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one run")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--steps", action="store_const", const=["--steps"], default=[], help="print every step")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.threads} threads, load average {os.getloadavg()[0]:.1f}")
    for package in ("prims", "runtime", "inductor", "autograd", "lazy"):  # as an installer does
        compileall.compile_dir(Path(torchlazy.__file__).parent / package, quiet=2)
    for device in options.devices:
        for model in options.models:
            print_table(model, device, options)


if __name__ == "__main__":
    main()

"""Eager, torch.compile and torchlazy side by side: milliseconds a step, cold start, first loss.

python benchmarks/train_table.py                              the GPT example at full size on CUDA, else at demo size
python benchmarks/train_table.py --models resnet50 bert gpt2 vit
python benchmarks/train_table.py --job infer --ways eager lazy

A training step is forward, cross-entropy in float32, backward, AdamW (foreach) and zero_grad; on CUDA under bfloat16
autocast. All ways of one model live in one process and take turns, so that a slow minute of the machine falls on all of
them; with `--apart` each has a process of its own, as programs of users have, and shares neither caches nor memory with
another way. Every model has processes of its own with a time limit, so that one failure does not end the run. Cold
start is the time of the first steps up to the steady state. Reported is the median over turns; with CUDA the clock is a
pair of events around a turn.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import torch
import torchlazy
from models import DEFAULT_JOBS, JOBS, Job
from side_by_side import MODULE_MODES, OUR_MODES, Placement, Way

MARK = "RESULT "
WAYS: tuple[Way, ...] = ("eager", "compile", "compile_graph", "lazy", "lazy_compile", "lazy_graph")
SETTLING = 70
COLUMNS = (
    "model (batch)",
    "way",
    "ms a step",
    "against eager",
    "cold start",
    "first loss",
    "peak GiB",
    "kernels a step",
)


@dataclass
class Measured:
    """One way of running one model. `error` is the last line of what went wrong, and empty if nothing did."""

    way: str
    cold_seconds: float = 0.0
    first_loss: float = 0.0
    turns: list[float] = field(default_factory=list)  # milliseconds a step
    peak_gib: float | None = None
    kernels_a_step: float | None = None
    error: str = ""

    @property
    def milliseconds(self) -> float | None:
        return statistics.median(self.turns) if self.turns else None


def make_step(job: Job, placement: Placement, options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """The step function of one way: it returns the loss, or for inference the largest logit."""
    torch.manual_seed(0)
    model = job.build()
    arguments, targets = job.inputs(options.batch or job.batch)
    model.to(placement.device).train(options.job == "train")
    arguments, targets = tuple(a.to(placement.device) for a in arguments), targets.to(placement.device)
    forward = placement.prepare(model)
    torch.manual_seed(1)
    if options.job == "infer":

        def infer() -> torch.Tensor:
            with torch.no_grad(), placement.autocast(options.bf16):
                return job.logits(forward(*arguments)).amax()

        return placement.prepare_step(infer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def train() -> torch.Tensor:
        with placement.autocast(options.bf16):
            loss = job.loss(forward(*arguments), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return placement.prepare_step(train)


def run_turn(step: Callable[[], torch.Tensor], placement: Placement, steps: int, reads: bool) -> float:
    """Milliseconds a step over one turn; `reads`: the loss of each is read."""
    placement.wait()
    with_events = placement.target.startswith("cuda")
    if with_events:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
    started = time.perf_counter()
    for _ in range(steps):
        with placement.around_step():
            value = step()
        if reads:
            float(value)
    if placement.is_lazy:
        torchlazy.flush()
    if not with_events:
        placement.wait()
        return 1e3 * (time.perf_counter() - started) / steps
    last.record()
    placement.wait()
    return first.elapsed_time(last) / steps


def warm_up(
    step: Callable[[], torch.Tensor], placement: Placement, steps: int, measured: Measured, reads: bool
) -> None:
    """The first steps, compilation included, but for that of torchlazy's own C++, which comes once for a version."""
    if placement.way == "lazy_mode":
        with torchlazy.lazy_mode():
            pass
        torchlazy.wait_for_compile()
    started = time.perf_counter()
    for number in range(steps):
        with placement.around_step():
            value = step()
        if number == 0:
            measured.first_loss = float(value)
    if placement.is_lazy:
        torchlazy.wait_for_compile()
        # The program's form for graphs, and its capture; in the mode after three runs whose memory is compared.
        more = {"lazy_graph": 2, "lazy_autotune": 2, "lazy_mode": 6, "lazy": 6}.get(placement.way, 0)
        for _ in range(more):
            with placement.around_step():
                step()
            torchlazy.wait_for_compile()
    placement.wait()
    measured.cold_seconds = time.perf_counter() - started
    for _ in range(20 if reads else 0):  # after which stages are launched ahead
        with placement.around_step():
            value = step()
        float(value)
    for _ in range(SETTLING if placement.way in (*OUR_MODES, *MODULE_MODES) else 0):
        step()  # audits are frequent in the first calls: after these the next one is far away


def without_programs(placement: Placement) -> dict[str, Any]:
    """What was not compiled, or not replayed as a graph, and why."""
    found = placement.metrics()
    return {name: found[name] for name in ("graph_replays", "launched_ahead", "fallbacks") if found.get(name)}


def measure(job: Job, options: argparse.Namespace) -> list[Measured]:
    """All ways of one model in this process: warm each up alone, then take turns."""
    results = [Measured(way) for way in options.ways]
    alive: list[tuple[Measured, Placement, Callable[[], torch.Tensor]]] = []
    on_cuda = options.target.startswith("cuda")
    for measured in results:
        placement = Placement(measured.way, options.target)  # type: ignore[arg-type]
        try:
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            step = make_step(job, placement, options)
            warm_up(step, placement, options.warmup, measured, options.reads_loss)
            if on_cuda:
                measured.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
            alive.append((measured, placement, step))
            if placement.way in OUR_MODES:
                print(f"{measured.way}: {step.report()}", file=sys.stderr)  # type: ignore[attr-defined]
            if placement.is_lazy:
                print(f"{measured.way}: {without_programs(placement)}", file=sys.stderr)
        except Exception as error:  # a way that fails leaves a line in the table, and the others their turn
            traceback.print_exc()
            measured.error = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:80] if str(error) else ''}"
        gc.collect()
    for turn in range(options.turns):
        for measured, placement, step in alive if turn % 2 == 0 else reversed(alive):
            before_kernels = placement.metrics().get("kernels", 0)
            measured.turns.append(run_turn(step, placement, options.steps, options.reads_loss))
            if placement.is_lazy:
                measured.kernels_a_step = (placement.metrics()["kernels"] - before_kernels) / options.steps
    return results


def run_model(name: str, options: argparse.Namespace) -> list[Measured]:
    """All ways of one model: in one process, or each in its own."""
    if not options.apart:
        return run_in_child(name, options, options.ways)
    return [measured for way in options.ways for measured in run_in_child(name, options, [way])]


def run_in_child(name: str, options: argparse.Namespace, ways: list[Way]) -> list[Measured]:
    """Measure some ways of one model in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--job", options.job, "--ways", *ways]
    command += ["--target", options.target, "--turns", str(options.turns), "--steps", str(options.steps)]
    command += ["--warmup", str(options.warmup), *(["--batch", str(options.batch)] if options.batch else [])]
    command += ["--reads-loss"] if options.reads_loss else []
    command += ["--bf16" if options.bf16 else "--no-bf16"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, check=False)
    except subprocess.TimeoutExpired:
        return [Measured(" ".join(ways), error=f"over the limit of {options.limit} s")]
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            print(done.stderr, file=sys.stderr, end="")
            return [Measured(**fields) for fields in json.loads(line[len(MARK) :])]
    print(done.stdout, done.stderr, file=sys.stderr)
    return [Measured(" ".join(ways), error=f"the process ended with {done.returncode}; see its output above")]


def table(rows: list[tuple[Job, list[Measured]]], options: argparse.Namespace) -> str:
    """Markdown, one line a model and way."""
    lines = [
        "| model (batch) | way | ms a step | against eager | cold start | first loss | peak GiB | kernels a step |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for job, results in rows:
        eager = next((m.milliseconds for m in results if m.way == "eager"), None)
        for m in results:
            head = f"| {job.name} ({options.batch or job.batch}) | {m.way} |"
            if m.error or m.milliseconds is None:
                lines.append(f"{head} {m.error} | | | | | |")
                continue
            ratio = f"{eager / m.milliseconds:.2f}x" if eager else "-"
            peak = "-" if m.peak_gib is None else f"{m.peak_gib:.2f}"
            kernels = "-" if m.kernels_a_step is None else f"{m.kernels_a_step:.0f}"
            lines.append(
                f"{head} {m.milliseconds:.2f} | {ratio} | {m.cold_seconds:.1f} s | {m.first_loss:.5f} | {peak} "
                f"| {kernels} |"
            )
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(JOBS), help=f"of these; all: {' '.join(DEFAULT_JOBS)}")
    parser.add_argument("--job", choices=("train", "infer"), default="train")
    parser.add_argument("--ways", nargs="+", choices=get_args(Way), default=list(WAYS))
    parser.add_argument("--target", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="autocast; default: on with CUDA")
    parser.add_argument("--reads-loss", action="store_true", help="the host reads the loss of each step")
    parser.add_argument("--batch", type=int, help="default: each model's own")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--warmup", type=int, default=5, help="first steps, counted as cold start")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one model")
    parser.add_argument("--apart", action="store_true", help="each way in a process of its own")
    parser.add_argument("--child", choices=sorted(JOBS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bf16 is None:
        options.bf16 = options.target.startswith("cuda")
    return options


def main() -> int:
    options = parse_options()
    if options.child:
        with contextlib.redirect_stdout(sys.stderr):
            results = measure(JOBS[options.child], options)
        print(MARK + json.dumps([asdict(result) for result in results]))
        return 0
    names = options.models or (["gpt_example"] if options.target.startswith("cuda") else ["gpt_demo"])
    on_cuda = options.target.startswith("cuda")
    device = torch.cuda.get_device_name() if on_cuda else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"torch {torch.__version__}, {device}, {options.job}, {'bf16 autocast' if options.bf16 else 'float32'}, "
        f"median of {options.turns} turns of {options.steps} steps\n"
    )
    rows = []
    for name in names:
        print(f"{name}: {JOBS[name].about}", file=sys.stderr, flush=True)
        rows.append((JOBS[name], run_model(name, options)))
    print(table(rows, options))
    return 0 if all(not m.error for _, results in rows for m in results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Peak memory against time under memory budgets: a Pareto table for GPT-2, a Llama of 16 layers and ResNet-50.

python benchmarks/memory_budget.py                                   everything: some minutes on an H200
python benchmarks/memory_budget.py --models gpt2 --budgets none 0.5  a part of it
python benchmarks/memory_budget.py --models gpt_demo --target cpu    the planned peaks, where there is no GPU

Rows are eager, torch.compile, torch.compile with its own `activation_memory_budget`, and torchlazy.compile of the whole
step with `torchlazy.config.memory_budget` ("none" is the default: what costs no time). A step is forward, cross-entropy
in float32, backward, AdamW (foreach) and zero_grad, on CUDA under bfloat16 autocast.

Every row is a process of its own. All warm up side by side, because compiling keeps the CPU busy and not the GPU; then
one after the other is measured alone. Peak is `torch.cuda.max_memory_allocated` over the measured steps (beside it that
of the median turn: an audited call of torchlazy.compile may hold more), on the CPU the planned peak of the largest
program, which knows nothing of the other ways; time is the median over turns.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchlazy
from models import JOBS
from side_by_side import Placement, Way

MODELS = ("gpt2", "llama", "resnet50")
BUDGETS = ("none", "1.0", "0.75", "0.5", "0.25", "0.0")
PEER_BUDGETS = ("0.75", "0.5", "0.25", "0.0")
MARK = "RESULT "
MIB = 1 << 20
READ = ", loss read"  # before the backward: a cut stands between the halves


def rows_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The rows of one model: (way, budget)."""
    with_peers = options.target.startswith("cuda") and not options.read_loss
    rows = [("eager", ""), ("compile", "")] if with_peers else []
    if with_peers:
        rows += [("compile", budget) for budget in options.peer_budgets]
    ways = [options.way, options.way + READ] if options.read_loss else [options.way]
    return rows + [(way, budget) for budget in options.budgets for way in ways]


# --- one row, in a process of its own ---


def make_step(
    model_name: str, placement: Placement, options: argparse.Namespace, *, reads_loss: bool
) -> Callable[[], Any]:
    """A training step."""
    job = JOBS[model_name]
    torch.manual_seed(0)
    model = job.build()
    arguments, targets = job.inputs(options.batch or job.batch)
    model.to(placement.device).train()
    arguments, targets = tuple(a.to(placement.device) for a in arguments), targets.to(placement.device)
    forward = placement.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def train() -> torch.Tensor:
        with placement.autocast(placement.target.startswith("cuda")):
            loss = job.loss(forward(*arguments), targets)
        if reads_loss:
            loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return placement.prepare_step(train)


def apply_budget(way: str, budget: str) -> None:
    """Set the budget of this process's way."""
    if not budget:
        return
    if way == "compile":
        import torch._functorch.config as peer

        peer.activation_memory_budget = float(budget)
    else:
        torchlazy.config.memory_budget = None if budget == "none" else budget


def child(options: argparse.Namespace) -> None:
    """Warm up, say so, wait for the turn, measure, print one line of JSON."""
    model_name, way, budget = options.row
    found: dict[str, Any] = {"model": model_name, "way": way, "budget": budget}
    try:
        way = way.removesuffix(READ)
        apply_budget(way, budget)
        placement = Placement(way, options.target)  # type: ignore[arg-type]
        step = make_step(model_name, placement, options, reads_loss=found["way"] != way)
        started = time.perf_counter()
        first = None
        for _ in range(4):
            value = step()
            first = float(value) if first is None else first
        if placement.is_lazy:
            torchlazy.wait_for_compile()
        for _ in range(4):
            step()
        if placement.is_lazy:
            torchlazy.wait_for_compile()
        placement.wait()
        found |= {"cold_seconds": time.perf_counter() - started, "first_loss": first}
        print("READY", flush=True)
        sys.stdin.readline()
        found |= measured(step, placement, options)
    except Exception as error:
        traceback.print_exc()
        print("READY", flush=True)
        found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    print(MARK + json.dumps(found), flush=True)


def measured(step: Callable[[], Any], placement: Placement, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step and the peak in MiB over the measured steps."""
    on_cuda = placement.target.startswith("cuda")
    for _ in range(options.settling):
        step()
    placement.wait()
    gc.collect()
    turns, peaks = [], []
    for _ in range(options.turns):
        placement.wait()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for _ in range(options.steps):
            step()
        if placement.is_lazy:
            torchlazy.flush()
        placement.wait()
        turns.append(1e3 * (time.perf_counter() - begin) / options.steps)
        peaks.append(torch.cuda.max_memory_allocated() / MIB if on_cuda else planned_peak())
    return {
        "milliseconds": statistics.median(turns),
        "peak_mib": max(peaks),
        "usual_mib": statistics.median(peaks),
        "fallbacks": dict(torchlazy.metrics()["fallbacks"]) if placement.is_lazy else {},
    }


def planned_peak() -> float:
    """MiB that the largest program of this process takes for itself, by its memory plan."""
    from torchlazy.lazy.api import driver
    from torchlazy.runtime.program.memory_plan import plan_report

    programs = [known.compiled.program for known in driver.tiers._known.values() if known.compiled]
    return max((plan_report(program.steps).peak_bytes for program in programs), default=0) / MIB


# --- all rows ---


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start every row's process, wait until all are warm, measure them one by one."""
    base = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    waiting = [(model, way, budget) for model in options.models for way, budget in rows_of(options)]
    results: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.limit
    for start in range(0, len(waiting), options.together):
        batch = waiting[start : start + options.together]
        processes = [
            subprocess.Popen([*base, "--row", *row], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            for row in batch
        ]
        for row, process in zip(batch, processes, strict=True):
            _until(process, "READY", deadline)
            print(f"warm: {' '.join(row)}", file=sys.stderr, flush=True)
        for row, process in zip(batch, processes, strict=True):
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            line = _until(process, MARK, deadline)
            failed = dict(zip(("model", "way", "budget"), row, strict=True)) | {"error": "no result"}
            results.append(json.loads(line.removeprefix(MARK)) if line else failed)
            print(json.dumps(results[-1]), flush=True)
            process.terminate()
            process.wait()
    return results


def _until(process: subprocess.Popen[str], mark: str, deadline: float) -> str:
    """The next line of the process that begins with `mark`; empty when it ends, or when the time is up."""
    assert process.stdout is not None
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        if not line or line.startswith(mark):
            return line.strip()
    return ""


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table: for each model the rows in their order."""
    lines = [
        "| model | way | budget | peak MiB | of most turns | ms a step | peak / torch.compile's | time / "
        "torch.compile's | note |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    peer = {r["model"]: r for r in results if r["way"] == "compile" and not r["budget"] and "peak_mib" in r}
    for r in results:
        if "error" in r:
            lines.append(f"| {r['model']} | {r['way']} | {r['budget']} | | | | | | {r['error']} |")
            continue
        other = peer.get(r["model"])
        against = [f"{r[key] / other[key]:.2f}" if other and other[key] else "" for key in ("peak_mib", "milliseconds")]
        cells = (
            r["model"], r["way"], r["budget"], f"{r['peak_mib']:.0f}", f"{r['usual_mib']:.0f}",
            f"{r['milliseconds']:.1f}", *against, f"cold start {r['cold_seconds']:.0f} s",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=sorted(JOBS))
    parser.add_argument("--budgets", nargs="*", default=BUDGETS, help="torchlazy's; none, shares, or sizes like 2GiB")
    parser.add_argument("--peer-budgets", nargs="*", default=PEER_BUDGETS, help="torch.compile's own")
    ways: tuple[Way, ...] = ("lazy", "lazy_compile", "lazy_graph")
    parser.add_argument("--way", default="lazy_compile", choices=ways, help="how torchlazy runs the step")
    parser.add_argument("--target", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--read-loss", action="store_true", help="each torchlazy row twice: also with loss.item()")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps a turn")
    parser.add_argument("--settling", type=int, default=20, help="steps before the clock starts: audits, allocator")
    parser.add_argument("--together", type=int, default=12, help="processes that warm up side by side")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for all")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.row:
        child(options)
        return 0
    results = run_all(options)
    print(table(results))
    return int(any("error" in r for r in results))


if __name__ == "__main__":
    raise SystemExit(main())

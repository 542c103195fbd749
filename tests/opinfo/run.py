"""`python -m tests.opinfo.run --reading b --dtype float32 --ops add,mul --shard 1/4`: readings in isolated processes.

Invariant: an operator that crashes or overruns its time costs its own result only; what was run before is on disk in
.pytest_cache/opinfo/, one JSON line an operator, and `python -m tests.opinfo.table` prints them as a page.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.opinfo.readings import READINGS, has_reading
from tests.opinfo.samples import database

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / ".pytest_cache" / "opinfo"
_TORCH = torch.__version__.partition("+")[0]


def main() -> int:
    """Run what the command line asks for; the exit status says whether anything failed."""
    options = _options()
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for dtype in options.dtype.split(","):
        for reading in options.reading.split(","):
            failed += _run(reading, dtype, options)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reading", default="a,b,c,d,e", help="those of tests/opinfo/readings.py")
    parser.add_argument("--dtype", default="float32", help="names separated by commas")
    parser.add_argument("--ops", default="", help="names separated by commas; default: all")
    parser.add_argument("--shard", default="1/1", help="k/n: every n-th operator, beginning with the k-th")
    parser.add_argument("--samples", type=int, default=6, help="samples an operator, 0 for all of them")
    parser.add_argument("--through", default=None, help="another engine: prims, loops or compiler")
    parser.add_argument("--precision", default="fused", choices=("fused", "eager"), help="config.precision")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one operator")
    parser.add_argument("--commit", default=_commit(), help="what is run: the page tells it")
    parser.add_argument("--redo-failures", action="store_true", help="only operators whose last result is a failure")
    parser.add_argument("--continue", dest="resume", action="store_true", help="leave out operators that have a result")
    return parser.parse_args()


def _commit() -> str:
    """The commit that is checked out, with a + where files differ from it; "" outside of a repository."""
    told = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() if told.returncode == 0 else ""


def result_file(reading: str, dtype: str, through: str | None, precision: str) -> Path:
    """Where results of a reading are kept; another engine or precision has a file of its own."""
    engine = through or READINGS[reading].engine
    suffix = "" if engine == READINGS[reading].engine else f"-{engine}"
    suffix += "" if precision == "fused" else f"-{precision}"
    return RESULTS / f"{reading}-{dtype}{suffix}.jsonl"


@dataclass(frozen=True)
class Build:
    """What a result is of: a commit, and the torch that it ran with; "" where a result does not tell."""

    commit: str
    torch: str


def results_of(path: Path, build: Build | None = None) -> dict[str, dict[str, Any]]:
    """The last result of each operator, or the last that one build gave."""
    return {line["op"]: line for line in _lines_of(path) if build is None or _build(line) == build}


def builds_of(path: Path) -> list[Build]:
    """The builds that gave results, the last first."""
    return list(dict.fromkeys(map(_build, reversed(_lines_of(path)))))


def _build(line: dict[str, Any]) -> Build:
    return Build(line.get("commit", ""), line.get("torch", ""))


def _lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def _run(reading: str, dtype: str, options: argparse.Namespace) -> int:
    entries = database()
    wanted = set(options.ops.split(",")) if options.ops else None
    unknown = (wanted or set()) - entries.keys()
    if unknown:
        raise SystemExit(f"no such operators: {sorted(unknown)}; names are those of op_db, a variant after a dot")
    path = result_file(reading, dtype, options.through, options.precision)
    known = results_of(path)
    names = [
        name
        for name, op in entries.items()
        if (wanted is None or name in wanted) and has_reading(op, reading, getattr(torch, dtype))
        if not options.redo_failures or (name in known and known[name]["failures"])
        if not options.resume or name not in known
    ]
    shard, shards = map(int, options.shard.split("/"))
    names = names[shard - 1 :: shards]
    totals: Counter[str] = Counter()
    with path.open("a") as file:
        for line in _results(names, reading, dtype, options):
            file.write(json.dumps({**line, "commit": options.commit, "torch": _TORCH}) + "\n")
            file.flush()
            totals["passed"] += not line["failures"]
            totals["failed"] += bool(line["failures"])
            for sample, kind, text in line["failures"][:2]:
                print(f"{line['op']} #{sample} {kind}: {text}", flush=True)
    print(f"reading {reading} {dtype}: {totals['passed']} operators passed, {totals['failed']} failed", flush=True)
    return totals["failed"]


def _results(names: list[str], reading: str, dtype: str, options: argparse.Namespace) -> Any:
    left = list(names)
    while left:
        job = {
            "ops": left, "reading": reading, "dtype": dtype, "limit": options.samples, "through": options.through,
            "precision": options.precision,
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.opinfo.worker", json.dumps(job)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        current, died, lost = None, "", False
        for line in _lines(process, options.timeout):
            if line is None:
                died = f"no result after {options.timeout:.0f} s"
                break
            if "lost" in line:
                lost = True
                break
            if "start" in line:
                current = line["start"]
                continue
            left.remove(line["op"])
            current = None
            yield line
        process.kill()
        stderr = process.stderr.read() if process.stderr else ""
        code = process.wait()
        if current is None and left and not lost:
            raise SystemExit(f"the worker ended ({code}) between operators:\n{stderr[-2000:]}")
        if current is not None:
            left.remove(current)
            cause = died or f"the process died ({code}): {' '.join(stderr[-500:].split())}"
            yield {
                "op": current, "reading": reading, "dtype": dtype, "passed": 0, "refused": 0,
                "failures": [[-1, "timeout" if died else "crash", cause]], "seconds": 0,
            }  # fmt: skip


def _lines(process: subprocess.Popen[str], timeout: float) -> Any:
    """The worker's JSON lines; None when the next one takes too long."""
    found: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("@"):
                found.put(json.loads(text[1:]))
        found.put(StopIteration)

    threading.Thread(target=read, daemon=True).start()
    first = time.monotonic() + 60
    while True:
        try:
            line = found.get(timeout=timeout + max(0.0, first - time.monotonic()))
        except queue.Empty:
            yield None
            return
        if line is StopIteration:
            return
        yield line


if __name__ == "__main__":
    sys.exit(main())

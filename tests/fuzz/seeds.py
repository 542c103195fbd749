"""Runs seeds in worker processes, and gathers what they found.

Invariant: a worker that dies or hangs is a find of the seed that it was at; another one goes on behind that seed.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_SILENT = 600.0  # seconds after which a worker hangs


@dataclass
class Result:
    """How many seeds ran, and the finds: (seed, what is wrong)."""

    ran: int = 0
    found: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def news(self) -> list[tuple[int, dict[str, Any]]]:
        return [(seed, one) for seed, one in self.found if not one.get("known")]


class _Worker:
    """A process that runs each `step`-th seed from `first` on."""

    def __init__(self, first: int, last: int, step: int, arguments: list[str]) -> None:
        self.at, self.last, self.step, self.arguments = first, last, step, arguments
        self.begin()

    def begin(self) -> None:
        environment = {
            "OMP_NUM_THREADS": "1", "TORCHLAZY_STORE": "off", **os.environ, "PYTHONHASHSEED": "0",
        }  # fmt: skip
        self.heard = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", str(self.at), str(self.last), str(self.step), *self.arguments],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=_ROOT, env=environment,
        )  # fmt: skip
        self.rest = b""

    def lines(self) -> list[dict[str, Any]]:
        """What it said."""
        assert self.process.stdout is not None
        self.heard = time.monotonic()
        *whole, self.rest = (self.rest + os.read(self.process.stdout.fileno(), 1 << 16)).split(b"\n")
        return [json.loads(line) for line in whole if line.startswith(b"{")]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def run_seeds(
    first: int, last: int, ways: tuple[str, ...], jobs: int = 2, shrinks: bool = True, seconds: float = float("inf"),
    tell: Callable[[int, dict[str, Any]], None] = lambda seed, found: None,
) -> Result:  # fmt: skip
    """Run the seeds, for so many seconds at most."""
    arguments, result, end = [",".join(ways), "shrink" if shrinks else ""], Result(), time.monotonic() + seconds
    workers = [_Worker(first + i, last, jobs, arguments) for i in range(min(jobs, last - first))]
    try:
        while workers and time.monotonic() < end:
            with selectors.DefaultSelector() as selector:
                for worker in workers:
                    assert worker.process.stdout is not None
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
                ready = [key.data for key, _ in selector.select(1.0)]
            for worker in list(workers):
                said = worker.lines() if worker in ready else []
                for line in said:
                    worker.at = line["seed"] if line.get("begins") else line["seed"] + jobs
                    result.ran += not line.get("begins")
                    for one in line.get("found", ()):
                        result.found.append((line["seed"], one))
                        tell(line["seed"], one)
                hangs = time.monotonic() - worker.heard > _SILENT
                if hangs or (not said and worker.process.poll() is not None):
                    worker.end()
                    if worker.at < last:
                        text = "hangs" if hangs else f"ended with {worker.process.returncode}"
                        one = {"way": "any", "kind": "crash", "text": text, "program": f"# seed {worker.at}"}
                        result.ran += 1
                        result.found.append((worker.at, one))
                        tell(worker.at, one)
                        worker.at += jobs
                    if worker.at < last:
                        worker.begin()
                    else:
                        workers.remove(worker)
    finally:
        for worker in workers:
            worker.end()
    return result

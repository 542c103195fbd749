"""Runs a list of operators in this process and prints one JSON line before and one after each.

Invariant: the last line before a crash names the operator that crashed; `run` starts a new worker behind it.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torchlazy

from tests.opinfo.readings import READINGS, run_reading
from tests.opinfo.samples import database


def main() -> None:
    """Arguments: one JSON object with ops, reading, dtype, limit, through, precision."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job.get("threads", 1))
    torchlazy.config.precision = job["precision"]
    entries = database()
    for name in job["ops"]:
        _say({"start": name})
        begin = time.perf_counter()
        with torch.backends.cudnn.flags(allow_tf32=False):  # which convolutions have it, cuDNN chooses by size
            report = run_reading(
                entries[name], job["reading"], getattr(torch, job["dtype"]), limit=job["limit"], through=job["through"]
            )
        _say({**report.as_dict(), "seconds": round(time.perf_counter() - begin, 2)})
        if READINGS[job["reading"]].device == "cuda" and _is_gpu_lost():
            _say({"lost": name})  # nothing runs in this process any more: the next operators need another
            return


def _is_gpu_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _say(line: dict[str, object]) -> None:
    print("@" + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

"""Main function of a compile worker: a child process that compiles the traces which its parent sends.

run/workers.py starts it and talks to it: one JSON line a job, one JSON line an answer.

Invariant: whatever goes wrong with a job is an answer; nothing but answers goes to the parent; and the process, with
every compiler that it started, ends when its parent does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

import torch
from torchlazy.lazy.ops import int8_linear  # noqa: F401  (programs may call it)
from torchlazy.lazy.plan.pipeline import CompileOptions, compile_ahead
from torchlazy.lazy.run.plan_dynamic import compile_template_ahead
from torchlazy.lazy.trace import serialize
from torchlazy.runtime.program.store import ProgramStore, to_text
from torchlazy.runtime.toolchains.compiler_run import stay_in_this_group
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, open_cache
from torchlazy.runtime.toolchains.target_facts import package_fingerprint, versions
from torchlazy.runtime.toolchains.toolchain_triton import is_interpreting
from torchlazy.runtime.toolchains.triton_crew import crew_ahead

_caches: dict[str, KernelCache] = {}
_stores: dict[str, ProgramStore] = {}


def main(parent: int) -> None:
    """Answer jobs until the parent closes the pipe; `parent` is its process id."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what a compiler or a library prints must not mix with the answers
    torch.set_num_threads(1)
    stay_in_this_group()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    gc.freeze()  # modules live as long as the process: no collection need traverse them again
    gc.disable()  # and the answer need not wait for one: a large job's graphs take a second to traverse
    with contextlib.suppress(BrokenPipeError):
        _send(answers, {"ready": versions()})
        for line in sys.stdin:
            _send(answers, answer_job(json.loads(line)))
            gc.collect()
    if os.getppid() != parent:
        _end()


def _send(answers: int, answer: dict[str, Any]) -> None:
    data = memoryview(json.dumps(answer).encode() + b"\n")
    while data:
        data = data[os.write(answers, data) :]


def answer_job(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one trace. "unavailable" is an answer too: this process lacks what the parent has, such as an operator
    of a library that the user's program registered."""
    start = time.perf_counter()
    try:
        traces = [serialize.from_json(text) for text in job.get("traces", ()) or (job["trace"],)]
    except Exception as error:
        return {"kind": "unavailable", "message": f"{type(error).__name__}: {error}"}
    try:
        torch.set_default_dtype(getattr(torch, job["default_dtype"]))  # integers become such floats
        cache = _cache(job["folder"])
        target = tuple(job["target"]) if job["target"] else None
        options = CompileOptions(job["language"], job["precision"], job["recompute"], job["scalars"])
        with crew_ahead(len(traces[0].entries)) if target and not is_interpreting() else contextlib.nullcontext():
            if "traces" in job:
                stored, timings = compile_template_ahead(traces, options, cache, target)  # type: ignore[arg-type]
            else:
                stored, timings = compile_ahead(traces[0], options, cache, target)  # type: ignore[arg-type]
        text = to_text(job["key"], stored)
        # A worker that starts after the package's files were edited makes programs, but not those that the key names.
        if job["store"] == package_fingerprint():
            _stores.setdefault(job["folder"], ProgramStore(cache.folder)).put_text(job["key"], text)
    except Exception as error:
        return {
            "kind": "refused",
            "error": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    return {"kind": "compiled", "program": text, "timings": timings, "seconds": time.perf_counter() - start}


def _cache(folder: str) -> KernelCache:
    if folder not in _caches:
        _caches[folder] = open_cache(folder)
    return _caches[folder]


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    _end()


def _end() -> None:
    """The parent was killed and cannot clean up: remove this worker's temporary folder, end with all compilers."""
    folder = tempfile.gettempdir()
    if os.path.basename(folder).startswith("torchlazy-worker-"):
        shutil.rmtree(folder, ignore_errors=True)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)

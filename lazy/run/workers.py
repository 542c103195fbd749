"""Compile workers: child processes that compile traces while the program goes on running.

Processes, because the compiler is Python and would hold this process's interpreter lock; fresh interpreters, because a
forked one would inherit threads and GPU state, and multiprocessing's spawn would import the user's main module.

Invariant: each submitted job gets an answer, whatever happens to its worker; workers end with this process, however it
ends; a forked child leaves its parent's workers alone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torchlazy.lazy.run.loading import Load
from torchlazy.runtime.native import code as native_code
from torchlazy.runtime.toolchains.background_priority import NICE, without_yielding
from torchlazy.runtime.toolchains.target_facts import versions
from torchlazy.runtime.toolchains.toolchain_cpp import available_cores

Kind = Literal["compiled", "refused", "crashed", "unavailable"]

MANY_CORES = 4  # on fewer, one thing at a time is done in the background
_SECONDS_FOR_HELPERS = 3.0
_IDLE_SECONDS = 60.0
_START_SECONDS = 120.0
_JOB_SECONDS = 900.0
_ATTEMPTS = 2
_BOOT = (
    "import json, os, sys\n"
    "hasattr(os, 'setpgid') and os.setpgid(0, 0)\n"
    "hasattr(os, 'nice') and os.nice(int(sys.argv[2]))\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "from torchlazy.lazy.run.worker_main import main\n"
    "main(int(sys.argv[3]))\n"
)


@dataclass(frozen=True)
class Answer:
    """The outcome of a job.

    "compiled": `program` is its text. "refused": the compiler raised, `error` is the class. "crashed": the worker died
    of it, twice. "unavailable": no worker can do it here, though this process might.
    """

    kind: Kind
    message: str = ""
    error: str = ""
    traceback: str = ""
    program: str = ""
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Job:
    """A request in progress. `answer` is set once it is there; if it is a program, `load` makes what `loaded` loads."""

    request: bytes
    load: Callable[[Answer], Any] | None = None
    loaded: Load | None = None
    answer: Answer | None = None


class CompilePool:
    """Up to `workers` processes, each served by a thread that mostly waits; both go after a minute without work."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or max(1, min(4, available_cores() // 4))
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._later: deque[Job] = deque()  # for when nothing else is waiting
        self._unfinished = 0
        self._threads = 0
        self._idle = 0
        self._starting = 0
        self._closed = False
        self._processes: list[_Worker] = []
        self._exit_registered = False

    def submit(
        self, request: dict[str, Any], is_urgent: bool = True, load: Callable[[Answer], Any] | None = None
    ) -> Job:
        """Hand a job over; returns at once. One that is not urgent comes after all that are. `load` is called with the
        answer that has a program, before this is shown."""
        request = {**request, "default_dtype": str(torch.get_default_dtype()).removeprefix("torch.")}
        job = Job(json.dumps(request).encode() + b"\n", load)
        with self._changed:
            if self._closed:  # the process ends
                job.answer = Answer("unavailable", "the workers were closed")
                return job
            (self._waiting if is_urgent else self._later).append(job)
            self._unfinished += 1
            if self._idle < len(self._waiting) + len(self._later) and self._threads < self.workers:
                self._start_thread()
            self._changed.notify_all()
        return job

    def start_ahead(self) -> None:
        """Start the first worker, which takes seconds, before there is a job. Does nothing where one has started."""
        with self._changed:
            if not self._threads and not self._closed:
                self._start_thread(is_early=True)

    def wait(self) -> None:
        """Return when every job has its answer."""
        with without_yielding(), self._changed:
            self._changed.wait_for(lambda: not self._unfinished)

    def wait_for(self, job: Job) -> Answer:
        """A job's answer, once it is there."""
        with self._changed:
            self._changed.wait_for(lambda: job.answer is not None)
        assert job.answer is not None
        return job.answer

    def process_ids(self) -> list[int]:
        """The workers that are alive."""
        with self._changed:
            return [worker.process.pid for worker in self._processes if worker.process.poll() is None]

    def close(self) -> None:
        """End the workers at once; jobs without an answer get "unavailable". Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._starting, timeout=10)
            workers = list(self._processes)
            while waiting := self._waiting or self._later:
                self._finish(waiting.popleft(), Answer("unavailable", "the workers were closed"))
            self._changed.notify_all()
        for worker in workers:
            worker.stop()

    def _start_thread(self, is_early: bool = False) -> None:
        if not self._exit_registered:
            self._exit_registered = True
            atexit.register(self.close)
        self._threads += 1
        try:
            name = "torchlazy compile worker"
            threading.Thread(target=self._serve, args=(is_early,), name=name, daemon=True).start()
        except RuntimeError as error:  # the interpreter is ending, or the system has no threads left
            self._threads -= 1
            while not self._threads and (waiting := self._waiting or self._later):
                self._finish(waiting.popleft(), Answer("unavailable", str(error)))

    def _finish(self, job: Job, answer: Answer) -> None:
        job.request, job.load = b"", None
        job.answer = answer
        self._unfinished -= 1
        self._changed.notify_all()

    def _serve(self, is_early: bool) -> None:
        worker: _Worker | None = None
        if is_early:
            with contextlib.suppress(Exception):  # tried again, and reported, with the first job
                worker = self._start_worker()
        while (job := self._next_job()) is not None:
            answer = Answer("unavailable", "no worker")
            for _ in range(_ATTEMPTS):
                try:
                    worker = worker or self._start_worker()
                    answer = worker.ask(job.request)
                    break
                except _Died as death:
                    answer = Answer("crashed" if worker else "unavailable", str(death))
                    self._drop(worker)
                    worker = None
                except Exception as error:  # no memory for a process, no such program, an unexpected pipe
                    answer = Answer("unavailable", f"{type(error).__name__}: {error}")
                    self._drop(worker)
                    worker = None
                    break
            if job.load is not None and answer.kind == "compiled":
                job.loaded = Load(partial(job.load, answer)).run()
            with self._changed:
                self._finish(job, answer)
        self._drop(worker)

    def _next_job(self) -> Job | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._later or self._closed, timeout=_IDLE_SECONDS)
            self._idle -= 1
            waiting = self._waiting or self._later
            if self._closed or not waiting:
                self._threads -= 1
                return None
            return waiting.popleft()

    def _start_worker(self) -> _Worker:
        if available_cores() < MANY_CORES:
            native_code.let_finish(_SECONDS_FOR_HELPERS)
        with self._changed:
            if self._closed:
                raise RuntimeError("the workers were closed")
            self._starting += 1
        worker: _Worker | None = None
        try:
            worker = _Worker()
        finally:
            with self._changed:
                self._starting -= 1
                if worker is not None:
                    self._processes.append(worker)
                self._changed.notify_all()
        try:
            worker.greet()
        except BaseException:
            self._drop(worker)
            raise
        return worker

    def _drop(self, worker: _Worker | None) -> None:
        if worker is None:
            return
        worker.stop()
        with self._changed:
            if worker in self._processes:
                self._processes.remove(worker)


class _Died(Exception):
    """A worker ended without an answer."""


class _Worker:
    """One child process and the two pipes to it."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="torchlazy-worker-")
        self._rest = b""
        self._stopping = threading.Lock()
        try:
            with open(os.path.join(self.folder, "stderr.txt"), "wb") as errors:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _BOOT, json.dumps([*map(str, sys.path)]), str(NICE), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    bufsize=0,  # a buffer would be written twice, by this process and by a forked child
                    env=_environment(self.folder),
                )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def greet(self) -> None:
        """Wait until the worker can work; raises RuntimeError if it is of another version than this process."""
        ready = json.loads(self._read_line(_START_SECONDS)).get("ready")
        if ready != versions():
            raise RuntimeError(f"it starts with the versions {ready}, this process runs {versions()}")

    def ask(self, request: bytes) -> Answer:
        """The answer to a request; _Died if there is none."""
        assert self.process.stdin is not None
        try:
            data = memoryview(request)
            while data:
                data = data[os.write(self.process.stdin.fileno(), data) :]
        except OSError as error:
            raise _Died(self._last_words()) from error
        return Answer(**json.loads(self._read_line(_JOB_SECONDS)))

    def stop(self) -> None:
        """End the worker and every compiler that it started, and remove what they left."""
        with self._stopping:
            self._kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _kill(self) -> None:
        if self.process.poll() is not None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:  # it does not lead a process group of its own yet
            self.process.kill()

    def _read_line(self, seconds: float) -> bytes:
        assert self.process.stdout is not None
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True
        timer.start()
        try:
            parts = [self._rest]
            while b"\n" not in parts[-1]:
                part = os.read(self.process.stdout.fileno(), 1 << 16)
                if not part:
                    raise _Died(self._last_words())
                parts.append(part)
        except (OSError, ValueError) as error:  # closed by `stop`
            raise _Died(self._last_words()) from error
        finally:
            timer.cancel()
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        try:
            with open(os.path.join(self.folder, "stderr.txt"), errors="replace") as file:
                words = file.read()[-1500:].strip()
        except OSError:
            words = ""
        return f"exit status {self.process.returncode}" + (f", {words}" if words else "")


def _environment(folder: str) -> dict[str, str]:
    """This process's environment without what makes the child print, dump, use a GPU or many threads."""
    dropped = ("TORCHLAZY_DUMP", "TORCHLAZY_DEBUG", "TORCHLAZY_TARGET")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": folder}

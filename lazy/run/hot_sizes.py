"""Specialized programs for hot sizes: where one size takes most runs of a dynamic program for a long time.

A run of a template counts; now and then the count is checked. A size that took most of the template's runs, for so
long that compiling pays even if its program were little faster, gets one: a compile worker compiles it after all other
work, a thread loads it, and the next run at that very size uses it. Other sizes stay with the template.

Invariant: a program is run for the one trace only that it was compiled from; no step waits for its compilation. There
are at most `MOST` of them; one more replaces the one that was run least since the last check. None is compiled unless
`config.tiers` is "on": otherwise what runs does not depend on time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchlazy.lazy.config import config
from torchlazy.lazy.report import metrics
from torchlazy.lazy.trace.trace import CutTrace

if TYPE_CHECKING:
    from torchlazy.lazy.plan.loaded import Compiled, CompileOptions

RUNS = 500
"""After so many runs of one size it is checked again."""

SHARE = 0.5
"""Of all runs of the template since the last check, so many must have been of the size."""

LEAST_SECONDS = 60.0
TIMES_COMPILING = 30.0
"""A size must have been in use for so long, and for so many times what its template took to compile. The gain is small:
a template took 0.92 of the step of a program of its own on two busy CPU cores, on an H200 0.98 of the step and
1.04 of its kernels (`benchmarks/dynamic.py`). At 4 % less and half of the runs a program pays after some 50 times what
it took to compile, which is half of what its template took."""

MOST = 8
_NEVER = 1 << 62


@dataclass(eq=False)
class Tally:
    """The runs of one template, at all sizes."""

    runs: int = 0
    compile_seconds: float = 0.0


@dataclass(eq=False)
class SizeCount:
    """The runs of a template at one size, and its specialized program, once there is one."""

    tally: Tally
    trace: CutTrace
    options: CompileOptions
    look: Callable[[SizeCount], None]
    own: Any = None  # an Executable
    runs: int = 0
    next_look: int = 0
    total_before: int = 0  # of the tally, at the last check
    runs_before: int = 0
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.forget_runs()

    def forget_runs(self) -> None:
        """Count from here on."""
        self.runs_before, self.total_before = self.runs, self.tally.runs
        self.next_look = self.runs + RUNS


class HotSizes:
    """The hot sizes of this process. `make` compiles and loads a trace's program, in a background thread."""

    def __init__(self, make: Callable[[CutTrace, CompileOptions], Compiled]) -> None:
        self._make = make
        self._served: list[SizeCount] = []
        self._threads: list[threading.Thread] = []
        self._changed = threading.Lock()

    def count(self, tally: Tally, trace: CutTrace, options: CompileOptions) -> SizeCount | None:
        """The count of a size that a template serves from now on; None where hot sizes are off."""
        if config.hot_sizes == "off":
            return None
        return SizeCount(tally, trace, options, self._look)

    def forget(self) -> None:
        """Drop all specialized programs: templates serve every size again."""
        with self._changed:
            for count in self._served:
                count.own = None
            self._served.clear()

    def drop_pending(self) -> None:
        """In a forked child, which has none of its parent's threads."""
        self._changed = threading.Lock()
        self._threads.clear()

    def wait(self) -> None:
        """Return when no program is being made."""
        for thread in list(self._threads):
            thread.join()

    def _look(self, count: SizeCount) -> None:
        """Called at a run now and then: make a specialized program for the size if it is hot."""
        runs, total = count.runs - count.runs_before, count.tally.runs - count.total_before
        count.forget_runs()
        if count.own is not None:
            return
        if config.tiers != "on" or config.hot_sizes == "off" or runs < SHARE * total:
            count.since = time.monotonic()
            return
        worth = max(LEAST_SECONDS, TIMES_COMPILING * count.tally.compile_seconds)
        if time.monotonic() - count.since < worth or self._threads:
            return
        thread = threading.Thread(target=self._serve, args=(count,), name="torchlazy hot size", daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, or the system has no threads left
            self._threads.remove(thread)
            count.next_look = _NEVER

    def _serve(self, count: SizeCount) -> None:
        start = time.perf_counter()
        try:
            made = self._make(count.trace, count.options)
        except Exception as error:  # the template serves on
            count.next_look = _NEVER
            metrics.fallbacks[f"no program of its own for a hot size: {type(error).__name__}: {str(error)[:200]}"] += 1
        else:
            with self._changed:
                if len(self._served) >= MOST:
                    least = min(self._served, key=lambda other: other.runs - other.runs_before)
                    self._served.remove(least)
                    least.own = None
                    least.since = time.monotonic()
                    metrics.hot_sizes_dropped += 1
                self._served.append(count)
                count.own = made.run
            metrics.hot_sizes += 1
            metrics.hot_seconds += time.perf_counter() - start
        finally:
            self._threads.clear()

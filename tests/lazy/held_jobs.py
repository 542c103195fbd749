"""A compile pool whose jobs begin when somebody waits for them.

Tests that leave `tiers` on give second sights to the background. By another test's time a worker would have come up,
compiled them for nobody, and had threads of this process load and link what it made.

Invariant: no job begins before `wait` or `wait_for`, and none after `drop`; else it is the pool that users have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torchlazy.lazy.run.workers import Answer, CompilePool, Job


class HeldJobs(CompilePool):
    """The pool of a test run."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[deque[Job], Job]] = []
        self._is_holding = False

    def submit(
        self, request: dict[str, Any], is_urgent: bool = True, load: Callable[[Answer], Any] | None = None
    ) -> Job:
        with self._changed:  # the pool's threads look once it is let go
            self._is_holding = True
            job = super().submit(request, is_urgent, load)
            self._is_holding = False
            queue = self._waiting if is_urgent else self._later
            queue.remove(job)
            self._held.append((queue, job))
        return job

    def start_ahead(self) -> None:
        """No worker before there is a job that somebody waits for."""

    def wait(self) -> None:
        self.begin()
        super().wait()

    def wait_for(self, job: Job) -> Answer:
        self.begin()
        return super().wait_for(job)

    def drop(self) -> None:
        """Answer what has not begun that nobody does it."""
        with self._changed:
            for _, job in self._held:
                self._finish(job, Answer("unavailable", "the test is over"))
            self._held.clear()

    def begin(self) -> None:
        """Hand what waits to the workers."""
        with self._changed:
            for queue, job in self._held:
                queue.append(job)
            for _ in range(self._threads, min(len(self._held), self.workers)):
                self._start_thread()
            self._held.clear()
            self._changed.notify_all()

    def _start_thread(self, is_early: bool = False) -> None:
        if not self._is_holding:
            super()._start_thread(is_early)

"""The program of a captured segment, held by the one who replays it: found once, then run without being looked up.

Invariant: results are those of a cut of the same trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torchlazy.lazy.call_template import Segment
from torchlazy.lazy.foreign_backend import compile_with


class SegmentDriver(Protocol):
    """What runs cut traces (lazy/driver.py)."""

    listeners: list[Any]
    last_compiled: Any  # the program that ran the last cut; None while tier 0 serves it

    def __call__(
        self, trace: Any, memory: list[torch.Tensor], scalars: list[Any], cause: str, frame: str
    ) -> list[torch.Tensor | BaseException]: ...

    def run_compiled(
        self, compiled: Any, trace: Any, memory: list[torch.Tensor], scalars: list[Any]
    ) -> list[torch.Tensor | BaseException]: ...


class ProgramHandle:
    """Runs a segment on memory."""

    def __init__(self, driver: SegmentDriver, segment: Segment, backend: Callable[..., Any] | None) -> None:
        self._driver = driver
        self._segment = segment
        self._compiled: Any = None
        self._foreign = None if backend is None else compile_with(backend, segment.trace)

    @property
    def compiled(self) -> Any:
        return self._compiled

    def run(self, memory: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor | BaseException]:
        segment, driver = self._segment, self._driver
        if self._foreign is not None:
            return self._foreign.run(memory, scalars)
        if self._compiled is not None and not driver.listeners:
            return driver.run_compiled(self._compiled, segment.trace, memory, scalars)
        values = driver(segment.trace, memory, scalars, segment.cause, segment.frame)
        self._compiled = driver.last_compiled
        return values

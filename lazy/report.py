"""Counters of what the recorder and the compiler did, behind `torchlazy.metrics()`."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Metrics:
    """Running counts since the last reset. `ops` is added up at each cut, so reading it costs the recorder nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.traces = 0
        self.ops = 0
        self.cuts: Counter[str] = Counter()
        self.hits = 0
        self.misses = 0
        self.compiles = 0
        self.compile_seconds = 0.0
        self.kernels = 0
        self.extern_calls: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.bytes = 0

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, a copy: nested counters become dicts."""
        return {
            "traces": self.traces,
            "ops": self.ops,
            "cuts": dict(self.cuts),
            "hits": self.hits,
            "misses": self.misses,
            "compiles": self.compiles,
            "compile_seconds": self.compile_seconds,
            "kernels": self.kernels,
            "extern_calls": dict(self.extern_calls),
            "fallbacks": dict(self.fallbacks),
            "bytes": self.bytes,
        }


metrics = Metrics()

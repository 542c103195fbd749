"""Settings, read from the environment once and changed through attributes: `torchlazy.config.precision = "eager"`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torchlazy.lazy.memory_budget import Budget, budget_of, parse_budget, recompute_text


class Config:
    """The settings that users change. Every name is checked when it is set.

    precision: "fused" keeps float32 inside fused half-precision chains; "eager" rounds where eager rounds.
    rng: "philox" draws random numbers inside compiled kernels from the seed of torch's CPU generator; "eager" runs
        random operators at once with the compute device's own generator, for eager's very bits.
    tiers: "on" runs a trace operator by operator until its program is there, which compile workers make from the second
        sight on; "foreground" makes the second sight wait for it, "off" the first.
    store: "on" keeps whole programs in TORCHLAZY_CACHE_DIR for the next process; "off" compiles what this process sees.
    max_trace_length: operators after which a trace is sent off although nobody asked for a value.
    recompute: "on" lets the backward half of a training step compute again what is free inside its kernels, for memory.
    memory_budget: None, or how much of a step's forward may be held for its backward, where the rest is computed again:
        a share from 0.0 (as little as can be) to 1.0 (all that eager holds), bytes, or a text like "8GiB". A budget is
        one of the values of `recompute`.
    dynamic: "on" makes one program for all sizes as soon as a trace differs from a known one in its numbers only (a
        program whose sizes never change is compiled for them); "off" compiles a program for each size. In the
        environment also 1 and 0.
    strict: raise what the compiler raises instead of running such a program operator by operator (for tests).
    debug: 0 to 5: prints cuts; timings; fusion decisions; source; every pass.
    """

    _choices: dict[str, Any] = {  # noqa: RUF012
        "precision": ("fused", "eager"),
        "rng": ("philox", "eager"),
        "tiers": ("on", "foreground", "off"),
        "store": ("on", "off"),
        "max_trace_length": int,
        "recompute": lambda value: value if value in ("on", "off") else recompute_text(parse_budget(value)),
        "dynamic": ("on", "off"),
        "strict": (False, True),
        "debug": range(6),
    }

    def __init__(self) -> None:
        self.precision = os.environ.get("TORCHLAZY_PRECISION", "fused")
        self.rng = os.environ.get("TORCHLAZY_RNG", "philox")
        self.tiers = os.environ.get("TORCHLAZY_TIERS", "on")
        self.store = os.environ.get("TORCHLAZY_STORE", "on")
        self.max_trace_length = int(os.environ.get("TORCHLAZY_MAX_TRACE_LENGTH", "20000"))
        self.recompute = os.environ.get("TORCHLAZY_MEMORY_BUDGET") or os.environ.get("TORCHLAZY_RECOMPUTE", "on")
        dynamic = os.environ.get("TORCHLAZY_DYNAMIC", "on")
        self.dynamic = {"0": "off", "1": "on"}.get(dynamic, dynamic)
        self.strict = os.environ.get("TORCHLAZY_STRICT", "0") == "1"
        self.debug = int(os.environ.get("TORCHLAZY_DEBUG", "0"))

    @property
    def memory_budget(self) -> Budget:
        return budget_of(self.recompute)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "memory_budget":
            name, value = "recompute", recompute_text(parse_budget(value))
        if name not in self._choices:
            names = ", ".join((*self._choices, "memory_budget"))
            raise AttributeError(f"torchlazy.config has no setting {name!r}; it has {names}")
        allowed = self._choices[name]
        if allowed is int:
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"torchlazy.config.{name} must be a positive int, not {value!r}")
        elif callable(allowed):
            value = allowed(value)
        elif value not in allowed:
            raise ValueError(f"torchlazy.config.{name} must be one of {list(allowed)}, not {value!r}")
        object.__setattr__(self, name, value)


config = Config()


@contextlib.contextmanager
def generalising(dynamic: str) -> Iterator[None]:
    """`config.dynamic` is this inside; empty: as it is."""
    before = config.dynamic
    if not dynamic or dynamic == before:
        yield
        return
    config.dynamic = dynamic
    try:
        yield
    finally:
        config.dynamic = before

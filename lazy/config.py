"""Settings, read from the environment once and changed through attributes: `torchlazy.config.precision = "eager"`.

`config.memory_budget` is how much of a training step's forward may be kept for its backward.

Invariant: every budget has one text, by which a program that was compiled under it is known.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

Budget = float | int | None

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-z]*)\s*", re.IGNORECASE)
_REMEDY = 'pass a share from 0.0 to 1.0, bytes as an int, a text like "8GiB", or None for what costs no time'


def parse_budget(value: object) -> Budget:
    """The budget that a user set: None, a share from 0.0 to 1.0, an int of bytes above 1, or either as text.

    The ints 0 and 1 are shares. Raises ValueError, or TypeError for what is no number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"torchlazy.config.memory_budget is {value!r}, of type {type(value).__name__}; {_REMEDY}")
    if isinstance(value, str):
        return _parse_text(value)
    if value in (0, 1) or isinstance(value, float):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"torchlazy.config.memory_budget is {value!r}, which is no share; {_REMEDY}")
        return float(value)
    if value < 0:
        raise ValueError(f"torchlazy.config.memory_budget is {value!r} bytes; {_REMEDY}")
    return value


def _parse_text(text: str) -> Budget:
    found = _SIZE.fullmatch(text)
    unit = found.group(2).lower() if found else ""
    if found is None or unit not in _UNITS:
        raise ValueError(f"torchlazy.config.memory_budget is {text!r}, which is no size; {_REMEDY}")
    if unit:
        return int(float(found.group(1)) * _UNITS[unit])
    number = found.group(1)
    return parse_budget(float(number) if "." in number else int(number))


def recompute_text(budget: Budget) -> str:
    """The value of `config.recompute` that stands for a budget: "on" for None."""
    return "on" if budget is None else repr(budget)


def budget_of(recompute: str) -> Budget:
    """The budget that `config.recompute` stands for; None for "on" and "off"."""
    return None if recompute in ("on", "off") else parse_budget(recompute)


_DEFAULTS = {
    "enabled": "on", "precision": "fused", "rng": "philox", "tiers": "on", "store": "on", "max_trace_length": "20000",
    "recompute": "on", "dynamic": "on", "hot_sizes": "on", "native": "on", "native_device": "on",
    "cuda_graphs": "auto", "audit": "spaced", "strict": "0", "debug": "0",
}  # fmt: skip


_VARIABLES = (
    *(f"TORCHLAZY_{name.upper()}" for name in _DEFAULTS), "TORCHLAZY_MEMORY_BUDGET", "TORCHLAZY_TARGET",
    "TORCHLAZY_CPU_BACKEND", "TORCHLAZY_CACHE_DIR", "TORCHLAZY_CACHE_SIZE", "TORCHLAZY_CPP_FLAGS", "TORCHLAZY_DUMP",
    "TORCHLAZY_WORKER_NICE", "TORCHLAZY_COMPILE_SECONDS",
)  # fmt: skip


def _warn_of_misspelt() -> None:
    """Warn of variables whose names look misspelt: they are not read."""
    for name in os.environ:
        is_unknown = name.startswith("TORCHLAZY_") and name not in _VARIABLES
        if is_unknown and (meant := difflib.get_close_matches(name, _VARIABLES, 1, 0.85)):
            text = f"the environment has {name}, which torchlazy does not read; did you mean {meant[0]}?"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _whole(text: str) -> Any:
    return int(text) if text.strip().lstrip("-").isdigit() else text


# How a variable's text becomes a value; text that is none stays text, which the setting then refuses.
_PARSED: dict[str, Any] = {
    "max_trace_length": _whole,
    "debug": _whole,
    "enabled": lambda text: {"0": "off", "1": "on"}.get(text, text),
    "dynamic": lambda text: {"0": "off", "1": "on"}.get(text, text),
    "hot_sizes": lambda text: {"0": "off", "1": "on"}.get(text, text),
    "strict": lambda text: {"0": False, "1": True}.get(text, text),
}


def _recompute(value: Any) -> str:
    """The setting's text: "on", "off", or that of a memory budget."""
    if isinstance(value, str) and value in ("on", "off"):
        return value
    try:
        return recompute_text(parse_budget(value))
    except (TypeError, ValueError):
        raise ValueError(
            f"torchlazy.config.recompute must be 'on' or 'off', not {value!r}; how much is kept for backward is set "
            "by torchlazy.config.memory_budget"
        ) from None


class Config:
    """The settings that users change. Every name is checked when it is set.

    enabled: "off" has compiled callables call what they were made of, and `lazy_mode` blocks record nothing: the
        program runs as in eager. Tensors on the lazy device are recorded all the same. In the environment also 1 and 0.
    precision: "fused" keeps float32 inside fused half-precision chains; "eager" rounds where eager rounds.
    rng: "philox" draws random numbers inside compiled kernels from the seed of torch's CPU generator; "eager" runs
        random operators at once with the compute device's own generator, for eager's very bits.
    tiers: "on" runs a trace operator by operator until its program is ready, which compile workers make from its second
        run on; "foreground" makes the second run wait for it, "off" the first.
    store: "on" keeps whole programs in TORCHLAZY_CACHE_DIR for the next process; "off" compiles what this process sees.
    max_trace_length: operators after which a trace is cut although no value was read.
    recompute: "on" lets the backward half of a training step recompute what is free inside its kernels, to save memory.
    memory_budget: None, or how much of a step's forward may be kept for its backward, where the rest is recomputed:
        a share from 0.0 (as little as possible) to 1.0 (all that eager keeps), bytes, or a text like "8GiB". A budget
        is one of the values of `recompute`.
    dynamic: "on" makes one program for all sizes as soon as a trace differs from a known one in its numbers only (a
        program whose sizes never change is compiled for them); "off" compiles a program for each size. In the
        environment also 1 and 0.
    hot_sizes: "on" compiles in the background a program of its own for a size that takes most runs of a program for all
        sizes for minutes, if `tiers` is "on"; "off" never does. In the environment also 1 and 0.
    native: "on" records `lazy_mode` blocks by the native recorder, which runs what it does not know at once and defers
        what it knows; while it is compiled, blocks run as in eager. "off" by the recorder in Python, which defers
        everything; so where there is no C++ compiler, and with `tiers` other than "on".
    native_device: "on" records tensors on the lazy device by the native recorder, too: they are of the ordinary
        classes, and random numbers are eager's. "off" by the recorder in Python, as `LazyTensor`s; so in a process that
        makes the first before the native recorder is compiled, and where `native` would not serve.
    cuda_graphs: "auto" replays a known trace of a native block as a CUDA graph once the memory that it reads stays
        where it is, and calls compiled with another mode than the default; "on" from its program's first run on, and
        all compiled calls; "off" launches kernels one by one.
    audit: which calls of compiled callables run their Python and are compared with what a replay does: "spaced" the
        1st, 2nd, 4th, 8th, ... that a template serves, "all" each of them, which finds what guards do not see.
    strict: raise what the compiler raises instead of running such a program operator by operator (for tests).
    debug: 0 to 5: prints cuts; timings; fusion decisions; source; every pass.
    """

    _choices: dict[str, Any] = {  # noqa: RUF012
        "enabled": ("on", "off"),
        "precision": ("fused", "eager"),
        "rng": ("philox", "eager"),
        "tiers": ("on", "foreground", "off"),
        "store": ("on", "off"),
        "max_trace_length": int,
        "recompute": _recompute,
        "dynamic": ("on", "off"),
        "hot_sizes": ("on", "off"),
        "native": ("on", "off"),
        "native_device": ("on", "off"),
        "cuda_graphs": ("auto", "on", "off"),
        "audit": ("spaced", "all"),
        "strict": (False, True),
        "debug": range(6),
    }

    def __init__(self) -> None:
        for name, default in _DEFAULTS.items():
            self._read(name, f"TORCHLAZY_{name.upper()}", default)
        _warn_of_misspelt()
        if os.environ.get("TORCHLAZY_MEMORY_BUDGET"):
            self._read("memory_budget", "TORCHLAZY_MEMORY_BUDGET", "on")

    def _read(self, name: str, variable: str, default: str) -> None:
        """A setting from its variable; one that is empty is not set."""
        text = os.environ.get(variable) or default
        try:
            setattr(self, name, _PARSED.get(name, str)(text))
        except (ValueError, TypeError) as why:
            raise ValueError(f"the environment has {variable}={text!r}: {why}; mend or unset the variable") from None

    def __repr__(self) -> str:
        return f"torchlazy.config({', '.join(f'{name}={getattr(self, name)!r}' for name in self._choices)})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._unknown(name))

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"torchlazy.config.{name} cannot be deleted; assign the value that it should have")

    def _unknown(self, name: str) -> str:
        names = ", ".join((*self._choices, "memory_budget"))
        return f"torchlazy.config has no setting {name!r}; it has {names}"

    @property
    def memory_budget(self) -> Budget:
        return budget_of(self.recompute)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "memory_budget":
            name, value = "recompute", recompute_text(parse_budget(value))
        if name not in self._choices:
            raise AttributeError(self._unknown(name))
        allowed = self._choices[name]
        if allowed is int:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"torchlazy.config.{name} must be a positive int, not {value!r}")
        elif callable(allowed):
            value = allowed(value)
        elif value not in allowed or (isinstance(value, (bool, float)) and type(value) is not type(allowed[0])):
            raise ValueError(f"torchlazy.config.{name} must be one of {list(allowed)}, not {value!r}")
        object.__setattr__(self, name, value)


config = Config()


@contextlib.contextmanager
def with_dynamic(dynamic: str) -> Iterator[None]:
    """`config.dynamic` has this value inside; empty: unchanged."""
    before = config.dynamic
    if not dynamic or dynamic == before:
        yield
        return
    config.dynamic = dynamic
    try:
        yield
    finally:
        config.dynamic = before

"""`config.memory_budget`: how much of a training step's forward may be held for its backward.

Invariant: every budget has one text, by which a program that was compiled under it is known.
"""

from __future__ import annotations

import re

Budget = float | int | None

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-z]*)\s*", re.IGNORECASE)
_REMEDY = 'pass a share from 0.0 to 1.0, bytes as an int, a text like "8GiB", or None for what costs no time'


def parse_budget(value: object) -> Budget:
    """The budget that a user wrote: None, a share from 0.0 to 1.0, an int of bytes above 1, or a text of either.

    The ints 0 and 1 are the shares. Raises ValueError, or TypeError for what is no number.
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

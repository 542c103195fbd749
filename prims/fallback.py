"""The record of an ATen call that no rule decomposes.

Invariant: plain data; a stored program's fallbacks are read without importing the rules.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fallback:
    """One ATen call that stays extern, and why: on purpose, or for want of a rule that works."""

    op: str
    reason: str
    frame: str
    by_choice: bool = False

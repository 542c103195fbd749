"""What a compiled callable tells of its calls: reasons for its report, and warnings.

Invariant: a reason stands once, and of many only the last ones are kept.
"""

from __future__ import annotations

import warnings
from typing import Any

_MOST = 50


class CallNotes:
    """Of one callable. `label` is its name to a user."""

    def __init__(self, function: Any) -> None:
        self.label = str(getattr(function, "__qualname__", "") or type(function).__name__)
        self.reasons: list[str] = []  # oldest first

    def note(self, reason: str) -> None:
        """One more reason for the report."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            del self.reasons[:-_MOST]

    def warn(self, text: str) -> None:
        """Tell the user at once."""
        warnings.warn(f"torchlazy.compile: {self.label} {text}", RuntimeWarning, stacklevel=5)

"""`torchlazy.compile` without audits, for programs that take what compiles as an argument; what it made is kept.

Invariant: what a program gets is the compiled callable itself, so that its report tells of the program's calls.
"""

from __future__ import annotations

from typing import Any

import torchlazy
from torchlazy.lazy.compiled.variants import CompileReport


class KeptCompiles:
    """Compiles what it is called with; audits are off, so that nothing but a guard notices a change."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, function: Any) -> Any:
        self.made.append(torchlazy.compile(function, audit=False))
        return self.made[-1]

    def first_report(self) -> CompileReport:
        """What became of the calls of the first one that was made."""
        report: CompileReport = self.made[0].report()
        return report

"""Differences that are known and not mended: the fuzzer leaves them out, and a test fails once one is gone.

Invariant: each has a program that shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.fuzz.program import Program
from tests.fuzz.ways import Failure


@dataclass(frozen=True)
class Known:
    """`differs` is searched in the failure's text, `needs` in the program's; `program` is as small as it fails."""

    reason: str
    ways: tuple[str, ...]
    differs: str
    needs: str
    program: str

    def is_it(self, program: Program, failure: Failure) -> bool:
        return (
            failure.way in self.ways
            and re.search(self.differs, str(failure)) is not None
            and re.search(self.needs, program.text()) is not None
        )


KNOWN: tuple[Known, ...] = ()


def known(program: Program, failure: Failure) -> str:
    """Why this difference is no news; empty where it is."""
    return next((one.reason for one in KNOWN if one.is_it(program, failure)), "")

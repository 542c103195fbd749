"""Programs whose traces the recorder knows."""

from __future__ import annotations

from collections.abc import Callable

import torchlazy


def known(program: Callable[[], object], turns: int = 4) -> None:
    """Let the recorder know what the program does."""
    for _ in range(turns):
        kept = program()
        torchlazy.flush()
        del kept

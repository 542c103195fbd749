"""A progress bar: tqdm's where it is installed, else one line of text that rewrites itself.

No bar is drawn where the error stream is not a terminal; lines of `say` always appear.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class Progress:
    """Iterates over `range(total)`; `say` prints a line above the bar, `note` changes the text behind it."""

    def __init__(self, total: int, label: str) -> None:
        self.total = total
        self.label = label
        self._note = ""
        self._bar = tqdm(total=total, desc=label, unit="step", mininterval=0.5, disable=None) if tqdm else None

    def __iter__(self) -> Iterator[int]:
        shown = 0.0
        for step in range(self.total):
            yield step
            if self._bar is not None:
                self._bar.update(1)
            elif sys.stderr.isatty() and (time.perf_counter() - shown > 0.5 or step + 1 == self.total):
                shown = time.perf_counter()
                self._draw(step + 1)
        if self._bar is not None:
            self._bar.close()
        elif sys.stderr.isatty():
            print(file=sys.stderr)

    def note(self, text: str) -> None:
        self._note = text
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(f"\r{line:<78}", flush=True)

    def _draw(self, done: int) -> None:
        filled = 30 * done // self.total
        bar = "#" * filled + "-" * (30 - filled)
        print(f"\r{self.label} [{bar}] {done}/{self.total} {self._note}", end="", file=sys.stderr, flush=True)

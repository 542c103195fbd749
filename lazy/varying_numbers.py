"""Which Python numbers of a compiled callable's calls vary: inputs of its templates, where its Python only computes.

Invariant: a number is free only as long as no template holds for one value of it alone, but where some template serves
it at any value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torchlazy.lazy.capture_call import Captured, fixed_numbers


class VaryingNumbers:
    """Names of numbers: "argument 3", or the place of one in the state. `dynamic` as the user gave it."""

    def __init__(self, dynamic: bool | None) -> None:
        self._dynamic = dynamic
        self.free: set[str] = set()
        self.fixed: set[str] = set()  # that hold for one value each, in all templates so far
        self._followed: set[str] = set()  # that some template serves at any value
        self.stay = False  # its Python can tell a number that is followed from a plain one
        self._last: Any = None

    @property
    def vary(self) -> bool:
        """Whether numbers may be inputs at all."""
        return self._dynamic is not False and not self.stay

    def let_stay(self) -> None:
        """From now on each number is a constant."""
        self.stay = True
        self.free.clear()

    def learn_arguments(self, leaves: Sequence[Any], structure: Any) -> bool:
        """Arguments that are numbers and were others in the last new kind of call vary; whether there are new ones."""
        numbers = [leaf if type(leaf) is float or type(leaf) is int else None for leaf in leaves]
        last, self._last = self._last, (structure, numbers)
        if not self.vary:
            return False
        before = len(self.free)
        then = numbers if last is None or last[0] != structure else last[1]
        for position, (old, now) in enumerate(zip(then, numbers, strict=True)):
            if now is None or type(old) not in (type(now), type(None)):
                continue
            if (self._dynamic and type(now) is float) or (old is not None and old != now):
                self.free.add(f"argument {position}")
        self.free -= self.fixed
        return len(self.free) > before

    def changed(self, names: Collection[str]) -> None:
        """Numbers of the state that are others than at a capture, or that a call changed."""
        if self.vary:
            self.free |= set(names) - self.fixed

    def captured(self, captured: Captured) -> None:
        """A call gave a template: what of it holds for one value only."""
        assert captured.template is not None
        fixed = fixed_numbers(captured.template, captured.coincidences)
        self._followed |= set(captured.template.free) - fixed
        self.fixed |= fixed - self._followed
        self.free -= self.fixed

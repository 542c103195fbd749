"""Changes of what an identity check names, each with what undoes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchlazy.runtime.native.identity_check import IdentityCheck

Steps = tuple[Callable[[], Any], Callable[[], Any]]


def seen(check: IdentityCheck, steps: list[Steps]) -> None:
    """Each first step is noticed, and that the second one undid it."""
    assert check.holds()
    for number, (change, undo) in enumerate(steps):
        change()
        assert not check.holds(), number
        undo()
        assert check.holds(), number

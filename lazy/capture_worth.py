"""Whether a callable's calls are worth being captured: where they hardly ever repeat, its Python runs, recorded.

Invariant: a pause only delays captures; each one is followed by another try.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torchlazy.lazy.call_variants import MAX_SIGNATURES, Pause, Signature

_ENOUGH = 32  # captures; if more calls were captured than replayed since the last pause, there is another one
_ENOUGH_FOR_NOTHING = 12  # captures that served no call at all


class CaptureWorth:
    """The account of one callable. `note` and `warn` are told of pauses."""

    def __init__(self, note: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._note, self._warn = note, warn
        self.pause = Pause()
        self.first_sights = True  # kinds of calls are captured when they come for the first time
        self._since = (0, 0)  # captures and replays when the last pause began

    def begins_pause(self, counts: Mapping[str, int], signatures: dict[Any, Signature]) -> bool:
        """Whether captures served too few calls lately: then there is a pause."""
        captures, replays = counts["captures"], counts["replays"]
        lately = captures - self._since[0]
        served = replays - self._since[1]
        if lately < (_ENOUGH if served else _ENOUGH_FOR_NOTHING) or lately <= served:
            return False
        if self.first_sights and len(signatures) > lately // 2:  # each call is of a kind of its own
            self.first_sights = False
            self._since = (captures, replays)
            for known in signatures.values():
                known.was_seen = True
            self._note("captured from the second call of a kind on: most kinds of calls came once")
            return True
        if not self.first_sights and lately < MAX_SIGNATURES:  # kinds that came again may do so once more
            return False
        if not self._since[0]:
            self._warn(
                f"runs its Python at most calls, recorded: {captures} captures served {replays} calls. `report()` has "
                "the reasons; captures are tried again now and then"
            )
        self._since = (captures, replays)
        if not served:
            signatures.clear()
        self.pause.begin()
        return True


def never_replayed(function: Any) -> str:
    """Why calls of the function are never captured; empty otherwise. Its body runs later, piece by piece."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    kinds = {"a generator": inspect.isgeneratorfunction, "a coroutine": inspect.iscoroutinefunction,
             "an asynchronous generator": inspect.isasyncgenfunction}  # fmt: skip
    return next((f"it returns {kind}" for kind, found in kinds.items() if found(function)), "")

"""Policy of a compiled callable: which numbers become inputs, whether captures are worth it, and what it reports.

Python numbers that vary from call to call are inputs of templates, where the call's Python only computes with them.
Where calls hardly ever repeat, their Python runs, recorded. The report has the reasons for captures and refusals.

Invariant: a number is free only as long as no template holds for a single value of it, unless some template serves it
at any value. A pause only delays captures: each is followed by another try. A reason is reported once, and only the
last ones are kept.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torchlazy.lazy.compiled.capture.call import Captured, fixed_numbers
from torchlazy.lazy.compiled.variants import MAX_SIGNATURES, CallSignature, Pause


class VaryingNumbers:
    """Names of numbers: "argument 3", or the place of one in the state. `dynamic` as the user gave it."""

    def __init__(self, dynamic: bool | None) -> None:
        self._dynamic = dynamic
        self.free: set[str] = set()
        self.fixed: set[str] = set()  # for which all templates so far hold for one value each
        self._followed: set[str] = set()  # that some template serves at any value
        self.stay = False  # its Python can distinguish a tracked number from a plain one
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
        """Number arguments that differ from the last new kind of call vary; whether there are new ones."""
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
        """Numbers of the state that differ from a capture, or that a call changed."""
        if self.vary:
            self.free |= set(names) - self.fixed

    def captured(self, captured: Captured) -> None:
        """A call gave a template: note the numbers for which it holds at one value only."""
        assert captured.template is not None
        fixed = fixed_numbers(captured.template, captured.coincidences)
        self._followed |= set(captured.template.free) - fixed
        self.fixed |= fixed - self._followed
        self.free -= self.fixed


_ENOUGH = 32  # captures; if more calls were captured than replayed since the last pause, there is another one
_ENOUGH_FOR_NOTHING = 12  # captures that served no call at all


class CaptureWorth:
    """Captures and replays of one callable. `note` and `warn` receive messages about pauses."""

    def __init__(self, note: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._note, self._warn = note, warn
        self.pause = Pause()
        self.first_sights = True  # calls of a new kind are captured the first time
        self._since = (0, 0)  # captures and replays when the last pause began

    def begins_pause(self, counts: Mapping[str, int], signatures: dict[Any, CallSignature]) -> bool:
        """Whether captures served too few calls lately: then there is a pause."""
        captures, replays = counts["captures"], counts["replays"]
        lately = captures - self._since[0]
        served = replays - self._since[1]
        if lately < (_ENOUGH if served else _ENOUGH_FOR_NOTHING) or lately <= served:
            return False
        if self.first_sights and len(signatures) > lately // 2:  # nearly each call is of a new kind
            self.first_sights = False
            self._since = (captures, replays)
            for known in signatures.values():
                known.was_seen = True
            self._note("captured from the second call of a kind on: most kinds of calls came once")
            return True
        if not self.first_sights and lately < MAX_SIGNATURES:  # kinds that repeated may repeat once more
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


_MOST = 50


class CallNotes:
    """The reasons and warnings of one callable. `label` is its name in messages."""

    def __init__(self, function: Any) -> None:
        self.label = str(getattr(function, "__qualname__", "") or type(function).__name__)
        self.reasons: list[str] = []  # oldest first

    def note(self, reason: str) -> None:
        """One more reason for the report."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            del self.reasons[:-_MOST]

    def warn(self, text: str) -> None:
        """Warn the user at once."""
        warnings.warn(f"torchlazy.compile: {self.label} {text}", RuntimeWarning, stacklevel=5)

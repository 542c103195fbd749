"""torch's process-wide settings, remembered by a compiled callable, and asked in one native pass while they stay.

Asked one by one from Python they take as long as some thousand guarded values.

Invariant: where `known()` gives something, nobody watches or transforms operators, and it is what `ambient` would give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import forward_ad
from torchlazy.lazy.call_key import ambient, stands_alone
from torchlazy.lazy.config import config
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.torch_private import questions_of_settings
from torchlazy.lazy.torch_private_settings import enter_question
from torchlazy.runtime.identity_check import IdentityCheck, is_ready

_FIRST_PATIENCE = 2  # calls under the same settings before these are remembered
_LONGEST_PATIENCE = 4096


class Ambience:
    """The settings that one callable's calls were under."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._passes: Callable[[], bool] | None = None
        self._value: Any = None
        self._target = ""
        self._last: Any = None
        self._seen, self._patience = 0, _FIRST_PATIENCE

    def known(self) -> Any:
        """What `ambient` would give, if the settings are the remembered ones and a call need not stand alone; None
        where that is not known."""
        if self._passes is None or self._recorder.target is not self._target:
            return None
        return self._value if self._passes() else None

    def learn(self) -> Any:
        """What `ambient` gives, to be remembered where it comes again."""
        value = ambient(self._recorder)
        self._seen = self._seen + 1 if value is self._last else 1
        self._last = value
        if self._seen >= self._patience and is_ready() and not stands_alone():
            self._seen, self._patience = 0, min(2 * self._patience, _LONGEST_PATIENCE)
            self._passes = self._native()
            self._value, self._target = value, self._recorder.target
            if ambient(self._recorder) is not value:  # somebody changed it meanwhile
                self._passes = None
        return value

    def _native(self) -> Callable[[], bool] | None:
        """None where what a function in C gives does not tell all."""
        check = IdentityCheck()
        check.entries(vars(forward_ad), {"_current_level": forward_ad._current_level})
        check.entries(vars(config), {"rng": config.rng, "precision": config.precision})
        questions = questions_of_settings()
        if not questions or not all(enter_question(check, *question) for question in questions):
            return None
        return check.complete()

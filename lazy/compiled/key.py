"""The dispatch context of a compiled call: torch's modes and settings, which choose what operators do.

Read one by one from Python they take as long as some thousand guarded values. So a compiled callable remembers them,
and compares them in one native pass while they stay the same.

Invariant: two calls with equal context facts run under the same settings of torch. Where `known()` gives something, no
mode or transform intercepts operators, and it is what `dispatch_context` would give.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torchlazy.lazy.config import config
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.torch_private.dispatch import (
    any_autocast,
    default_device_of,
    functorch_is_active,
    has_foreign_modes,
    questions_of_settings,
    settings_of_kernels,
)
from torchlazy.lazy.torch_private.settings import enter_question
from torchlazy.runtime.native.identity_check import IdentityCheck, is_ready

_AUTOCAST_DEVICES = ("cpu", "cuda", "lazy")
_NO_AUTOCAST = (None,) * len(_AUTOCAST_DEVICES)


class DispatchContext:
    """The process-wide state that chooses what operators do: one object for each state."""

    __slots__ = ("__weakref__", "facts")

    def __init__(self, facts: tuple[Any, ...]) -> None:
        self.facts = facts


_AMBIENT: weakref.WeakValueDictionary[tuple[Any, ...], DispatchContext] = weakref.WeakValueDictionary()


def dispatch_context(recorder: Recorder) -> DispatchContext:
    """The current one."""
    facts = _ambient_facts(recorder)
    found = _AMBIENT.get(facts)
    return found if found is not None else _AMBIENT.setdefault(facts, DispatchContext(facts))


def _ambient_facts(recorder: Recorder) -> tuple[Any, ...]:
    autocast: tuple[Any, ...] = _NO_AUTOCAST
    if any_autocast():
        autocast = tuple(
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in _AUTOCAST_DEVICES
        )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_dtype(),
        default_device_of(),
        settings_of_kernels(),
        recorder.target,
        config.rng,
        config.precision,
    )


def why_intercepted() -> str:
    """Why a call must run its Python: a mode or a transform intercepts its operators; empty where none does."""
    if has_foreign_modes():
        return "a torch mode that is not torchlazy's is active"
    if functorch_is_active():
        return "it is called inside a torch.func transform"
    if forward_ad._current_level >= 0:  # torch has no public function for it
        return "it is called inside a forward-mode differentiation"
    return ""


_FIRST_PATIENCE = 2  # calls under the same settings before these are remembered
_LONGEST_PATIENCE = 4096


class RememberedContext:
    """The dispatch context of one callable's last calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._passes: Callable[[], bool] | None = None
        self._value: Any = None
        self._target = ""
        self._last: Any = None
        self._seen, self._patience = 0, _FIRST_PATIENCE

    def known(self) -> Any:
        """What `dispatch_context` would give, if the settings are the remembered ones and nothing intercepts operators.

        None where that is not known."""
        if self._passes is None or self._recorder.target is not self._target:
            return None
        return self._value if self._passes() else None

    def learn(self) -> Any:
        """What `dispatch_context` gives, remembered once it repeats."""
        value = dispatch_context(self._recorder)
        self._seen = self._seen + 1 if value is self._last else 1
        self._last = value
        if self._seen >= self._patience and is_ready() and not why_intercepted():
            self._seen, self._patience = 0, min(2 * self._patience, _LONGEST_PATIENCE)
            self._passes = self._native()
            self._value, self._target = value, self._recorder.target
            if dispatch_context(self._recorder) is not value:  # it changed meanwhile
                self._passes = None
        return value

    def _native(self) -> Callable[[], bool] | None:
        """The native pass; None where C functions do not give all of the settings."""
        check = IdentityCheck()
        check.entries(vars(forward_ad), {"_current_level": forward_ad._current_level})
        check.entries(vars(config), {"rng": config.rng, "precision": config.precision})
        questions = questions_of_settings()
        if not questions or not all(enter_question(check, *question) for question in questions):
            return None
        return check.complete()

"""What a captured call depends on beside its arguments and the state that its code names: torch's own modes.

Invariant: two calls with equal ambient facts run under one setting of torch.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd import forward_ad
from torchlazy.lazy.config import config
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.torch_private import (
    any_autocast,
    default_device_of,
    functorch_is_active,
    modes_of_others,
    settings_of_kernels,
)

_AUTOCAST_DEVICES = ("cpu", "cuda", "lazy")
_NO_AUTOCAST = (None,) * len(_AUTOCAST_DEVICES)


class Ambient:
    """The process-wide state that chooses what operators do: one object for each state."""

    __slots__ = ("__weakref__", "facts")

    def __init__(self, facts: tuple[Any, ...]) -> None:
        self.facts = facts


_AMBIENT: weakref.WeakValueDictionary[tuple[Any, ...], Ambient] = weakref.WeakValueDictionary()


def ambient(recorder: Recorder) -> Ambient:
    """That of now."""
    facts = _ambient_facts(recorder)
    found = _AMBIENT.get(facts)
    return found if found is not None else _AMBIENT.setdefault(facts, Ambient(facts))


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


def stands_alone() -> str:
    """Why a call must run its Python whatever it is: somebody watches or transforms its operators; else empty."""
    if modes_of_others():
        return "a torch mode that is not torchlazy's is active"
    if functorch_is_active():
        return "it is called inside a torch.func transform"
    if forward_ad._current_level >= 0:  # torch has no public question for it
        return "it is called inside a forward-mode differentiation"
    return ""

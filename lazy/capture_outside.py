"""What a captured call takes from the world outside its state: things that give something else each time, and random
numbers of Python's and NumPy's own; and what of the guarded fixtures it changed.

Invariant: a call that drew such a number, or changed a fixture, has no template.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torchlazy.lazy.guard_kinds import generators_of_the_process
from torchlazy.lazy.guard_reached import Reached
from torchlazy.lazy.guards import why_not_compared
from torchlazy.lazy.torch_private import any_autocast, default_device_of, settings_of_kernels


class Outside:
    """Made before the call runs; `refuse` takes the reason for having no template."""

    def __init__(self, reached: Reached, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse
        for why in reached.unrepeatable:
            refuse(why)
        for array, name in reached.arrays:
            why = why_not_compared(array)
            if why:
                kind = "a NumPy array" if isinstance(array, numpy.ndarray) else "memory"
                refuse(f"its code names {kind} that is too much to compare at each call: {name}, {why}")
        self._fixtures = [(place, tuple(place.read())) for place in reached.fixtures]
        self._classes = [(own, len(own), name) for own, name in reached.classes]
        drawn = (*generators_of_the_process(), *reached.generators)
        self._drawn = [(read, read(), name) for read, name in drawn]
        self._settings = _settings()

    def refuse_changes(self) -> None:
        """After the call."""
        for read, before, name in self._drawn:
            if read() != before:
                self._refuse(f"it draws random numbers from {name}")
        if _settings() != self._settings:
            self._refuse("it leaves torch under other settings than it found (grad mode, default dtype, ...)")
        for place, values in self._fixtures:
            for name, was, value in zip(place.names, values, place.read(), strict=True):
                if value is not was:
                    self._refuse(f"it changes {name}")
        for own, count, name in self._classes:
            if len(own) != count:
                self._refuse(f"it changes {name}")


def _settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), default_device_of(),
        torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), any_autocast(), settings_of_kernels(),
    )  # fmt: skip

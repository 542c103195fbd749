"""Random generators and other sources outside the state: what a captured call does to them beside drawing numbers.

Others are things that give something else each time, random numbers of Python's and NumPy's own, and guarded fixtures.

torch reports neither `manual_seed` nor `set_rng_state`; but between two draws of a call a generator stands still, so a
state that no draw led to was set. A state that the call had before (`fork_rng`, a checkpoint's second forward) can be
brought about again by a replay; any other comes from the program's Python, and is not known at the next call.

Invariant: what a template draws starts from the states that eager's draws start from. A call that draws from a
generator that is not torch's, or changes a fixture, has no template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torchlazy.lazy.compiled.guards.guards import why_not_compared
from torchlazy.lazy.compiled.guards.library_state import generators_of_the_process
from torchlazy.lazy.compiled.guards.reached import Reached
from torchlazy.lazy.compiled.template.template import KeepState, Rewind, Step
from torchlazy.lazy.torch_private.dispatch import any_autocast, below_autograd, default_device_of, settings_of_kernels


def state_of(generator: torch.Generator | None) -> torch.Tensor:
    """The generator's state (None: torch's default CPU generator), uint8."""
    return torch.get_rng_state() if generator is None else generator.get_state()


def set_state(generator: torch.Generator | None, state: torch.Tensor) -> None:
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


@dataclass(eq=False)
class _GeneratorStates:
    """One generator: where its draws have brought it, and the states it had, each by the step that it came after."""

    generator: torch.Generator | None
    stands: bytes
    states: dict[bytes, Step | None] = field(default_factory=dict)


class WatchedGenerators:
    """The generators of one call. The call's steps go into `steps`; `quietly` runs torch unrecorded."""

    def __init__(
        self, steps: list[Step], quietly: Callable[[Callable[[], Any]], Any], refuse: Callable[[str], None]
    ) -> None:
        self._steps, self._quietly, self._refuse = steps, quietly, refuse
        self._known: dict[int, _GeneratorStates] = {}
        self._kept: dict[tuple[int, Step | None], int] = {}  # numbers of states that a step goes back to
        self.listens = True
        self.may_be_seeded = False  # whether the call's code may make generators, or seed them

    def begin(self, generators: Iterable[torch.Generator | None]) -> None:
        """Before the call: the default generator, and those that the call is known to draw from."""
        may_be_seeded, self.may_be_seeded = self.may_be_seeded, False
        for generator in generators:
            self._look(generator)
        self.may_be_seeded = may_be_seeded

    def draws(self, generator: torch.Generator | None) -> None:
        """Before a draw."""
        if not self.listens:
            return
        found = self._look(generator)
        now = self._read(generator)
        if now == found.stands:
            return
        if now in found.states:
            place = (id(generator), found.states[now])
            number = self._kept.setdefault(place, len(self._kept))
            self._steps.append(Rewind(generator, number))
            found.stands = now
        else:
            self._refuse("its Python seeds a random generator of torch, or sets its state")

    def before_program(self) -> None:
        """A program is about to run that draws from its device's generator itself."""
        for found in list(self._known.values()):
            self.draws(found.generator)

    def after_program(self) -> None:
        """It ran, as the last step: the call's Python did not bring the generators to where they are now."""
        for found in list(self._known.values()):
            self.drew(found.generator)

    def has_moved(self, generator: torch.Generator | None) -> bool:
        """Whether it has moved since it was last looked at."""
        return self._read(generator) != self._look(generator).stands

    def drew(self, generator: torch.Generator | None) -> None:
        """After a draw, which is the last step."""
        if not self.listens:
            return
        found = self._look(generator)
        found.stands = self._read(generator)
        found.states.setdefault(found.stands, self._steps[-1])

    @property
    def watched(self) -> list[torch.Generator | None]:
        """The generators that the call drew from, or may have."""
        return [found.generator for found in self._known.values()]

    def settle(self) -> None:
        """At the end: generators are left as the call leaves them; states that steps go back to are kept."""
        for found in list(self._known.values()):
            self.draws(found.generator)
        for (generator_id, after), number in self._kept.items():
            step = KeepState(self._known[generator_id].generator, number)
            self._steps.insert(0 if after is None else _position(self._steps, after) + 1, step)
        self._kept.clear()

    def _look(self, generator: torch.Generator | None) -> _GeneratorStates:
        found = self._known.get(id(generator))
        if found is None:
            now = self._read(generator)
            found = self._known[id(generator)] = _GeneratorStates(generator, now)
            # First seen during a call: an audit, which looks from the beginning, sees whether it was seeded before.
            if self.may_be_seeded:
                self._refuse("its Python makes or seeds a random generator of torch that it draws from")
            found.states[now] = self._steps[-1] if self._steps else None
        return found

    def _read(self, generator: torch.Generator | None) -> bytes:
        def read() -> bytes:
            with below_autograd():
                return bytes(state_of(generator).numpy())

        found: bytes = self._quietly(read)
        return found


def _position(steps: Sequence[Step], wanted: Step) -> int:
    return next(i for i, step in enumerate(steps) if step is wanted)


class Outside:
    """Made before the call runs; `refuse` is called with the reason for having no template."""

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

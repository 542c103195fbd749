"""What a captured call does to torch's random generators beside drawing from them.

Nothing tells of `manual_seed` and `set_rng_state`; but between two draws of a call a generator stands still, so that a
state that nobody drew it to was set. A state that the call had before (`fork_rng`, a checkpoint's second forward) can
be brought about again by a replay; any other comes from the program's Python, and is not known at the next call.

Invariant: what a template draws starts from the states that eager's draws start from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchlazy.lazy.call_template import KeepState, Rewind, Step
from torchlazy.lazy.torch_private import below_autograd


def state_of(generator: torch.Generator | None) -> torch.Tensor:
    """The generator's state (None: torch's default CPU generator), uint8."""
    return torch.get_rng_state() if generator is None else generator.get_state()


def set_state(generator: torch.Generator | None, state: torch.Tensor) -> None:
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


@dataclass(eq=False)
class _Known:
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
        self._known: dict[int, _Known] = {}
        self._kept: dict[tuple[int, Step | None], int] = {}  # numbers of states that a step goes back to
        self.listens = True

    def begin(self, generators: Iterable[torch.Generator | None]) -> None:
        """Before the call: the default generator, and those that the call is known to draw from."""
        for generator in generators:
            self._look(generator)

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
        """It ran, as the last step: where it brought generators is no doing of the call's Python."""
        for found in list(self._known.values()):
            self.drew(found.generator)

    def has_moved(self, generator: torch.Generator | None) -> bool:
        """Since it was last looked at."""
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

    def _look(self, generator: torch.Generator | None) -> _Known:
        found = self._known.get(id(generator))
        if found is None:
            now = self._read(generator)
            found = self._known[id(generator)] = _Known(generator, now)
            # In the midst of a call: whether it was seeded before is seen by an audit, which looks from the beginning.
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

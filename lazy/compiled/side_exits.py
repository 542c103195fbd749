"""Side exits: other templates of a callable in which a replay continues where a number came out otherwise.

Invariant: a replay continues in a template only where that template's own guards hold for the call, and the numbers
known so far are those that it was captured with, or made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchlazy.lazy.compiled.replay.replay import Replay
from torchlazy.lazy.compiled.replay.shared_steps import SharedSteps
from torchlazy.lazy.compiled.replay.state import ReplayState
from torchlazy.lazy.compiled.template.numbers import unbacked_sources
from torchlazy.lazy.compiled.variants import Variant


class SideExits:
    """Finds, for one call, the variant in which it continues. `served` is the one whose replay ran to the end,
    `audited` one that must be compared with the call's Python first."""

    def __init__(
        self,
        variants: Callable[[Sequence[Any], Sequence[int]], Iterable[Variant]],
        shared: SharedSteps,
        leaves: tuple[list[Any], list[Any]],
        audits: bool,
    ) -> None:
        """`variants`: those that may continue, given the numbers and the unbacked sizes known so far. `leaves`: the
        arguments as the caller passed them, and as programs receive them."""
        self._variants, self._shared, self._audits = variants, shared, audits
        self._given, self._leaves = leaves
        self.served: Variant | None = None
        self.audited: Variant | None = None
        self._agree: list[Variant] = []  # with the numbers, but cannot continue this call
        self._stopped: list[tuple[Replay, int]] = []  # replays that found no side exit, and after which step

    def begin(self, variant: Variant) -> None:
        """The variant's replay is the first to run."""
        self.served = variant

    def rules_out(self, variant: Variant) -> bool:
        """Whether a run found that a number differs from the variant's."""
        steps = variant.replay.steps
        if variant in self._agree:
            return False
        return any(self._shared.count(replay.steps, steps) > number for replay, number in self._stopped)

    def __call__(self, replay: Replay, number: int, state: ReplayState) -> Replay | None:
        """The replay that continues after step `number` of another one."""
        first = self.served
        assert first is not None
        if replay.is_late:
            return None
        for variant in self._variants(state.sources, _known_late(replay, state)):
            other = variant.replay
            if other is replay or other.is_late or self._shared.count(replay.steps, other.steps) <= number:
                continue
            if not other.agrees(state, number):
                continue
            alike = variant.slot_names == first.slot_names and variant.uses_containers == first.uses_containers
            if not alike or variant.serves(self._given, self._leaves) is None:
                self._agree.append(variant)
                continue
            if variant.needs_audit or (self._audits and variant.schedule.due()):
                self.audited = variant
                return None
            self.served = variant
            return other
        self._stopped.append((replay, number))
        return None


def _known_late(replay: Replay, state: ReplayState) -> list[int]:
    """The unbacked sizes that are known so far."""
    found: list[int] = []
    for source in unbacked_sources(replay.template):
        value = state.sources[source]
        if value is None:
            break
        found.append(value)
    return found


__all__ = ["SideExits"]

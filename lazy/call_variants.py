"""What is known of a compiled callable's calls: its variants under their guards, pauses between captures, the account.

Invariant: a variant serves a call only where its guards, its slots and its template's own checks hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torchlazy.lazy import audit
from torchlazy.lazy import call_template as t
from torchlazy.lazy.call_key import facts_of
from torchlazy.lazy.guard_tensors import aliases_in
from torchlazy.lazy.guards import Guards
from torchlazy.lazy.plain_objects import unflatten_open
from torchlazy.lazy.replay import Replay
from torchlazy.lazy.state_slots import Slots
from torchlazy.lazy.torch_private import flatten_tree

MAX_SIGNATURES = 256  # argument structures and geometries with variants of their own
MAX_VARIANTS = 64  # for one signature
_AGES = 256  # variants dropped until what served long ago counts half
_FIRST_PAUSE = 16  # calls
_LONGEST_PAUSE = 4096
_LEAF = flatten_tree(0)[1]


@dataclass(eq=False)
class Variant:
    """A template that holds under its guards."""

    guards: Guards
    replay: Replay
    aliases: tuple[tuple[int, int] | None, ...]  # for each argument which memory of the state it is on
    slots: Slots
    slot_facts: Any
    schedule: audit.Schedule = field(default_factory=audit.Schedule)
    served: int = 0  # calls

    @property
    def is_late(self) -> bool:
        """Whether it serves whatever sizes the data decides of."""
        return self.replay.is_late

    @property
    def is_given_up(self) -> bool:
        """Whether it serves no call any more."""
        return False

    @property
    def needs_audit(self) -> bool:
        """Whether it must be compared with a call before it serves one."""
        return False

    def results(self, leaves: list[Any]) -> Any:
        """The call's value from its leaves."""
        return leaves[0] if self.is_single else unflatten_open(leaves, self.replay.template.spec)

    def __post_init__(self) -> None:
        self.is_single = self.replay.template.spec == _LEAF
        template = self.replay.template
        everything = [*template.results, *(result for effect in template.effects for result in effect.results)]
        # Whether a replay needs the containers among the arguments, which then are none that the state holds.
        self.uses_containers = any(type(effect.store) is t.ArgumentContents for effect in template.effects) or any(
            type(result) is t.SameContainer for result in everything
        )
        self._of_state = self.guards.kept if self.uses_containers else frozenset()
        self.slot_names = frozenset(slot.name for slot in self.slots.slots)
        self._free = {f"argument {read.leaf}" for read in self.replay.template.read_free if hasattr(read, "leaf")}

    def serves(self, given: list[Any], leaves: list[Any], *, apart: bool = False) -> tuple[list[Any], list[Any]] | None:
        """The arguments and after them what the slots hold, if this variant's template holds for them. `apart`: it is
        known that no argument is on memory of the state, as there was none in the captured call."""
        if self.slot_names:
            held = self.slots.now()
            if held is None:
                return None
            given, leaves = given + held, leaves + held
        if not apart and aliases_in(given, self.guards.memories) != self.aliases:
            return None  # an argument is on memory of the state, or no longer is
        if not self.guards.holds() or (self.slot_names and facts_of(leaves, self._free) != self.slot_facts):
            return None
        return (given, leaves) if self.replay.holds(leaves) else None

    def takes(self, containers: Iterable[Any]) -> bool:
        """Whether these containers among the arguments are none of the state's."""
        return self._of_state.isdisjoint(map(id, containers))


@dataclass(eq=False)
class Pause:
    """Calls that run as ever before another capture is tried: twice as many each time."""

    left: int = 0
    length: int = _FIRST_PAUSE

    def begin(self) -> None:
        self.left = self.length
        self.length = min(2 * self.length, _LONGEST_PAUSE)

    def is_over(self) -> bool:
        """Count a call."""
        self.left -= self.left > 0
        return not self.left


@dataclass(eq=False)
class Signature:
    """What is known of calls with arguments of one structure and geometry."""

    variants: list[Variant] = field(default_factory=list)
    refusals: int = 0
    misses: int = 0  # replays taken back because a check midway did not hold, less those that went through
    pause: Pause = field(default_factory=Pause)
    was_seen: bool = False  # a call of this kind ran as ever before
    drops: int = 0  # variants that gave way to others

    def add(self, variant: Variant) -> bool:
        """A variant to be tried first; whether another one was dropped for it."""
        dropped = len(self.variants) >= MAX_VARIANTS
        if dropped:
            self._drop()
        self.variants.insert(0, variant)
        return dropped

    def _drop(self) -> None:
        """One variant gives way: the one that served the fewest calls, of these the one that did so longest ago. Where
        more variants come by turns than are kept, the next captures wait."""
        least = min(reversed(self.variants), key=lambda variant: variant.served)
        if not least.served:
            self.pause.begin()
        self.variants.remove(least)
        self.drops += 1
        if self.drops % _AGES == 0:
            for variant in self.variants:
                variant.served //= 2

    def in_order(self) -> list[Variant]:
        """The variants, those first that serve whatever sizes the data decides of."""
        if any(variant.is_late for variant in self.variants):
            self.variants = [variant for variant in self.variants if not variant.is_given_up]
            return sorted(self.variants, key=lambda variant: not variant.is_late)
        return list(self.variants)

    def served(self, variant: Variant) -> None:
        """A replay of the variant went through: it is tried first from now on."""
        self.refusals -= self.refusals > 0
        self.misses -= self.misses > 0
        variant.served += 1
        if variant in self.variants[1:]:
            self.variants.remove(variant)
            self.variants.insert(0, variant)

    def comes_again(self) -> bool:
        """Count a call that is captured only if there was one like it."""
        before, self.was_seen = self.was_seen, True
        return before

    def begin_anew(self) -> None:
        """Forget the variants, and capture again only after a pause."""
        self.variants.clear()
        self.misses = 0
        self.pause.begin()


class Signatures(dict[Any, Signature]):
    """By the keys of calls; the oldest make room."""

    def of(self, key: Any) -> Signature:
        """The one of this key, which may be a new one."""
        found = self.get(key)
        if found is None:
            if len(self) >= MAX_SIGNATURES:
                del self[next(iter(self))]
            found = self[key] = Signature()
        return found


@dataclass(frozen=True)
class CompileReport:
    """What became of a compiled callable's calls so far.

    `captures` calls ran their Python to be captured, `replays` ran without it, `verified` ran as ever, recorded.
    `reasons` are why captures were made or refused, oldest first. `alarm` is what an audit found, or empty.
    """

    captures: int
    replays: int
    verified: int
    audits: int
    variants: int
    reasons: tuple[str, ...]
    alarm: str

    def __str__(self) -> str:
        lines = [
            f"{self.captures} captured, {self.replays} replayed ({self.audits} audited), {self.verified} ran as ever; "
            f"{self.variants} variants"
        ]
        lines += [f"  {reason}" for reason in self.reasons]
        if self.alarm:
            lines.append(f"  alarm: {self.alarm}")
        return "\n".join(lines)


def has_replaced(guards: Guards) -> bool:
    """Whether a parameter that was reached is another one now."""
    return any(isinstance(then, torch.nn.Parameter) and then is not now for _, then, now in guards.broken())


def short_text(value: Any) -> str:
    """A guarded value in one line, for notes; of tensors what they look like, whose values nobody asked for."""
    leaves = flatten_tree(value)[0]
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return f"a {type(value).__name__} of " + ", ".join(map(_look, leaves[:4]))
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def _look(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return "others"
    return f"{leaf.dtype}".removeprefix("torch.") + str(list(leaf.shape))

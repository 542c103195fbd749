"""Variants of a compiled callable, by signature: templates with their guards, pauses between captures, the report.

A signature also keeps its variants in a tree of their checks, so that side exits are found however many there are.
Templates of one callable check the same numbers until an outcome differs. A node stands for the checks and outcomes so
far; below it are the variants that have these in common.

Invariant: a variant serves a call only where its guards, its slots and its template's own checks hold. The tree finds
each variant that agrees with the numbers known so far; that one which it finds does agree is for its caller to test.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torchlazy.lazy.compiled.audit import AuditSchedule
from torchlazy.lazy.compiled.guards.guards import Guards
from torchlazy.lazy.compiled.guards.reached import StateSlots
from torchlazy.lazy.compiled.guards.tensors import aliases_in
from torchlazy.lazy.compiled.replay.replay import Replay
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.argument_facts import facts_of
from torchlazy.lazy.compiled.template.objects import unflatten_open
from torchlazy.lazy.compiled.template.views import are_on
from torchlazy.lazy.numbers.expr import Expression, evaluator, places_in
from torchlazy.lazy.torch_private.dispatch import flatten_tree

Checks = Sequence[tuple[Expression, Any]]


class HasChecks(Protocol):
    """An item of the tree."""

    @property
    def checks(self) -> Checks:
        """Expressions over numbers and their outcomes, in order."""


W = TypeVar("W", bound=HasChecks)


class _Question(Generic[W]):
    """A checked expression, and where each outcome leads."""

    def __init__(self, expression: Expression) -> None:
        self._places = tuple(places_in(expression))
        self._value: Callable[[Any], list[Any]] = evaluator([expression])
        self.answers: dict[Hashable, _Node[W]] = {}

    def is_open(self, sources: Sequence[Any]) -> bool:
        """Whether its numbers are not all known yet."""
        known = len(sources)
        return any(place >= known or sources[place] is None for place in self._places)

    def answered(self, sources: Sequence[Any]) -> _Node[W] | None:
        """Where the numbers lead, if an item is there."""
        try:
            (value,) = self._value(sources)
        except (ArithmeticError, ValueError, TypeError):
            return None
        return self.answers.get(_key(value))


class _Node(Generic[W]):
    def __init__(self) -> None:
        self.below: dict[W, None] = {}
        self.ends: dict[W, None] = {}
        self.questions: dict[Expression, _Question[W]] = {}


class CheckTree(Generic[W]):
    """The items of one signature, by their checks."""

    def __init__(self) -> None:
        self._root: _Node[W] = _Node()

    def add(self, way: W) -> None:
        """Add an item."""
        node = self._root
        node.below[way] = None
        for expression, value in way.checks:
            question = node.questions.get(expression)
            if question is None:
                question = node.questions[expression] = _Question(expression)
            node = question.answers.setdefault(_key(value), _Node())
            node.below[way] = None
        node.ends[way] = None

    def remove(self, way: W) -> None:
        """Remove an item."""
        node = self._root
        node.below.pop(way, None)
        for expression, value in way.checks:
            question = node.questions.get(expression)
            found = None if question is None else question.answers.get(_key(value))
            if question is None or found is None:
                return
            found.below.pop(way, None)
            if not found.below:
                del question.answers[_key(value)]
                if not question.answers:
                    del node.questions[expression]
                return
            node = found
        node.ends.pop(way, None)

    def find(self, sources: Sequence[Any]) -> Iterator[W]:
        """The items that agree with the numbers known so far; None in `sources` is one that is not known."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            yield from tuple(node.ends)
            for question in tuple(node.questions.values()):
                if question.is_open(sources):
                    for child in tuple(question.answers.values()):
                        yield from tuple(child.below)
                elif (found := question.answered(sources)) is not None:
                    nodes.append(found)


def _key(value: Any) -> Hashable:
    return type(value), value.hex() if type(value) is float else value


MAX_SIGNATURES = 256  # argument structures and geometries with variants of their own
MAX_VARIANTS = 1024  # for one signature
MOST_OPERATORS = 30_000  # in the templates of these: about 13 KiB each, with the programs' code
_ALWAYS = 64  # variants, however many operators they have
_MISSES = 24  # by how much replays that took another branch than the call may outnumber those that went through
_PATIENCE = 3  # captures in a row without a template before a signature's captures pause
_AGES = 256  # variants dropped before the counts of served calls are halved
_FIRST_PAUSE = 16  # calls
_LONGEST_PAUSE = 4096
_LEAF = flatten_tree(0)[1]


@dataclass(eq=False)
class Variant:
    """A template that holds under its guards."""

    guards: Guards
    replay: Replay
    aliases: tuple[tuple[int, int] | None, ...]  # for each argument which memory of the state it is on
    slots: StateSlots
    slot_facts: Any
    schedule: AuditSchedule = field(default_factory=AuditSchedule)
    served: int = 0  # calls
    last: int = 0  # when it was added, or served

    @property
    def checks(self) -> Sequence[tuple[Any, Any]]:
        """Expressions over numbers and their outcomes."""
        return self.replay.template.checks

    @property
    def is_late(self) -> bool:
        """Whether it serves all unbacked sizes."""
        return self.replay.is_late

    @property
    def is_given_up(self) -> bool:
        """Whether it serves no call any more."""
        return False

    @property
    def needs_audit(self) -> bool:
        """Whether it must be audited before it serves a call."""
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

    def serves(
        self, given: list[Any], leaves: list[Any], *, unaliased: bool = False
    ) -> tuple[list[Any], list[Any]] | None:
        """The arguments and after them what the slots hold, if this variant's template holds for them. `unaliased`:
        no argument is known to share memory with the state, and none did in the captured call."""
        if self.slot_names:
            held = self.slots.now()
            if held is None or are_on(held, given, leaves):
                return None
            given, leaves = given + held, leaves + held
        if not unaliased and aliases_in(given, self.guards.memories) != self.aliases:
            return None  # an argument is on memory of the state, or no longer is
        if not self.guards.holds() or (self.slot_names and facts_of(leaves, self._free) != self.slot_facts):
            return None
        return (given, leaves) if self.replay.holds(leaves) else None

    def accepts(self, containers: Iterable[Any]) -> bool:
        """Whether these containers among the arguments are none of the state's."""
        return self._of_state.isdisjoint(map(id, containers))


@dataclass(eq=False)
class Pause:
    """Calls that run their Python before another capture is tried: twice as many each time."""

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
class CallSignature:
    """What is known of calls with arguments of one structure and geometry."""

    variants: list[Variant] = field(default_factory=list)
    refusals: int = 0
    misses: int = 0  # replays taken back because a check midway did not hold, less those that went through
    hits: int = 0  # replays that went through since `hardly_repeats` was last asked
    pause: Pause = field(default_factory=Pause)
    was_seen: bool = False  # a call of this kind ran without a capture before
    drops: int = 0  # variants dropped for others
    tree: CheckTree[Variant] = field(default_factory=CheckTree)  # the variants, by their checks
    _first: Variant | None = None  # the one to be tried first
    _late: list[Variant] = field(default_factory=list)
    _now: int = 0  # counts what is added and served

    @property
    def has_unbacked(self) -> bool:
        """Whether a variant serves all unbacked sizes."""
        if any(variant.is_given_up for variant in self._late):
            self.keep(lambda variant: not variant.is_given_up)
        return bool(self._late)

    def raised(self, error: Exception) -> str:
        """The call raised while it was captured: the reason to report. Where it does so each time, captures wait."""
        self.refuse()
        return f"not captured: it raised {type(error).__name__}"

    def refuse(self) -> bool:
        """A capture gave no template: after several in a row the next ones wait. Whether that begins now."""
        self.refusals += 1
        if self.refusals >= _PATIENCE:
            self.pause.begin()
        return self.refusals == _PATIENCE

    def add(self, variant: Variant) -> bool:
        """A variant to be tried first; whether another one was dropped for it."""
        dropped = False
        while self._is_full(variant):
            self._drop()
            dropped = True
        self.variants.append(variant)
        self.tree.add(variant)
        if variant.is_late:
            self._late.append(variant)
        self._take_first(variant)
        return dropped

    def _is_full(self, more: Variant) -> bool:
        if len(self.variants) < min(_ALWAYS, MAX_VARIANTS):
            return False
        operators = sum(variant.replay.template.operators for variant in (*self.variants, more))
        return len(self.variants) >= MAX_VARIANTS or operators > MOST_OPERATORS

    def _take_first(self, variant: Variant) -> None:
        self._now += 1
        variant.last, self._first = self._now, variant

    def remove(self, variant: Variant) -> None:
        """Drop a variant."""
        self.variants.remove(variant)
        self.tree.remove(variant)
        if variant in self._late:
            self._late.remove(variant)
        if variant is self._first:
            self._first = None

    def keep(self, is_kept: Callable[[Variant], bool]) -> None:
        """Drop the variants of which this does not hold."""
        for variant in [one for one in self.variants if not is_kept(one)]:
            self.remove(variant)

    def _drop(self) -> None:
        """Drop the variant that served the fewest calls, of these the one that did so longest ago. Where more variants
        alternate than are kept, the next captures wait."""
        least = min(self.variants, key=lambda variant: (variant.served, variant.last))
        if not least.served:
            self.pause.begin()
        self.remove(least)
        self.drops += 1
        if self.drops % _AGES == 0:
            for variant in self.variants:
                variant.served //= 2

    def in_order(self) -> Iterator[Variant]:
        """The variants: those that serve all unbacked sizes, the one that served last, the others."""
        first = self._first
        if self.has_unbacked:
            yield from [*self._late]
        if first is not None and not first.is_late:
            yield first
        for variant in self.variants[::-1]:
            if variant is not first and not variant.is_late:
                yield variant

    def may_serve(self, variant: Variant) -> bool:
        """Whether it serves calls that it fits before others are tried: each variant that fits gives the same."""
        return not self._late and variant in self.variants

    def served(self, variant: Variant, has_missed: bool) -> None:
        """A replay of the variant went through: it is tried first from now on. `has_missed`: others were taken back."""
        self.refusals -= self.refusals > 0
        self.misses += has_missed - (self.misses > 0)
        self.hits += 1
        variant.served += 1
        self._take_first(variant)

    def comes_again(self) -> bool:
        """Count a call that is captured only if there was one like it before; whether there was."""
        before, self.was_seen = self.was_seen, True
        return before

    def hardly_repeats(self) -> bool:
        """Whether many more replays were taken back than went through, and none did since this was asked."""
        if self.misses <= _MISSES:
            return False
        hits, self.hits, self.misses = self.hits, 0, 0
        return not hits

    def begin_anew(self) -> None:
        """Forget the variants, and capture again only after a pause."""
        self.keep(lambda variant: False)
        self.misses = 0
        self.pause.begin()


class CallSignatures(dict[Any, CallSignature]):
    """Signatures by the keys of calls; the oldest are dropped."""

    def of(self, key: Any) -> CallSignature:
        """The signature of this key, made where there is none."""
        found = self.get(key)
        if found is None:
            if len(self) >= MAX_SIGNATURES:
                del self[next(iter(self))]
            found = self[key] = CallSignature()
        return found


@dataclass(frozen=True)
class CompileReport:
    """What became of a compiled callable's calls so far.

    Each call is counted once: `captures` ran their Python to be captured, `replays` ran without it, `audits` could have
    been replayed and ran it to be compared, `verified` ran it, only recorded. `variants` is how many templates there
    are; one that serves all sizes is one. `reasons` are why captures were made or refused, oldest first. `alarm` is
    what an audit found, or empty. Of the replays `native` were done in C++; `in_python` is why those of the last kind
    of call that was looked at are not, or empty.
    """

    captures: int
    replays: int
    verified: int
    audits: int
    variants: int
    reasons: tuple[str, ...]
    alarm: str
    native: int = 0
    in_python: str = ""

    def __str__(self) -> str:
        calls = self.captures + self.replays + self.audits + self.verified
        lines = [
            f"{calls} calls: {self.replays} replayed, {self.audits} audited, {self.captures} captured, "
            f"{self.verified} ran their Python; {self.variants} templates"
        ]
        lines += [f"  {reason}" for reason in self.reasons]
        if self.native:
            lines.append(f"  {self.native} of the replays were done in C++")
        if self.in_python:
            lines.append(f"  replays are done in Python: {self.in_python}")
        if self.alarm:
            lines.append(f"  alarm: {self.alarm}")
        return "\n".join(lines)


def has_replaced(guards: Guards) -> bool:
    """Whether a parameter that was reached has been replaced."""
    return any(isinstance(then, torch.nn.Parameter) and then is not now for _, then, now in guards.broken())


def short_text(value: Any) -> str:
    """A guarded value in one line, for notes; of tensors dtype and shape, since reading their values would sync."""
    leaves = flatten_tree(value)[0]
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return f"a {type(value).__name__} of " + ", ".join(map(_look, leaves[:4]))
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def _look(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return "others"
    return f"{leaf.dtype}".removeprefix("torch.") + str(list(leaf.shape))


__all__ = ["CheckTree"]

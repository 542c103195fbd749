"""The inline cache of a compiled callable: a call with arguments like those of one of the last ones needs no facts.

Invariant: where `known` gives something, flattening the arguments and computing their facts would lead to the same
signature, and no argument is on memory that the variant's state is on. Where `replayed` gives something, the replay in
Python would have given the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchlazy.lazy.compiled.ordinary import OrdinaryCalls
from torchlazy.lazy.compiled.race import Race
from torchlazy.lazy.compiled.replay.hosts import generators_of
from torchlazy.lazy.compiled.replay.native import NativeReplay, NeedsPython, native_replay
from torchlazy.lazy.compiled.template.arguments import Flat, Structure
from torchlazy.lazy.compiled.template.template import JointRun, KeepState, Rewind, Segment
from torchlazy.lazy.compiled.variants import CallSignature, Variant
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.run.driver import count_run
from torchlazy.lazy.trace.trace import compute_device
from torchlazy.runtime.native.identity_check import is_ready
from torchlazy.runtime.native.recorder_library import LIBRARY

_FIRST_PATIENCE = 2  # calls of one variant before its arguments are remembered
_LONGEST_PATIENCE = 4096
_MOST_ENTRIES = 8  # a call that none of them fits costs a comparison with each, half a microsecond
_MOST_COUNTED = 64
_TURNS_OF_WAITING = 4
IN_EAGER = object()  # for the value of a call that is to run its Python, unrecorded

# The arguments flat, as the caller passed them and as programs receive them, their structure, the key, the signature.
CallFacts: TypeAlias = tuple[list[Any], list[Any], Structure, Any, CallSignature]


@dataclass(frozen=True, slots=True, eq=False)
class RememberedCall:
    """What is known of a call whose arguments fit the `check` (an `ArgumentCheck` of the native library)."""

    check: Any
    settings: Any
    structure: Flat
    key: tuple[Any, ...]
    signature: CallSignature
    variant: Variant

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The arguments flat; None where others are passed by name than then."""
        return (*args, *kwargs.values()) if tuple(kwargs) == self.structure.names else None

    def call_facts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFacts:
        """What identifies a call with these arguments, which fit."""
        given = [*args, *kwargs.values()]
        return given, given, self.structure, self.key, self.signature


@dataclass(slots=True, eq=False)
class _Entry:
    """A remembered call; `native` runs it in C++, or `in_python` says why not; `waits` for the program."""

    call: RememberedCall
    native: NativeReplay | None = None
    in_python: str = ""
    waits: bool = False
    served: int = 0  # by replays in Python
    race: Race | None = None

    def look_for_native(self) -> None:
        variant, self.in_python = self.call.variant, ""
        try:
            self.native = native_replay(LIBRARY.module, variant.replay, self.call.check, variant.guards.holds)
            self.waits = self.native is None
        except NeedsPython as why:
            self.in_python, self.waits = str(why), False


class InlineCache:
    """Remembers some calls, the last one first. `audits`: whether replays are audited; `counts` has those of the
    callable's calls; `note` takes what its report is to say; `ordinary` knows whether its Python runs in eager."""

    def __init__(
        self,
        recorder: Recorder,
        audits: bool,
        counts: dict[str, int],
        note: Callable[[str], None],
        ordinary: OrdinaryCalls,
    ) -> None:
        self._note, self._ordinary = note, ordinary
        self._recorder, self._audits, self._counts = recorder, audits, counts
        self._entries: list[_Entry] = []
        self._served: dict[Variant, int] = {}  # calls by replays in Python, of variants that have no entry
        self._patience = _FIRST_PATIENCE

    @property
    def in_python(self) -> str:
        """Why the last call is not replayed in C++; empty where it is."""
        return next((entry.in_python for entry in self._entries), "")

    def runs_in_eager(self, leaves: Sequence[Any]) -> bool:
        """Whether the Python of a call with these arguments may run unrecorded."""
        return self._ordinary.holds(leaves) and not self._ordinary.are_on_lazy(leaves, {})

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Any) -> RememberedCall | None:
        """What is known of the call; None where it is, or may be, a different one."""
        for entry in self._entries:
            alike = entry.call
            if settings is not alike.settings:
                continue
            leaves = alike.leaves(args, kwargs) if kwargs or alike.structure.names else args
            if leaves is None or not alike.check.fit(leaves):
                continue
            if alike.variant in alike.signature.variants:
                return alike
            self._entries = [other for other in self._entries if other is not entry]  # it was dropped for others
            return None
        return None

    def replayed(self, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Any) -> tuple[Any] | None:
        """The value of a call that was replayed without Python; None where nothing was done. IN_EAGER as the value:
        its Python is to run, for it is faster, or has its turn in a race."""
        recorder, entries = self._recorder, self._entries
        driver: Any = recorder.driver
        for entry in entries:
            native, alike = entry.native, entry.call
            variant = alike.variant
            if (
                (native is None and entry.race is None)
                or settings is not alike.settings
                or not alike.signature.may_serve(variant)
                or variant.is_given_up
                or variant.needs_audit
                or (self._audits and variant.schedule.is_next())
                or recorder.entries
                or recorder.inputs
                or recorder.rematerializing
                or recorder.mode_depth
                or driver.listeners
            ):
                continue
            given = alike.leaves(args, kwargs) if kwargs or alike.structure.names else args
            race = entry.race
            if race is not None and given is not None and not BLOCKS.is_open_here() and alike.check.fit(given):
                is_over = race.is_over
                if race.is_pythons_turn():
                    if race.is_over and not is_over:
                        self._note(f"runs its Python, which is faster than its replays: {race}")
                    return (IN_EAGER,)
                if race.is_over:
                    entry.race = None
            leaves = None if given is None or native is None else native.call.run(given)
            if leaves is None or native is None:
                continue
            if self._audits:
                variant.schedule.due()
            alike.signature.served(variant, False)
            for storage in native.written:
                storage.version += 1
            if native.after is not None:
                native.after()
            count_run(native.compiled.run)
            if native.is_overtaken is not None and native.is_overtaken():
                entry.look_for_native()
            self._counts["replays"] += 1
            self._counts["native"] += 1
            if entry is not entries[0]:
                self._take_first(entry)
            return (variant.results(leaves),)
        return None

    def _take_first(self, entry: _Entry) -> None:
        """Lists are exchanged, never changed: other threads replay meanwhile, without a lock."""
        self._entries = [entry, *(other for other in self._entries if other is not entry)]

    def forget(self) -> None:
        """What was captured no longer holds."""
        self._entries = []
        self._served.clear()

    def served(self, given: list[Any], leaves: list[Any], key: Any, signature: CallSignature, variant: Variant) -> None:
        """A replay of the variant in Python served a call."""
        entries = self._entries
        for entry in entries:
            if entry.call.variant is variant:
                entry.served += 1
                if entry.waits and entry.served % _TURNS_OF_WAITING == 0:
                    entry.look_for_native()
                if entry is not entries[0]:
                    self._take_first(entry)
                return
        count = self._served[variant] = self._served.get(variant, 0) + 1
        if count < self._patience or given is not leaves or not is_ready() or LIBRARY.if_there() is None:
            if len(self._served) > _MOST_COUNTED:
                del self._served[next(iter(self._served))]
            return
        del self._served[variant]
        alike = _alike(given, key, signature, variant)
        if alike is None or len(self._entries) >= _MOST_ENTRIES:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        if alike is not None:
            entry = _Entry(alike, race=Race() if _may_race(variant) and self.runs_in_eager(given) else None)
            entry.look_for_native()
            self._entries = [entry, *entries[: _MOST_ENTRIES - 1]]


def _alike(given: list[Any], key: Any, signature: CallSignature, variant: Variant) -> RememberedCall | None:
    structure, settings = key[:2]
    if type(structure) is not Flat or variant.slot_names or variant.guards.moving:
        return None
    if any(variant.aliases):
        return None
    memories = {memory for memory in variant.guards.memories if memory > 0}
    try:
        check = LIBRARY.module.ArgumentCheck(tuple(given), set(_free_among(variant)), memories)
    except (RuntimeError, ValueError):  # one of them is of a kind whose facts are told in Python alone
        return None
    return RememberedCall(check, settings, structure, key, signature, variant)


def _may_race(variant: Variant) -> bool:
    """Not what draws (see `Race`), nor on a GPU, whose work is not in a call's time."""
    steps = variant.replay.template.steps
    traces = [step.trace for step in steps if isinstance(step, Segment)]
    traces += [step.joint.forward for step in steps if isinstance(step, JointRun)]
    draws = any(isinstance(step, KeepState | Rewind) or generators_of(step) for step in steps)
    return not draws and all(compute_device(trace) == "cpu" for trace in traces)


def _free_among(variant: Variant) -> Collection[int]:
    return {read.leaf for read in variant.replay.template.read_free if hasattr(read, "leaf")}


__all__ = ["IN_EAGER", "InlineCache", "RememberedCall"]

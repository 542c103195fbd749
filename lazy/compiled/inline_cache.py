"""The inline cache of a compiled callable: a call with arguments like those of the last one needs no facts.

Invariant: where `known` gives something, flattening the arguments and computing their facts would lead to the same
signature, and no argument is on memory that the variant's state is on. Where `replayed` gives something, the replay in
Python would have given the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchlazy.lazy.compiled.replay.native import NativeReplay, NeedsPython, native_replay
from torchlazy.lazy.compiled.template.arguments import Flat, Structure
from torchlazy.lazy.compiled.variants import CallSignature, Variant
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.run.driver import count_run
from torchlazy.runtime.native.identity_check import is_ready
from torchlazy.runtime.native.recorder_library import LIBRARY

_FIRST_PATIENCE = 2  # calls in a row of one variant before its arguments are remembered
_LONGEST_PATIENCE = 4096
_TURNS_OF_WAITING = 4

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


class InlineCache:
    """Remembers one call. `audits`: whether replays are audited; `counts` has those of the callable's calls."""

    def __init__(self, recorder: Recorder, audits: bool, counts: dict[str, int]) -> None:
        self._recorder, self._audits, self._counts = recorder, audits, counts
        self._alike: RememberedCall | None = None
        self._native: NativeReplay | None = None  # of its variant
        self.in_python = ""  # why there is none
        self._waits = False  # for the program
        self._variant: Variant | None = None
        self._served, self._patience = 0, _FIRST_PATIENCE

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Any) -> RememberedCall | None:
        """What is known of the call; None where it is, or may be, a different one."""
        alike = self._alike
        if alike is None or settings is not alike.settings:
            return None
        leaves = alike.leaves(args, kwargs) if kwargs or alike.structure.names else args
        if leaves is None or not alike.check.fit(leaves):
            return None
        if alike.variant not in alike.signature.variants:  # it was dropped for others
            self.forget()
            return None
        return alike

    def replayed(self, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Any) -> tuple[Any] | None:
        """The value of a call that was replayed without Python; None where nothing was done."""
        native, alike, recorder = self._native, self._alike, self._recorder
        driver: Any = recorder.driver
        if (
            native is None
            or alike is None
            or settings is not alike.settings
            or not alike.signature.is_first(alike.variant)
            or alike.variant.is_given_up
            or alike.variant.needs_audit
            or (self._audits and alike.variant.schedule.is_next())
            or recorder.entries
            or recorder.inputs
            or recorder.rematerializing
            or recorder.mode_depth
            or driver.listeners
        ):
            return None
        given = alike.leaves(args, kwargs) if kwargs or alike.structure.names else args
        leaves = None if given is None else native.call.run(given)
        if leaves is None:
            return None
        if self._audits:
            alike.variant.schedule.due()
        alike.signature.served(alike.variant, False)
        for storage in native.written:
            storage.version += 1
        if native.after is not None:
            native.after()
        count_run(native.compiled)
        self._counts["replays"] += 1
        self._counts["native"] += 1
        return (alike.variant.results(leaves),)

    def forget(self) -> None:
        """What was captured no longer holds."""
        self._alike = self._variant = self._native = None

    def served(self, given: list[Any], leaves: list[Any], key: Any, signature: CallSignature, variant: Variant) -> None:
        """A replay of the variant in Python served a call."""
        self._served = self._served + 1 if variant is self._variant else 1
        self._variant = variant
        if self._alike is not None and self._alike.variant is variant:
            if self._waits and self._served % _TURNS_OF_WAITING == 0:
                self._look_for_native()
        elif self._served >= self._patience and given is leaves and is_ready() and LIBRARY.if_there() is not None:
            self._served, self._patience = 0, min(2 * self._patience, _LONGEST_PATIENCE)
            self._alike, self._native = _alike(given, key, signature, variant), None
            self._look_for_native()

    def _look_for_native(self) -> None:
        alike, self._waits = self._alike, False
        if alike is None:
            return
        variant, self.in_python = alike.variant, ""
        try:
            self._native = native_replay(LIBRARY.module, variant.replay, alike.check, variant.guards.holds)
            self._waits = self._native is None
        except NeedsPython as why:
            self.in_python = str(why)


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


def _free_among(variant: Variant) -> Collection[int]:
    return {read.leaf for read in variant.replay.template.read_free if hasattr(read, "leaf")}


__all__ = ["InlineCache", "RememberedCall"]

"""The inline cache of a compiled callable: a call with arguments like those of the last one needs no facts.

Invariant: where `known` gives something, flattening the arguments and computing their facts would lead to the same
signature, and no argument is on memory that the variant's state is on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchlazy.lazy.compiled.template.arguments import Flat, Structure
from torchlazy.lazy.compiled.variants import CallSignature, Variant
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import tensor_readers
from torchlazy.runtime.native.argument_check import Look, argument_check
from torchlazy.runtime.native.identity_check import is_ready

_FIRST_PATIENCE = 2  # calls in a row of one variant before its arguments are remembered
_LONGEST_PATIENCE = 4096

# The arguments flat, as the caller passed them and as programs receive them, their structure, the key, the signature.
CallFacts: TypeAlias = tuple[list[Any], list[Any], Structure, Any, CallSignature]


@dataclass(frozen=True, slots=True, eq=False)
class RememberedCall:
    """What is known of a call whose arguments `fit`."""

    fit: Look
    settings: Any
    structure: Flat
    key: tuple[Any, ...]
    signature: CallSignature
    variant: Variant

    def call_facts(self, args: tuple[Any, ...]) -> CallFacts:
        """What identifies a call with these arguments, which fit."""
        given = list(args)
        return given, given, self.structure, self.key, self.signature


class InlineCache:
    """Remembers one call."""

    def __init__(self) -> None:
        self._alike: RememberedCall | None = None
        self._variant: Variant | None = None
        self._served, self._patience = 0, _FIRST_PATIENCE

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Any) -> RememberedCall | None:
        """What is known of the call; None where it is, or may be, a different one."""
        alike = self._alike
        if alike is None or kwargs or settings is not alike.settings or not alike.fit(args):
            return None
        if alike.variant not in alike.signature.variants:  # it was dropped for others
            self.forget()
            return None
        return alike

    def forget(self) -> None:
        """What was captured no longer holds."""
        self._alike = self._variant = None

    def served(self, given: list[Any], leaves: list[Any], key: Any, signature: CallSignature, variant: Variant) -> None:
        """A call was identified by its facts, and the variant served it."""
        self._served = self._served + 1 if variant is self._variant else 1
        self._variant = variant
        if self._served < self._patience or given is not leaves or not is_ready():
            return
        self._served, self._patience = 0, min(2 * self._patience, _LONGEST_PATIENCE)
        self._alike = _alike(given, key, signature, variant)


def _alike(given: list[Any], key: Any, signature: CallSignature, variant: Variant) -> RememberedCall | None:
    structure, settings = key[:2]
    if type(structure) is not Flat or structure.names or variant.slot_names or variant.guards.moving:
        return None
    if any(variant.aliases):
        return None
    look = argument_check(tensor_readers(), given, _free_among(variant), LazyTensor, variant.guards.memories)
    return None if look is None else RememberedCall(look, settings, structure, key, signature, variant)


def _free_among(variant: Variant) -> Collection[int]:
    return {read.leaf for read in variant.replay.template.read_free if hasattr(read, "leaf")}


__all__ = ["InlineCache", "RememberedCall"]

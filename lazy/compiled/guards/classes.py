"""Discovery of classes: which members, bases and methods code can read of the user's classes and of library classes.

Of the user's classes: the members that some code names, the order of the bases, the number of members. Of library
classes with instances: the methods that run when modules and optimizers are called.

Invariant: a member of a user's class is left out only where no code of the call can ask for it: see `NamesAskedFor`.
"""

from __future__ import annotations

import enum
import functools
import types
from typing import Any

import torch
from torchlazy.lazy.compiled.guards.code import functions_of, is_class_value, is_method
from torchlazy.lazy.compiled.guards.globals import GlobalDiscovery, dict_of_class
from torchlazy.lazy.compiled.guards.process import Steady
from torchlazy.lazy.compiled.guards.reached import GuardedPlace, getter
from torchlazy.lazy.trace.library_code import is_installed, is_library

_RUN = ("forward", "__call__", "_call_impl", "step", "zero_grad", "__getattr__")  # by calls of modules and optimizers
_SUBCLASSES = ("__subclasses__",)
_PASSIVE = frozenset({object, type, enum.EnumMeta, enum.Enum, enum.Flag, enum.IntEnum, enum.IntFlag})


class ClassDiscovery(GlobalDiscovery):
    """The part of discovery that looks at classes."""

    def __init__(self, slots: frozenset[str], appended: frozenset[str]) -> None:
        super().__init__(slots, appended)
        self._seen_classes: dict[type, bool] = {}  # and whether it has instances that the call can reach
        self._unnamed_members: list[tuple[type, type, list[str], int, bool]] = []  # not named by code so far
        self._searched: set[type] = set()  # for derived classes
        self._library_classes: dict[type, list[str]] = {}  # and their methods that no code has called so far

    def class_code(self, kind: type, depth: int, *, has_instances: bool = True) -> None:
        """The class and its bases. Of a class that is only named, members that code can ask for count; of one that has
        instances, those that Python or a library calls too."""
        if self._seen_classes.get(kind, False) >= has_instances and kind in self._seen_classes:
            return
        for base in kind.__mro__:
            known = self._seen_classes.get(base)
            if known is not None and known >= has_instances:
                continue
            self._seen_classes[base] = has_instances
            if is_library(base):
                if known is None:
                    self._library_class(base)
                continue
            own = dict_of_class(base)
            members = [name for name, member in own.items() if is_class_value(name, member)]
            if issubclass(base, enum.Enum):
                members = [name for name in members if not name.startswith("_")]
            if issubclass(base, enum.Enum):  # `Kind(1)`, `list(Kind)`
                for name, member in base.__members__.items():
                    self.visit(member, f"{base.__qualname__}.{name}", depth, rooted=False)
            if known is None:
                self.reached.keep.append(base)
                self.reached.fixtures.append(_bases(base))
                self.reached.classes.append((own, f"the number of members of {base.__qualname__}"))
            if has_instances:
                for name in members:
                    self.names.has_member(base, name, own[name], kind)
            self._members(base, kind, members, depth, has_instances)
        maker = type(kind)
        if not is_library(maker):
            self.class_code(maker, depth)

    def named_members(self) -> None:
        """Look again at members that no code had named: code found since may name them."""
        waiting, self._unnamed_members = self._unnamed_members, []
        for base, kind, names, depth, has_instances in waiting:
            self._members(base, kind, names, depth, has_instances)
        for base, left in self._library_classes.items():
            self._library_classes[base] = self._library_members(base, left)
        if self.names.standing(_SUBCLASSES):
            for kind in [kind for kind in self._seen_classes if kind not in self._searched and not is_library(kind)]:
                self._searched.add(kind)
                told = f"the classes derived from {kind.__qualname__}"
                self.place(None, Steady(functools.partial(_derived_from, kind)), (told,), 1, False)

    def _members(self, base: type, kind: type, names: list[str], depth: int, has_instances: bool) -> None:
        own = dict_of_class(base)
        asked = set(self.names.standing(names) if is_installed(base.__module__) else self.names.among(names))
        if has_instances:
            asked.update(name for name in names if self._asked_by_libraries(name, own[name], kind))
        else:
            asked.update(name for name in names if name.startswith("__") and is_method(own[name]))
        if len(asked) < len(names):
            left = [name for name in names if name not in asked]
            self._unnamed_members.append((base, kind, left, depth, has_instances))
        found = [name for name in names if name in asked and (id(own), name) not in self.seen_names]
        if not found:
            return
        self.seen_names.update((id(own), name) for name in found)
        self.place(
            base, getter(own, found), (f"{base.__qualname__}.{name}" for name in found), depth, False,
            lambda position, value: setattr(base, found[position], value),
            of=own, keys=found, runs=not has_instances,
        )  # fmt: skip
        for name in found:
            for function in functions_of(own[name]):
                self.visit(function, f"{base.__qualname__}.{name}", depth, rooted=False, runs=not has_instances)

    def _asked_by_libraries(self, name: str, member: Any, kind: type) -> bool:
        """Whether Python or a library may read the member without any of the user's code naming it."""
        if is_method(member):
            return self.names.may_call(name, kind)
        return any(is_library(base) and base not in _PASSIVE for base in kind.__mro__)

    def _library_class(self, base: type) -> None:
        """A library's class of modules or optimizers: a user may have replaced its methods."""
        if not issubclass(base, (torch.nn.Module, torch.optim.Optimizer)):
            return
        own = dict_of_class(base)
        self.names.has_library_members(base)
        self.reached.classes.append((own, f"the number of members of {base.__qualname__}"))
        methods = [name for name, member in own.items() if name in _RUN or is_method(member)]
        self._library_classes[base] = self._library_members(base, methods)

    def _library_members(self, base: type, names: list[str]) -> list[str]:
        """Look at the methods that a call runs; returns the other names."""
        own = dict_of_class(base)
        found = [name for name in names if name in _RUN or self.names.is_called(name)]
        self.fixture(own, [(name, f"{base.__qualname__}.{name}") for name in found])
        for name in found:
            for function in (own[name], *functions_of(own[name])):
                if isinstance(function, types.FunctionType):
                    self.put_there(function, f"{base.__qualname__}.{name}", 1)
                    self.library_names(function)
        return [name for name in names if name not in set(found)]


BASES = ("__mro__",)


def _derived_from(kind: type) -> tuple[type, ...]:
    return tuple(type.__subclasses__(kind))


def _bases(kind: type) -> GuardedPlace:
    told = f"the bases of {kind.__qualname__}"
    return GuardedPlace(kind, lambda: (kind.__mro__,), (told,), of=kind, attributes=BASES)

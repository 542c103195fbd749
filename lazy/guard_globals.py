"""What functions read by global names: their module's globals, attributes of other modules, what is not there yet.

A name that a library answers for (`F.relu`, `math.sqrt`, a method of `torch.Tensor`) is looked at too: somebody may
have put another function in its place. What is in it is not.

Invariant: only names that stand in the code count; the modules of libraries are never searched for more.
"""

from __future__ import annotations

import gc
import os
import types
from typing import Any

import torch
from torchlazy.lazy.guard_code import (
    global_names,
    is_guarded_global,
    is_installed,
    is_library,
    is_library_function,
    is_library_name,
    names_in,
)
from torchlazy.lazy.guard_places import Places, getter
from torchlazy.lazy.guard_reached import Place

# Plain objects within plain objects, from a global on: of the program itself, and of installed packages.
_DEPTH, _DEPTH_INSTALLED = 6, 2


def dict_of_class(kind: type) -> dict[str, Any]:
    """The dict behind a class's read-only view of it: what C code looks at. It is only looked at here too."""
    found: dict[str, Any] = gc.get_referents(kind.__dict__)[0]
    return found


class GlobalWalk(Places):
    """The part of the walk that starts at the names in code."""

    def __init__(self, slots: frozenset[str], appended: frozenset[str]) -> None:
        super().__init__(slots, appended)
        self.seen_names: set[tuple[int, str]] = set()
        self._absent: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}

    def globals_of(self, function: types.FunctionType, depth: int) -> None:
        """What the function's code, and functions defined in it, reads by global names."""
        space = function.__globals__
        loaded = global_names(function.__code__)
        depth = min(depth, _DEPTH_INSTALLED if is_installed(function.__module__) else _DEPTH)
        missing = [name for name in loaded if name not in space]
        if missing:
            self._absent.setdefault(id(space), (space, {}))[1].update(dict.fromkeys(sorted(missing)))
        names = [name for name in names_in(function.__code__) if name in space and name in loaded]
        for name in names:
            value = space[name]
            if isinstance(value, type) and not is_library(value):
                self.names.runs(value)
            if (id(space), name) in self.seen_names:
                continue
            self.seen_names.add((id(space), name))
            told = f"{name} (global of {function.__module__})"
            if is_guarded_global(value):
                self.place(
                    space, getter(space, [name]), (told,), depth, False,
                    lambda _, value, name=name: space.__setitem__(name, value),  # type: ignore[misc]
                    of=space, sources=(f"of[{name!r}]",),
                )  # fmt: skip
            else:
                self.fixture(space, [(name, told)])
                self.behind(value, told, depth)
        for name in names:
            if isinstance(space[name], types.ModuleType):
                self._attributes_of(space[name], name, function.__code__, depth)
        self._methods_of_tensors(function.__code__, depth)

    def end_of_names(self) -> None:
        """After the last function: globals that some code names and that are not there, but for Python's own."""
        for space, names in self._absent.values():
            keys, wanted = space.keys(), tuple(names)
            told = f"whether none of these is a global of {space.get('__name__')}: {', '.join(wanted[:4])} ..."
            read = lambda keys=keys, wanted=wanted: (keys.isdisjoint(wanted),)  # noqa: E731
            place = Place(
                space, read, (told,), of=keys, sources=(f"of.isdisjoint({wanted!r})",), absent=(space, wanted)
            )
            self.reached.fixtures.append(place)

    def _attributes_of(self, module: types.ModuleType, path: str, code: types.CodeType, depth: int) -> None:
        """Attributes of a module that the code may name, and of modules in it: `torch.nn.functional.relu`."""
        todo, met = [(module, path)], {id(module)}
        while todo:
            module, path = todo.pop()
            own = module.__dict__
            is_foreign = is_library_name(module.__name__)
            for attribute in names_in(code):
                if attribute not in own:
                    continue
                found = own[attribute]
                if isinstance(found, types.ModuleType) and id(found) not in met:
                    met.add(id(found))
                    todo.append((found, f"{path}.{attribute}"))
                if isinstance(found, type) and not is_library(found):
                    self.names.runs(found)
                if (id(module), attribute) in self.seen_names:
                    continue
                self.seen_names.add((id(module), attribute))
                told = f"{path}.{attribute}"
                if is_guarded_global(found) and not is_foreign:
                    self.place(
                        module, getter(own, [attribute]), (told,), depth, False, of=own, sources=(f"of[{attribute!r}]",)
                    )
                else:
                    self.fixture(own, [(attribute, told)])
                    self.behind(found, told, depth)

    def _methods_of_tensors(self, code: types.CodeType, depth: int) -> None:
        """Methods of tensors that the code may name: a user may have put others in their place."""
        own = dict_of_class(torch.Tensor)
        if (id(own), "") not in self.seen_names:
            self.seen_names.add((id(own), ""))
            self.reached.classes.append((own, "the number of members of torch.Tensor"))
        for name in names_in(code):
            if name in own and (id(own), name) not in self.seen_names:
                self.seen_names.add((id(own), name))
                self.fixture(own, [(name, f"torch.Tensor.{name}")])
                self.behind(own[name], f"torch.Tensor.{name}", depth)

    def behind(self, found: Any, path: str, depth: int) -> None:
        """What a library's name stands for where that is the user's doing: a function put in its place, settings of
        the process."""
        is_own = isinstance(found, types.FunctionType) and not is_library_function(found)
        if is_own and not is_library_name(found.__globals__.get("__name__")):
            self.visit(found, path, depth, rooted=False)
        elif found is os.environ or found is os.getenv:
            self.visit(os.environ, "os.environ", depth, rooted=True)

"""Discovery of global names: a module's globals, attributes of other modules, and names that are not defined yet.

A name of a library (`F.relu`, `math.sqrt`, a method of `torch.Tensor`) is guarded too, since the user may have patched
it. What is in it is not.

Invariant: only names that occur in the code count; the modules of libraries are never searched for more.
"""

from __future__ import annotations

import builtins
import collections
import contextvars
import functools
import gc
import inspect
import itertools
import os
import sys
import types
from collections.abc import Callable, Container
from typing import Any

import torch
from torchlazy.lazy.compiled.guards.code import (
    asks_for_any,
    asks_for_any_global,
    global_names,
    imported_names,
    is_guarded_global,
    names_in,
    owners_asked,
    strings_named,
)
from torchlazy.lazy.compiled.guards.library_state import Registrations, abstract_class, why_unrepeatable
from torchlazy.lazy.compiled.guards.process import Steady, process_reader, setting_of, settings_among
from torchlazy.lazy.compiled.guards.reached import DiscoveryBase, GuardedPlace, getter
from torchlazy.lazy.trace.library_code import is_installed, is_library, is_library_function, is_library_name

# Plain objects within plain objects, from a global on: of the program itself, and of installed packages.
_DEPTH, _DEPTH_INSTALLED = 16, 2
_PATCHED = ("torch.nn.", "torch.optim.")  # modules whose calls of other functions of torch are guarded
_FLAGS = frozenset({bool, int, type(None)})  # types of flags in these modules: `parametrize._cache_enabled`
# Types of a library's variables that any code may change: `sys.argv`.
_HOLDERS = frozenset({list, dict, set, collections.deque, contextvars.ContextVar})


def dict_of_class(kind: type) -> dict[str, Any]:
    """The dict behind a class's read-only view of it, for C code to read. It is never changed."""
    found: dict[str, Any] = gc.get_referents(kind.__dict__)[0]
    return found


class GlobalDiscovery(DiscoveryBase):
    """The part of discovery that starts at the names in code."""

    def __init__(self, slots: frozenset[str], appended: frozenset[str]) -> None:
        super().__init__(slots, appended)
        self.seen_names: set[tuple[int, str]] = set()
        self.held_modules: list[types.ModuleType] = []  # held by closures, objects, arguments
        self._seen_modules: set[str] = set()  # found by their names
        self._absent: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self._seen_readers: set[str] = set()  # what is read of the process
        self._seen_library: set[types.CodeType] = set()

    def globals_of(self, function: types.FunctionType, depth: int) -> None:
        """What the function's code, and functions defined in it, reads by global names."""
        space, code = function.__globals__, function.__code__
        by_string = strings_named(code)
        # "@pytest_ar" and its like are of rewritten asserts, for the message of one that fails.
        loaded = frozenset(name for name in global_names(code).union(by_string) if not name.startswith("@py"))
        depth = min(depth, _DEPTH_INSTALLED if is_installed(function.__module__) else _DEPTH)
        missing = [name for name in loaded if name not in space]
        if missing:
            self._absent.setdefault(id(space), (space, {}))[1].update(dict.fromkeys(sorted(missing)))
        of_python = builtins.__dict__
        for name in missing:
            if name in of_python and (id(of_python), name) not in self.seen_names:
                self.seen_names.add((id(of_python), name))
                self.fixture(of_python, [(name, f"Python's {name}")])
                self.behind(of_python[name], name, depth)
        names = [name for name in dict.fromkeys((*names_in(code), *by_string)) if name in space and name in loaded]
        if asks_for_any_global(code) and not is_installed(function.__module__):
            names = [name for name in space if name in names or not name.startswith("__")]
            if (id(space), "") not in self.seen_names:
                self.seen_names.add((id(space), ""))
                self.reached.classes.append((space, f"the number of globals of {function.__module__}"))
        for name in names:
            self._named(space, name, f"{name} (global of {function.__module__})", space, depth, may_change=True)
        for name in names:
            if isinstance(space[name], types.ModuleType):
                self.attributes_of(space[name], name, code, depth)
        self._modules_by_name(function, depth)
        self._methods_of_tensors(code, depth)

    def _modules_by_name(self, function: types.FunctionType, depth: int) -> None:
        """Modules that the code imports as it runs, or reads from `sys.modules`."""
        code, package = function.__code__, str(function.__globals__.get("__package__") or "")
        wanted = list(imported_names(code))
        if "modules" in code.co_names or "import_module" in code.co_names:
            wanted += [text for text in code.co_consts if type(text) is str]
            wanted.append(str(function.__globals__.get("__name__")))
        parents = ["", *itertools.accumulate(package.split("."), "{}.{}".format)]
        for name in wanted:
            candidates = [f"{parent}.{name}" if parent else name for parent in parents]
            there = [found for found in candidates if isinstance(sys.modules.get(found), types.ModuleType)]
            for found in there:
                if found not in self._seen_modules:
                    self._seen_modules.add(found)
                    self.fixture(sys.modules, [(found, f"the module {found}")])
                self.attributes_of(sys.modules[found], found, code, depth)
            if not there:  # the call may be the first to import it, and then is captured again
                self._absent.setdefault(id(sys.modules), (sys.modules, {}))[1].update(dict.fromkeys(candidates))

    def end_of_names(self) -> None:
        """After the last function: globals that some code names and that are not defined, other than builtins; and what
        is registered with the abstract classes that were found."""
        if self.abstract:
            told = "which classes are registered with abstract ones"
            read_registered = Registrations(self.abstract)
            self.reached.fixtures.append(GuardedPlace(None, read_registered, (told,)))
        for module in self.held_modules:
            own = module.__dict__
            missing = dict.fromkeys(self.names.missing_in(own))
            self._absent.setdefault(id(own), (own, {}))[1].update(missing)
        for space, names in self._absent.values():
            if not names:
                continue
            keys, wanted = space.keys(), tuple(names)
            where = "imported" if space is sys.modules else f"a global of {space.get('__name__')}"
            told = f"whether none of these is {where}: {', '.join(wanted[:4])} ..."
            read = lambda keys=keys, wanted=wanted: (keys.isdisjoint(wanted),)  # noqa: E731
            self.reached.fixtures.append(GuardedPlace(space, read, (told,), absent=(space, wanted)))

    def attributes_of(self, module: types.ModuleType, path: str, code: types.CodeType, depth: int) -> None:
        """Attributes of a module that the code may name, and of modules in it: `torch.nn.functional.relu`."""
        todo, met = [(module, path)], {id(module)}
        while todo:
            module, path = todo.pop()
            own = module.__dict__
            is_foreign = is_library_name(module.__name__)
            by_string = strings_named(code)
            wanted = dict.fromkeys((*names_in(code), *by_string))
            if not is_foreign:
                missing = [name for name in by_string if name not in own]
                self._absent.setdefault(id(own), (own, {}))[1].update(dict.fromkeys(missing))
                if "__getattr__" in own:  # it provides missing attributes
                    self._named(own, "__getattr__", f"{path}.__getattr__", module, depth, may_change=True)
                if not is_installed(module.__name__) and asks_for_any(code):
                    wanted.update(dict.fromkeys(name for name in own if not name.startswith("__")))
            elif asks_for_any(code) and path.rpartition(".")[2] in owners_asked(code):
                self._functions_in(own, path)
            self._settings_of(module, path, list(wanted))
            for attribute in wanted:
                if attribute not in own:
                    continue
                found = own[attribute]
                self._settings_of(found, f"{path}.{attribute}", list(wanted))
                if isinstance(found, types.ModuleType) and id(found) not in met:
                    met.add(id(found))
                    todo.append((found, f"{path}.{attribute}"))
                self._named(own, attribute, f"{path}.{attribute}", module, depth, may_change=not is_foreign)

    def _functions_in(self, own: dict[str, Any], path: str) -> None:
        """The functions of a library's module: code asks for one by a name that it computes."""
        for name, found in own.items():
            if callable(found) and not name.startswith("__") and (id(own), name) not in self.seen_names:
                self.seen_names.add((id(own), name))
                self.fixture(own, [(name, f"{path}.{name}")])
                self.put_there(found, f"{path}.{name}", 1)

    def _named(self, space: dict[str, Any], name: str, told: str, owner: Any, depth: int, *, may_change: bool) -> None:
        """An entry of a module's dict that some code names. `may_change`: calls may store another value there."""
        value = space[name]
        if isinstance(value, type) and not is_library(value):
            self.names.runs(value)
        abstract = abstract_class(value)
        if abstract is not None:
            self.abstract[abstract] = None
        if (id(space), name) in self.seen_names:
            return
        self.seen_names.add((id(space), name))
        if may_change and is_guarded_global(value):
            self.place(
                owner, getter(space, [name]), (told,), depth, False, lambda _, value: space.__setitem__(name, value),
                of=space, keys=(name,),
            )  # fmt: skip
        else:
            self.fixture(space, [(name, told)])
            self.behind(value, told, depth)
            renamed = isinstance(value, types.BuiltinFunctionType) and name != value.__name__
            if renamed and (why := why_unrepeatable(value)):
                self.reached.unrepeatable.append(f"its code names {told}, {why}")

    def _methods_of_tensors(self, code: types.CodeType, depth: int) -> None:
        """Methods of tensors that the code may name: the user may have patched them."""
        own = self._members_of_tensors()
        for name in names_in(code):
            if name in own and (id(own), name) not in self.seen_names:
                self.seen_names.add((id(own), name))
                self.fixture(own, [(name, f"torch.Tensor.{name}")])
                self.behind(own[name], f"torch.Tensor.{name}", depth)

    def _members_of_tensors(self) -> dict[str, Any]:
        own = dict_of_class(torch.Tensor)
        if (id(own), "") not in self.seen_names:
            self.seen_names.add((id(own), ""))
            self.reached.classes.append((own, "the number of members of torch.Tensor"))
        return own

    def put_there(self, found: Any, path: str, depth: int) -> bool:
        """Visit a function of the user's that replaces a library's; whether it is one."""
        is_own = isinstance(found, types.FunctionType) and not is_library_function(found)
        if is_own and not is_library_name(found.__globals__.get("__name__")):
            self.visit(found, path, depth, rooted=False)
            return True
        return False

    def behind(self, found: Any, path: str, depth: int) -> None:
        """What the user may have changed behind a library's name: a function that replaces it, settings of the
        process."""
        if self.put_there(found, path, depth):
            return
        if found is os.environ or found is os.getenv:
            self.visit(os.environ, "os.environ", depth, rooted=True)
        elif found is os.environb or found is os.getenvb:
            self.visit(os.environ, "os.environb", depth, rooted=True)
        elif type(found) in _HOLDERS and found is not sys.modules:
            self.visit(found, path, depth, rooted=False)
        else:
            reader = process_reader(found)
            if reader is not None:
                self._process(*reader)

    def _settings_of(self, owner: Any, path: str, names: list[str]) -> None:
        """Attributes of a settings module or object that read the process's settings."""
        for name in settings_among(owner, names):
            self._process(f"{path}.{name}", functools.partial(setting_of, owner, name))

    def _process(self, told: str, read: Callable[[], Any]) -> None:
        if told not in self._seen_readers:
            self._seen_readers.add(told)
            self.reached.fixtures.append(GuardedPlace(None, Steady(read), (told,)))

    def library_names(self, function: types.FunctionType) -> None:
        """Functions of torch that its own modules and optimizers call by name (`F.linear` in `nn.Linear`): the user may
        have patched them."""
        todo = [function]
        while todo:
            function = inspect.unwrap(todo.pop())
            if not isinstance(function, types.FunctionType):  # a C function
                continue
            code = function.__code__
            if code in self._seen_library or not str(function.__module__).startswith(_PATCHED):
                continue
            self._seen_library.add(code)
            names, space = names_in(code), function.__globals__
            here: Container[str] = global_names(code).intersection(space)
            spaces = [(space, str(function.__module__), here)]
            of_tensors = self._members_of_tensors()
            spaces.append((of_tensors, "torch.Tensor", of_tensors))
            met = {id(space)}
            while spaces:
                space, path, here = spaces.pop()
                for name in names:
                    found = space.get(name) if name in here else None
                    if isinstance(found, types.ModuleType):
                        if id(found.__dict__) not in met and is_library_name(found.__name__):
                            met.add(id(found.__dict__))
                            spaces.append((found.__dict__, found.__name__, found.__dict__))
                        continue
                    if name not in here or not (callable(found) or type(found) in _FLAGS):
                        continue
                    if (id(space), name) not in self.seen_names:
                        self.seen_names.add((id(space), name))
                        self.fixture(space, [(name, f"{path}.{name}")])
                        self.put_there(found, f"{path}.{name}", 1)
                    if isinstance(found, types.FunctionType):
                        todo.append(found)

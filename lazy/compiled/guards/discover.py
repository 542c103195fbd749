"""Discovery: everything that a callable can read by name, for guards.

It starts at the closure cells, globals and defaults that the callable's code names, the object that it is bound to and
its arguments, and goes on to modules, optimizers, containers and plain objects; of these it visits the attributes that
some code found so far names.

Invariant: discovery changes nothing and runs none of the user's code (no property, no `__getattr__`). What it skips
(objects of libraries, attributes beyond `_DEPTH` plain objects) is left to audits.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torchlazy.lazy.compiled.guards.bare_containers import BareItems, base_of
from torchlazy.lazy.compiled.guards.classes import ClassDiscovery
from torchlazy.lazy.compiled.guards.code import SETTINGS, STATEFUL, names_in, slots_of
from torchlazy.lazy.compiled.guards.globals import dict_of_class
from torchlazy.lazy.compiled.guards.library_state import (
    held_by,
    inside,
    is_cache,
    is_memory,
    is_weak,
    names_asked_by,
    number_held,
    settings_of_logger,
    state_reader,
    targets_of,
    why_unrepeatable,
)
from torchlazy.lazy.compiled.guards.process import Steady
from torchlazy.lazy.compiled.guards.reached import (
    GONE,
    GuardedPlace,
    Reached,
    TooMuch,
    content_slot,
    getter,
    is_plain_key,
    is_simple,
)
from torchlazy.lazy.record.tensor import attributes_of
from torchlazy.lazy.torch_private.dispatch import global_hooks
from torchlazy.lazy.torch_private.distributed import FACTS, FIELDS, groups_of, is_distributed, is_sharded
from torchlazy.lazy.torch_private.holders import is_scripted
from torchlazy.lazy.trace.library_code import is_installed, is_library, is_library_function, is_library_name

_DEPTH = 32  # plain objects within plain objects
_SMALL = 256  # items of a container that is reached only by a global name
# Internals of nn.Module; parameters, buffers and submodules are visited as dictionaries of their own.
_MACHINERY = frozenset(torch.nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")
_LOADED = ("param_groups", "state")  # loading an optimizer's state replaces them
# What only saving and loading a module's state reads.
_SAVING = (
    "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


KEPT_ON_OWNER = "_torchlazy_compiled_methods"  # where an object keeps its compiled methods


def discover(
    function: Any,
    arguments: Iterable[tuple[str, Any]],
    slots: frozenset[str] = frozenset(),
    appended: frozenset[str] = frozenset(),
) -> Reached:
    """All that `function` and the named arguments reach. Raises TooMuch.

    `slots` are names of places and containers whose contents calls replace, `appended` those of lists that calls only
    append to: they are listed, and their contents are not visited.
    """
    walker = _Discovery(slots, appended)
    walker.reached.assumed = slots, appended
    for name, hooks in global_hooks():
        if hooks:
            walker.visit(hooks, name, _DEPTH, rooted=True)
        else:
            walker.reached.empty_hooks.append(hooks)
    try:
        walker.visit(function, getattr(function, "__qualname__", type(function).__name__), _DEPTH, rooted=True)
        for name, value in arguments:
            walker.visit(value, name, _DEPTH, rooted=True)
        walker.run()
    except ReferenceError:  # a proxy raises it whatever it is asked
        raise TooMuch("its code names a weak proxy of what is gone") from None
    return walker.reached


class _Discovery(ClassDiscovery):
    def __init__(self, slots: frozenset[str], appended: frozenset[str]) -> None:
        super().__init__(slots, appended)
        self.unnamed: list[tuple[Any, list[str], str, int]] = []  # attributes that no code has named so far
        self.unnamed_items: list[tuple[dict[Any, Any], list[str], str, int]] = []
        self.modules: list[tuple[torch.nn.Module, str, int]] = []
        self.functions: list[tuple[types.FunctionType, str]] = []
        self.seeded: list[tuple[torch.Generator, str]] = []
        self.held_libraries: list[tuple[types.ModuleType, str]] = []  # modules of libraries in closures and objects
        self.weak: list[tuple[Any, str, int, bool]] = []  # weak references, and containers of such

    def run(self) -> None:
        position = 0
        while True:
            while position < len(self.pending):
                value, path, depth, rooted = self.pending[position]
                position += 1
                self._expand(value, path, depth, rooted)
            waiting, self.unnamed = self.unnamed, []
            for owner, names, path, depth in waiting:  # code found later may name them
                self._named_attributes(owner, names, path, depth)
            items, self.unnamed_items = self.unnamed_items, []
            for table, keys, path, depth in items:
                self._named_items(table, keys, path, depth)
            self.named_members()
            for name in filter(self.names.is_called, _SAVING):
                for module, path, depth in self.modules:
                    self.visit(module.__dict__.get(name), f"{path}.{name}", depth, rooted=True)
            if position == len(self.pending):
                self._weakly_held()
                self._rarely_named()
            if position == len(self.pending):
                self.end_of_names()
                return

    def _weakly_held(self) -> None:
        """What weak references refer to. Guards would keep alive what nothing else holds: such a call is refused."""
        waiting, self.weak = self.weak, []
        for value, path, depth, rooted in waiting:
            if any(id(one) not in self.seen for one in targets_of(value)):
                why = "a weak reference to what nothing else that it reaches holds"
                self.reached.unrepeatable.append(f"its code names {path}, {why}")
            else:
                self._hidden(value, path, depth, rooted)

    def _rarely_named(self) -> None:
        """What functions and classes tell of themselves, first seeds of generators, and what modules of libraries give
        that are no globals, where code names these."""
        asked = self.names.standing(_TOLD)
        for function, path in self.functions if asked else ():
            read = functools.partial(_told_by, function, asked)
            self.place(function, read, (f"{path}.{name}" for name in asked), 1, False)
        for generator, path in self.seeded if self.names.standing(("initial_seed",)) else ():
            self.place(generator, functools.partial(_first_seed, generator), (f"the seed of {path}",), 1, False)
        named = [kind for kind in self._seen_classes if not is_installed(kind.__module__)] if asked else []
        if named:
            told = Steady(lambda: tuple((kind.__name__, kind.__qualname__) for kind in named))
            self.reached.fixtures.append(GuardedPlace(None, told, ("names of classes",)))
        for module, path in self.held_libraries:
            for code in self.reached.codes:
                self.attributes_of(module, path, code, 1)
        self.functions.clear()
        self.seeded.clear()
        for kind in self._seen_classes if self.names.standing(("fields", _FIELDS)) else ():
            if _FIELDS in (own := dict_of_class(kind)):
                self.visit(own[_FIELDS], f"{kind.__qualname__}.{_FIELDS}", 2, rooted=True)

    def _expand(self, value: Any, path: str, depth: int, rooted: bool) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value, path, depth)
        elif isinstance(value, torch.nn.Module):
            self._module(value, path, depth)
        elif isinstance(value, torch.optim.Optimizer) and value.__dict__.keys() >= set(_LOADED):  # else it wraps one
            self._optimizer(value, path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path, depth, rooted)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__, _owner_path(path), depth, rooted=rooted)
            self.visit(value.__func__, path, depth, rooted=rooted)
        elif isinstance(value, functools.partial):
            self.place(
                value, lambda: (value.func, value.args, value.keywords), (f"{path}.{name}" for name in _PARTIAL),
                depth, rooted, of=value, attributes=_PARTIAL,
            )  # fmt: skip
            self._attributes(value, list(value.__dict__), path, depth - 1)
        elif isinstance(value, functools.partialmethod):
            self._places_of(value, [name for name in _PARTIAL if name in value.__dict__], path, depth)
        elif isinstance(value, _CONTAINERS):
            self._container(value, path, depth, rooted)
            if not is_library(type(value)):
                self._object(value, path, depth)
        elif isinstance(value, numpy.ndarray) or is_memory(value):
            self.reached.arrays.append((value, path))
        elif isinstance(value, type):
            if depth and not is_installed(value.__module__):
                # An autograd.Function is called by the library, through an object that it makes.
                self.class_code(value, depth - 1, has_instances=issubclass(value, torch.autograd.Function))
        elif isinstance(value, types.ModuleType):
            if depth and not is_library_name(value.__name__):
                self._named_attributes(value, list(value.__dict__), path, depth - 1)
                if "__getattr__" in value.__dict__:  # it provides missing attributes
                    self._places_of(value, ["__getattr__"], path, depth - 1)
                self.held_modules.append(value)
            elif depth:
                self.held_libraries.append((value, path))
        elif isinstance(value, STATEFUL):
            self._attributes(value, list(value.__dict__), path, depth - 1)
        elif self._of_python(value, path, depth, rooted):
            return
        elif is_library(type(value)) and not isinstance(value, SETTINGS):
            wrapped = (_own_of(value) or {}).get("__wrapped__")
            if wrapped is not None:  # a compiled callable, a cached function
                self.visit(wrapped, path, depth, rooted=rooted)
        elif depth:
            self._object(value, path, depth)

    def _of_python(self, value: Any, path: str, depth: int, rooted: bool) -> bool:
        """Visit an object of Python's own libraries; whether it is one."""
        if isinstance(value, torch.Generator):
            self.seeded.append((value, path))
        if is_weak(value):
            self.weak.append((value, path, depth, rooted))
            return True
        if isinstance(value, types.BuiltinFunctionType):
            self.behind(value, path, depth)
        why = why_unrepeatable(value)
        if why:
            self.reached.unrepeatable.append(f"its code names {path}, {why}")
        asked = names_asked_by(value)
        if asked:
            self.names.asks(asked)
        read_state = state_reader(value)
        if read_state is not None:
            self.reached.generators.append((read_state, path))
        if is_cache(value):
            self.reached.caches.append((value, path))
        levels = settings_of_logger(value)
        for space, named in levels:
            self.fixture(space, [(key, told.format(path)) for key, told in named])
        is_known = self._hidden(value, path, depth, rooted)
        return bool(why or asked or levels) or is_known

    def _hidden(self, value: Any, path: str, depth: int, rooted: bool) -> bool:
        """Visit what the object holds in a way of its own; whether it is of such a kind."""
        held, count, one = held_by(value), number_held(value), inside(value)
        if held is not None:
            self.place(value, held.read, (name.format(path) for name in held.names), depth, rooted, held.store)
        if count is not None:
            self.place(value, lambda: (count(),), (f"the number of attributes of {path}",), depth, rooted)
        if one is not GONE:
            self.visit(one, path, depth, rooted=rooted)
        return one is not GONE or held is not None

    def _tensor(self, tensor: torch.Tensor, path: str, depth: int) -> None:
        self.reached.tensors[id(tensor)] = (tensor, path)
        names, own = attributes_of(tensor), tensor.__dict__
        if is_distributed(tensor):
            self.place(
                tensor, lambda: [getattr(tensor, field) for field in FIELDS], (f"{path}.{field}" for field in FIELDS),
                1, True, of=tensor, attributes=FIELDS,
            )  # fmt: skip
        if depth > 1:  # tensors of an optimizer's state have no attributes of the user's
            self.reached.sized.append((own, f"the number of attributes of {path}"))
        if names:
            self.place(
                tensor, getter(own, names), (f"{path}.{name}" for name in names), depth - 1, True,
                lambda position, item: setattr(tensor, names[position], item),
                of=own, keys=names,
            )  # fmt: skip
        for name in TENSOR_HOOKS:
            hooks = getattr(tensor, name)
            if hooks:
                self.seen.add(id(hooks))
                self._container(hooks, f"{path}.{name}", depth, True)
            elif hooks is not None:
                self.reached.empty_hooks.append(hooks)

    def _module(self, module: torch.nn.Module, path: str, depth: int) -> None:
        own = module.__dict__
        if is_scripted(module):
            self.reached.unrepeatable.append(f"it reaches {path}, {why_unrepeatable(module)}")
            return
        self.reached.instances.append((module, path))
        self.modules.append((module, path, depth))
        for table in _TABLES:
            self._table(own[table], path, depth)
        for group in groups_of(module) if is_sharded(module) else ():
            self._places_of(group, [name for name in FACTS if name in group.__dict__], f"fully_shard of {path}", 1)
        for name in _HOOKS:
            hooks = own.get(name)
            if hooks:
                self._container(hooks, f"{path}.{name}", depth, True)
            elif hooks is not None:
                self.reached.empty_hooks.append(hooks)
        self._own_attributes(module, [name for name in own if name not in _MACHINERY], path, depth)
        self.class_code(type(module), depth)

    def _table(self, table: dict[str, Any], path: str, depth: int) -> None:
        names = tuple(f"{path}.{name}" for name in table)
        if names and not self.slots.isdisjoint(names):
            keys = list(table)
            self.place(
                table, getter(table, keys), names, depth, True, lambda i, item: table.__setitem__(keys[i], item),
                of=table, keys=keys,
            )  # fmt: skip
            self.reached.sized.append((table, f"the number of entries of {path}"))
            return
        self.count += len(names)
        self.reached.views.append((table, names))
        for name, value in zip(names, table.values(), strict=True):
            self.visit(value, name, depth, rooted=True)

    def _own_attributes(self, owner: Any, names: list[str], path: str, depth: int) -> None:
        """Attributes of an object that only the user's code knows: those that some of it names."""
        if any(is_library(kind) and kind not in _KNOW_NONE for kind in type(owner).__mro__):
            self._attributes(owner, names, path, depth)  # the library's code, which is not inspected, may read them
            return
        self._named_attributes(owner, names, path, depth)
        self._keeps_attributes(owner, path)

    def _named_attributes(self, owner: Any, names: list[str], path: str, depth: int) -> None:
        found = self.names.among(names)
        self._places_of(owner, found, path, depth)
        if len(found) < len(names):
            self.unnamed.append((owner, [name for name in names if name not in found], path, depth))

    def _named_items(self, table: dict[Any, Any], keys: list[str], path: str, depth: int) -> None:
        """Items of a large table that some code names."""
        found = self.names.standing(keys)
        if found:
            self.place(
                table, getter(table, found), (f"{path}[{key!r}]" for key in found), depth, False,
                lambda position, value: table.__setitem__(found[position], value),
                of=table, keys=found,
            )  # fmt: skip
        self.unnamed_items.append((table, [key for key in keys if key not in set(found)], path, depth))

    def _attributes(self, owner: Any, names: list[str], path: str, depth: int) -> None:
        self._places_of(owner, names, path, depth)
        self._keeps_attributes(owner, path)

    def _keeps_attributes(self, owner: Any, path: str) -> None:
        own = owner.__dict__
        self.reached.sized.append((own, f"the number of attributes of {path}"))
        self.reached.attributes.append((own, path))
        told = f"the dict of attributes of {path}"  # `self.__dict__ = state`
        self.reached.fixtures.append(GuardedPlace(owner, lambda: (owner.__dict__,), (told,), of=owner, attributes=DICT))

    def _places_of(self, owner: Any, names: list[str], path: str, depth: int) -> None:
        own = owner.__dict__
        names = [name for name in names if name != KEPT_ON_OWNER]
        if names:
            read = getter(own, names)
            self.place(
                owner, read, (f"{path}.{name}" for name in names), depth, True,
                lambda position, value: own.__setitem__(names[position], value),  # the class may be frozen
                of=own, keys=names,
            )  # fmt: skip

    def _object(self, value: Any, path: str, depth: int) -> None:
        self.reached.instances.append((value, path))
        own = _own_of(value)
        if own is not None:
            self._own_attributes(value, list(own), path, depth - 1)
        slots = [name for kind in type(value).__mro__ for name in slots_of(kind)]
        if slots:
            filled = all(hasattr(value, name) for name in slots)
            self.place(
                value, lambda: [getattr(value, name, GONE) for name in slots], (f"{path}.{name}" for name in slots),
                depth - 1, True, lambda position, item: object.__setattr__(value, slots[position], item),
                of=value, attributes=slots if filled else (),
            )  # fmt: skip
        self.class_code(type(value), depth - 1)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        self.reached.optimizers.append((optimizer, path))
        own, tables = optimizer.__dict__, _LOADED
        self.seen.update(id(own[name]) for name in tables)
        self.place(
            optimizer, getter(own, list(tables)), (f"{path}.{name}" for name in tables), 1, True,
            of=own, keys=tables,
        )  # fmt: skip
        self._container(optimizer.param_groups, f"{path}.param_groups", 1, True)
        self._container(optimizer.state, f"{path}.state", 1, True)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            hooks = getattr(optimizer, name, None)
            if hooks:
                self._container(hooks, f"{path}.{name}", 1, True)
            elif hooks is not None:
                self.reached.empty_hooks.append(hooks)
        names = [name for name in own if not name.startswith("_") and name not in _OPTIMIZER]
        if not is_library(type(optimizer)):
            self._attributes(optimizer, names, path, _DEPTH - 1)
        else:  # methods set on the instance
            self._keeps_attributes(optimizer, path)
            self._places_of(optimizer, [name for name in names if name in _METHODS], path, _DEPTH - 1)
        self.class_code(type(optimizer), _DEPTH - 1)

    def _container(self, value: Any, path: str, depth: int, rooted: bool) -> None:
        if type(value) is list and path in self.appended:
            self.reached.appended.append((value, path))
            return
        kind = base_of(value)
        if not rooted and kind.__len__(value) > _SMALL:
            if isinstance(value, dict):
                self._named_items(value, [key for key in kind.keys(value) if type(key) is str], path, depth)
            if type(value) is list:  # its items are not guarded, its length is
                self.reached.containers.append((value, path))
                self.reached.sized.append((value, f"the length of {path}"))
            return
        if type(value) in _FROZEN:  # it is immutable, and its holder is guarded
            for i, item in enumerate(value):
                self.visit(item, f"{path}[{i}]", depth, rooted=rooted)
            return
        if isinstance(value, (list, dict, collections.deque)):
            if path in self.slots and is_simple(value):
                self.reached.slots.append(content_slot(value, path))
                return
            self.reached.containers.append((value, path))
        if isinstance(value, collections.defaultdict):
            self.place(
                value, lambda: (value.default_factory,), (f"{path}.default_factory",), depth, rooted,
                of=value, attributes=("default_factory",),
            )  # fmt: skip
        if isinstance(value, dict):
            kept = kind.keys(value)
            keys = list(kept)
            names = [f"{path}[{_key_text(key, i)}]" for i, key in enumerate(keys)]
            if keys:
                values = kind.values(value)
                if depth > 1:  # an argument may be one of them: whether it is tells templates apart
                    self.place(
                        value,
                        lambda: tuple(kept),
                        (f"key {i} of {path}" for i in range(len(keys))),
                        depth,
                        rooted,
                        live=kept,
                    )
                simple = all(type(key) in (str, int) for key in keys)

                def store(i: int, item: Any) -> None:
                    if kind.__contains__(value, keys[i]):
                        kind.__setitem__(value, keys[i], item)

                self.place(
                    value, lambda: values if simple else tuple(values), names, depth, rooted, store, live=values,
                    of=value, keys=keys if simple else (),
                )  # fmt: skip
            self.reached.sized.append((value if type(value).__len__ is kind.__len__ else kept, f"the length of {path}"))
        else:
            is_plain = type(value).__iter__ is kind.__iter__ and type(value).__len__ is kind.__len__
            items = value if is_plain else BareItems(value)
            names = [f"{path}[{i}]" for i in range(len(items))]
            put = functools.partial(kind.__setitem__, value) if isinstance(value, list) else None
            if names:
                self.place(value, lambda: items, names, depth, rooted, put, live=items)
            self.reached.sized.append((items, f"the length of {path}"))

    def _function(self, function: types.FunctionType, path: str, depth: int, rooted: bool) -> None:
        if is_library_function(function):
            self.behind(function, path, depth)
            return
        self.reached.codes.append(function.__code__)
        self.reached.functions.append(function)
        self.functions.append((function, path))
        all_cells = list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells = [(name, cell) for name, cell in all_cells if _filled(cell)]
        empty = [cell for _, cell in all_cells if not _filled(cell)]
        if empty:
            told = f"whether a variable of {path} has a value"
            self.reached.fixtures.append(GuardedPlace(function, lambda: [any(map(_filled, empty))], (told,)))
        if cells:
            self.place(
                function,
                lambda: [cell.cell_contents for _, cell in cells],
                (f"{name} (of {path})" for name, _ in cells), depth, rooted,
                lambda i, value: setattr(cells[i][1], "cell_contents", value),
                cells=(cell for _, cell in cells),
            )  # fmt: skip
        self.place(  # reloading a module replaces code in place
            function, lambda: (function.__code__, function.__defaults__, function.__kwdefaults__),
            (f"the {name} of {path}" for name in ("code", "defaults", "keyword defaults")), depth, rooted,
            of=function, attributes=FUNCTION_PARTS,
        )  # fmt: skip
        self._attributes_of_function(function, path, depth, rooted)
        self.globals_of(function, depth)

    def _attributes_of_function(self, function: types.FunctionType, path: str, depth: int, rooted: bool) -> None:
        own = function.__dict__
        names = [name for name in own if name != "__wrapped__"]
        if names or function.__name__ in names_in(function.__code__):  # `step.calls += 1` in `step`
            self._named_attributes(function, names, path, depth)
            self._keeps_attributes(function, path)
        for name in ("__wrapped__", "registry"):  # the latter of `functools.singledispatch`
            if own.get(name) is not None:
                self.visit(own[name], path, depth, rooted=rooted)


_KNOW_NONE = (object, torch.nn.Module, *SETTINGS[:2])  # their code reads no attribute of a derived class
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_FROZEN = frozenset({tuple, frozenset, torch.Size})
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_PARTIAL = ("func", "args", "keywords")
FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
_FIELDS = "__dataclass_fields__"
_TOLD = ("__name__", "__qualname__", "__doc__", "__annotations__")
DICT = ("__dict__",)
_METHODS = ("step", "zero_grad", "add_param_group")
_OPTIMIZER = frozenset(torch.optim.SGD([torch.zeros(1)], 0.1).__dict__)


def _own_of(value: Any) -> dict[str, Any] | None:
    """The object's attributes where it has a plain dictionary of them; runs no code of its class."""
    own = getattr(value, "__dict__", None) if type(value).__dictoffset__ else None
    return own if type(own) is dict else None


def _told_by(function: types.FunctionType, names: list[str]) -> list[Any]:
    return [getattr(function, name) for name in names]


def _first_seed(generator: torch.Generator) -> tuple[int]:
    return (generator.initial_seed(),)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _key_text(key: Any, position: int) -> str:
    return repr(key) if is_plain_key(key) else f"#{position}"


def _owner_path(path: str) -> str:
    return path.rpartition(".")[0] or "self"


__all__ = ["KEPT_ON_OWNER", "TooMuch", "discover"]

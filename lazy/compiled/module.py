"""Compiled modules, which are of their module's class with its parameters, flags and methods; and compiled methods.

A compiled module shares one attribute dictionary with the original, so that names in `state_dict()` do not change, and
whatever is set on the one is set on the other: `train()`, hooks, a replaced parameter.

`DistributedDataParallel` prepares its reducer for the backward in Python: its forward runs eagerly, and the module
inside is what is compiled.

A compiled method has one compiled callable for each object, kept by the object, or by the class of a class method.

Invariant: only calling differs: it goes through the compiled callable, which runs the original. Compiled methods stay
behind when their object is copied or saved.
"""

from __future__ import annotations

import copy
import sys
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo


class CompiledModule:
    """What `torchlazy.compile(module)` adds to the module's own class."""

    __slots__ = ("_compiled_call", "_original")

    _compiled_call: Any
    _original: torch.nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled_call(*args, **kwargs)

    def report(self) -> Any:
        """What became of the calls so far (`CompileReport`)."""
        return self._compiled_call.report()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _rebuilt(copy.deepcopy(self._original, memo), self._compiled_call.settings, type(self._compiled_call))

    def __copy__(self) -> Any:
        return _rebuilt(copy.copy(self._original), self._compiled_call.settings, type(self._compiled_call))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self._original, self._compiled_call.settings, type(self._compiled_call))


def _run_wrapped(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    """What the forward of a compiled `DistributedDataParallel` calls in place of the module inside."""
    with self._inside_ddp_forward():
        return self._compiled_call(*inputs, **kwargs)


exclude_from_dynamo(CompiledModule.__call__)
_classes: dict[type, type] = {}


def _rebuilt(original: torch.nn.Module, settings: Any, kind: type) -> Any:
    return compiled_module(original, kind(called_of(original), settings))


def original_of(function: Any) -> Any:
    """The module behind a compiled module; anything else as it is."""
    return function._original if isinstance(function, CompiledModule) else function


def called_of(module: torch.nn.Module) -> torch.nn.Module:
    """The module whose calls are compiled where this one is to be."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def compiled_module(module: torch.nn.Module, compiled_call: Any) -> Any:
    """The module as a compiled one; the compiled callable itself where its class admits no subclass."""
    kind = type(module)
    own = _classes.get(kind)
    try:
        if own is None:
            names: dict[str, Any] = {"__slots__": (), "__module__": __name__}
            names |= {"__qualname__": f"Compiled{kind.__qualname__}", "__doc__": kind.__doc__}
            if issubclass(kind, DistributedDataParallel):
                names |= {"__call__": kind.__call__, "_run_ddp_forward": _run_wrapped}
            metaclass: Any = type(kind)
            own = _classes[kind] = metaclass(f"Compiled{kind.__name__}", (CompiledModule, kind), names)
        made = object.__new__(own)
        object.__setattr__(made, "__dict__", module.__dict__)
    except TypeError:
        return compiled_call
    slots: Any = vars(CompiledModule)
    slots["_compiled_call"].__set__(made, compiled_call)
    slots["_original"].__set__(made, module)
    return made


class KeptMethods(dict[Any, Any]):
    """The compiled methods of an object. They stay behind when it is copied or saved."""

    def __deepcopy__(self, memo: Any) -> KeptMethods:
        return KeptMethods()

    def __reduce__(self) -> Any:
        return KeptMethods, ()


def name_of_decorated(compiled: Any, function: Any) -> str:
    """The name under which a compiled callable is saved, as functions are: where it was decorated in its definition."""
    name = getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(getattr(function, "__module__", ""))
    for part in name.split("."):
        found = getattr(found, part, None)
    return str(name) if found is compiled else ""


KEPT_BY_CLASSES: weakref.WeakKeyDictionary[type, KeptMethods] = weakref.WeakKeyDictionary()


__all__ = ["KEPT_BY_CLASSES", "KeptMethods", "name_of_decorated"]

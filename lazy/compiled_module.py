"""A compiled module is a module: of its class, with its parameters, buffers, submodules, flags and methods.

Both objects share one attribute dictionary, so that names in `state_dict()` stay what they are, and whatever is set on
the one is set on the other: `train()`, hooks, a replaced parameter.

`DistributedDataParallel` prepares its reducer for the backward in Python: its forward runs as ever, and the module
inside is what is compiled.

Invariant: only calling differs: it goes through the compiled callable, which runs the original.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torchlazy.lazy.torch_capture import leave_alone


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


leave_alone(CompiledModule.__call__)
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

"""Process-wide settings that code reads through library functions, as values that guards compare.

The working directory, the limits of the interpreter, the context of `decimal`, the locale, settings of autocast.

Invariant: a reader gives plain values that `is_equal` compares; it is made only for calls whose code names one of the
functions that read the setting, so that no other call pays for it.
"""

from __future__ import annotations

import decimal
import functools
import gc
import locale
import os
import pathlib
import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.utils.checkpoint
from torchlazy.lazy.compiled.guards.values import same_or_equal
from torchlazy.lazy.torch_private.dispatch import (
    questions_of_autocast,
    questions_of_saved_tensor_hooks,
    saved_tensor_hooks_are_allowed,
)

Reader = Callable[[], Any]
_SETTINGS = ("torch.backends", "torch.utils.deterministic")  # modules whose attributes are computed by functions
_AUTOCAST_DEVICES = ("cpu", "cuda", "lazy")


class Steady:
    """Reads one value, which stays the same object while it is equal."""

    def __init__(self, read: Reader) -> None:
        self._read, self._value = read, read()

    def __call__(self) -> tuple[Any]:
        now = self._read()
        if not same_or_equal(now, self._value):
            self._value = now
        return (self._value,)

    @property
    def questions(self) -> tuple[tuple[Any, ...], ...]:
        """C functions, each with its argument if it has one, whose results show whether the value stays; empty where
        they do not suffice."""
        questions = _QUESTIONS.get(self._read)
        return questions() if questions is not None else ()


def process_reader(found: Any) -> tuple[str, Reader] | None:
    """Reads the setting that a library's function or class depends on, with its name in messages; else None."""
    try:
        return _readers().get(found)
    except TypeError:  # it has no hash
        return None


@functools.cache
def _readers() -> dict[Any, tuple[str, Reader]]:
    """Readers by what code names. Several names may have the same one."""
    told: dict[tuple[str, Reader], tuple[Any, ...]] = {
        ("the working directory", _directory): (os.getcwd, os.getcwdb, os.path.abspath, os.path.realpath),
        ("the environment", _environment): (os.path.expandvars, os.path.expanduser, pathlib.Path),
        ("the recursion limit", sys.getrecursionlimit): (sys.getrecursionlimit,),
        ("the switch interval", sys.getswitchinterval): (sys.getswitchinterval,),
        ("the context of decimal", _decimal): (
            decimal.Decimal, decimal.getcontext, decimal.localcontext, decimal.Context, decimal,
        ),
        ("the locale", _locale): (locale.setlocale, locale.getlocale, locale.localeconv, locale.str, locale.atof),
        ("whether garbage is collected", gc.isenabled): (gc.isenabled, gc.enable, gc.disable),
        ("what NumPy does on errors", _numpy_errors): (numpy.geterr, numpy.errstate),
        ("how NumPy prints", _numpy_prints): (
            numpy.array2string, numpy.array_repr, numpy.array_str, numpy.printoptions,
        ),
        ("what becomes of warnings", _warnings): (
            warnings.warn, warnings.warn_explicit, warnings.catch_warnings, warnings.simplefilter,
        ),
        ("the state of Python's `random`", random.getstate): (random.getstate,),
        ("the state of `numpy.random`", _numpy_state): (numpy.random.get_state,),
        ("torch's seed", torch.initial_seed): (torch.initial_seed, torch.random.initial_seed),
        ("what autocast does where it is entered", _autocast): (
            torch.autocast, torch.amp.autocast_mode.autocast, torch.cuda.amp.autocast, torch.cpu.amp.autocast,
            torch.is_autocast_cache_enabled, torch.get_autocast_dtype, torch.get_autocast_gpu_dtype,
            torch.get_autocast_cpu_dtype,
        ),
        ("whether hooks of saved tensors are allowed", saved_tensor_hooks_are_allowed): (
            torch.autograd.graph.saved_tensors_hooks, torch.autograd.graph.save_on_cpu,
            torch.utils.checkpoint.checkpoint, torch.utils.checkpoint,
        ),
    }  # fmt: skip
    if torch.distributed.is_available():
        ranks = torch.distributed.is_initialized
        told["whether there is a process group", ranks] = (ranks,)
    return {named: reader for reader, all_named in told.items() for named in all_named}


def settings_among(owner: Any, names: list[str]) -> list[str]:
    """Those of the names that read a setting of the process from a module or object of torch's settings
    (`torch.backends.cudnn`), by descriptors or `__getattr__`."""
    if type(owner) is types.ModuleType or not str(type(owner).__module__).startswith(_SETTINGS):
        return []
    return [name for name in names if not name.startswith("__") and _is_setting(owner, name)]


def _is_setting(owner: Any, name: str) -> bool:
    if name in getattr(owner, "__dict__", ()):
        return False
    try:
        return type(getattr(owner, name)) in (bool, int, float, str)
    except (AttributeError, RuntimeError, AssertionError):
        return False


def setting_of(owner: Any, name: str) -> Any:
    """The current value; the error where it cannot be read."""
    try:
        return getattr(owner, name)
    except (AttributeError, RuntimeError, AssertionError) as why:
        return str(why)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _environment() -> str:
    return str(hash(frozenset(os.environ.items())))  # messages show it: not the values, which may be secret


def _decimal() -> tuple[Any, ...]:
    now = decimal.getcontext()
    traps = tuple(kind.__name__ for kind, on in now.traps.items() if on)
    return (now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, traps)


def _locale() -> str:
    return locale.setlocale(locale.LC_ALL)


def _numpy_errors() -> tuple[Any, ...]:
    return tuple(numpy.geterr().values())


def _numpy_prints() -> tuple[Any, ...]:
    return tuple(numpy.get_printoptions().items())


def _warnings() -> tuple[Any, ...]:
    return tuple(warnings.filters)


def _numpy_state() -> tuple[Any, ...]:
    return tuple(part.tobytes() if isinstance(part, numpy.ndarray) else part for part in numpy.random.get_state())


def _autocast() -> tuple[Any, ...]:
    return (torch.is_autocast_cache_enabled(), *map(torch.get_autocast_dtype, _AUTOCAST_DEVICES))


_QUESTIONS: dict[Reader, Callable[[], tuple[tuple[Any, ...], ...]]] = {
    _autocast: questions_of_autocast,
    saved_tensor_hooks_are_allowed: questions_of_saved_tensor_hooks,
    gc.isenabled: lambda: ((gc.isenabled,),),
    sys.getrecursionlimit: lambda: ((sys.getrecursionlimit,),),
}

"""Deferred imports: parts of the package that are imported when they are first needed.

`import torch` imports torchlazy wherever it is installed (backend autoload), also in programs that never use the lazy
device. Those must not pay for SymPy, fake tensors, the compiler and its toolchains, which only a recorded operator or
a cut needs.

Invariant: importing torchlazy imports none of `HEAVY` (tests/lazy/test_deferred.py).
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

HEAVY = ("sympy", "triton", "numba", "torch._subclasses.fake_tensor", "torchlazy.inductor", "torchlazy.lazy.run.driver")


class DeferredDriver:
    """A proxy of the `Driver`, which it imports and makes at the first cut, or when an attribute is read."""

    def __init__(self) -> None:
        self._driver: Any = None

    def real(self) -> Any:
        """The driver itself."""
        if self._driver is None:
            self._driver = importlib.import_module("torchlazy.lazy.run.driver").Driver()
        return self._driver

    def __call__(self, *cut: Any) -> Any:
        return self.real()(*cut)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)

    @property
    def is_loaded(self) -> bool:
        """Whether a cut has happened, so that there may be something to wait for or to forget."""
        return self._driver is not None


class DeferredModule:
    """A proxy of a module, which it imports when an attribute is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


@functools.cache
def fake_mode() -> FakeTensorMode:
    """The one fake tensor mode by which result shapes are inferred.

    It never runs an operator on zeros instead: where values decide the shape (`unique`), the real one is another.
    """
    module = importlib.import_module("torch._subclasses.fake_tensor")
    return module.FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)

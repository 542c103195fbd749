"""Scripted modules, whose tensors C++ holds: moved to the lazy device and back, saved and loaded as real memory.

Invariant: C++ never writes a lazy tensor to a file; it would read memory that is not there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private import without_our_modes

_SAVERS = ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter")


def install(recorder: Recorder) -> None:
    """Stand before torch's own moving, saving and loading of scripted modules."""
    kind: Any = torch.jit.RecursiveScriptModule
    kind._apply = _apply(kind._apply)
    for name in _SAVERS:
        setattr(kind, name, _saver(recorder, getattr(kind, name)))
    torch.jit.load = _loader(recorder, torch.jit.load)


def _held(module: torch.nn.Module) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Each parameter and buffer of this very module, with what holds it and its name there."""
    for held in (module._parameters, module._buffers):
        for name, tensor in list(held.items()):
            if tensor is not None:
                yield held, name, tensor


def _apply(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(original)
    def apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        with torch.no_grad():
            moved = [(held, name, tensor, fn(tensor)) for held, name, tensor in _held(self)]
        if not any(isinstance(new, LazyTensor) is not isinstance(old, LazyTensor) for _, _, old, new in moved):
            return original(self, fn, False)
        for held, name, old, new in moved:  # torch can only put other memory under the tensors that C++ holds
            held[name] = new.detach().requires_grad_(old.requires_grad)
        return self

    return apply


def _saver(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        lazies = [place for module in self.modules() for place in _held(module) if isinstance(place[2], LazyTensor)]
        for _, name, tensor in lazies:
            if tensor.device == LAZY:
                raise RuntimeError(f"torch.jit.save: {name} is on the lazy device; move the module first: module.cpu()")
        try:
            for held, name, tensor in lazies:
                held[name] = recorder.hand_out(tensor, "save")  # type: ignore[arg-type]
            with recorder.apart():
                return original(self, *args, **kwargs)
        finally:
            for held, name, tensor in lazies:
                held[name] = tensor

    return save


def _loader(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Inside `lazy_mode` too, C++ reads a file into ordinary memory."""

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        with without_our_modes() if recorder.mode_depth else contextlib.nullcontext():
            return original(*args, **kwargs)

    return load


__all__ = ["install"]

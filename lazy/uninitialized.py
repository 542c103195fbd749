"""Parameters and buffers of `nn.LazyLinear` and its like on the lazy device, before their shapes are known.

torch keeps them as empty tensors of a class of their own, which a lazy tensor cannot be. Here they stay ordinary empty
tensors that remember the device, and become lazy tensors when their shape is known.

Invariant: the object that a module and an optimizer hold stays the same object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torchlazy.lazy.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private import above_dispatch

_WANTED = "_torchlazy_device"


def install() -> None:
    """Teach torch's two classes the lazy device, and modules to move them there."""
    for kind in (UninitializedParameter, UninitializedBuffer):
        kind.__new__ = _new(kind.__new__)  # type: ignore[method-assign]
        kind.materialize = _materialize(kind.materialize)  # type: ignore[method-assign]
    UninitializedParameter.__deepcopy__ = _deepcopy(UninitializedParameter.__deepcopy__)  # type: ignore[method-assign]
    torch.nn.Module._apply = _apply(torch.nn.Module._apply)  # type: ignore[method-assign]


def _new(original: Callable[..., Any]) -> Callable[..., Any]:
    names = ("requires_grad", "device", "dtype", "persistent")

    @functools.wraps(original)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        probe = torch.empty(0, device=given.get("device"), dtype=given.get("dtype"))
        if not isinstance(probe, LazyTensor):
            return original(cls, **given)
        device = torch.device("cpu") if probe.device == LAZY else probe.device
        with above_dispatch():
            made = original(cls, **{**given, "device": device, "dtype": probe.dtype})
        if probe.device == LAZY:
            setattr(made, _WANTED, LAZY)
        return made

    return new


def _materialize(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        wanted = device if device is not None else self.__dict__.pop(_WANTED, None)
        if wanted is None or torch.device(wanted).type != "lazy":
            original(self, shape, device, dtype)
            return
        made = torch.empty(shape, device=wanted, dtype=dtype or self.data.dtype)
        requires_grad = self.requires_grad
        original(self, shape, "cpu", dtype)
        is_parameter = isinstance(self, torch.nn.Parameter)
        torch.utils.swap_tensors(self, torch.nn.Parameter(made, requires_grad) if is_parameter else made)

    return materialize


def _deepcopy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        made = original(self, memo)
        if _WANTED in self.__dict__:
            setattr(made, _WANTED, LAZY)
        return made

    return deepcopy


def _apply(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(original)
    def apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        apart: list[tuple[dict[str, Any], str, Any]] = []
        for held in (self._parameters, self._buffers):
            for name, tensor in held.items():
                if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) and _moves(tensor, fn):
                    apart.append((held, name, tensor))  # type: ignore[arg-type]
        for held, name, _ in apart:
            held[name] = None
        try:
            return original(self, fn, recurse)
        finally:
            for held, name, tensor in apart:
                held[name] = tensor

    return apply


def _moves(tensor: Any, fn: Callable[..., Any]) -> bool:
    """Whether `fn` puts tensors on the lazy device, or takes this one from there; it is told so, its dtype changed."""
    try:
        probe = fn(torch.empty(0, dtype=tensor.data.dtype, device=tensor.__dict__.get(_WANTED, tensor.data.device)))
    except Exception:  # a function that wants more than an empty tensor: torch's own way shows its error
        return False
    was_lazy = _WANTED in tensor.__dict__
    if not isinstance(probe, LazyTensor) or probe.device != LAZY:
        tensor.__dict__.pop(_WANTED, None)
        return False
    if not was_lazy:
        setattr(tensor, _WANTED, LAZY)
    if probe.dtype != tensor.data.dtype:
        tensor.data = torch.empty(0, dtype=probe.dtype)
    return True

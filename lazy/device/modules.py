"""Modules and optimizers on the lazy device: uninitialised parameters, scripted modules, flushes after each step.

torch keeps the parameters of `nn.LazyLinear` and its like as empty tensors of a class of its own, which a lazy tensor
cannot be. They stay ordinary empty tensors that remember the device, and become lazy tensors when their shape is known.

Scripted modules, whose tensors C++ holds, are moved to the lazy device and back, saved and loaded as real memory.
Optimizers use foreach by default, and parameters keep their identity.

Invariant: the object that a module and an optimizer hold stays the same object. C++ never writes a lazy tensor to a
file; it would read memory that does not exist. Nothing here changes what an optimizer does to other tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import sgd as sgd_module
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchlazy.lazy.device.outside_mode import outside_lazy_mode
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private.dispatch import above_dispatch, without_our_modes
from torchlazy.lazy.torch_private.patches import allow_capturable, allow_foreach, keep_parameter_identity

_WANTED = "_torchlazy_device"


def install_uninitialized() -> None:
    """Patch torch's two classes for the lazy device, and modules to move them there."""
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
    """Whether `fn` keeps or puts this tensor on the lazy device; its device mark and dtype are set accordingly."""
    try:
        probe = fn(torch.empty(0, dtype=tensor.data.dtype, device=tensor.__dict__.get(_WANTED, tensor.data.device)))
    except Exception:  # a function that fails on an empty tensor: torch's own code raises its error
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


_SAVERS = ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter")


def install_scripted_modules(recorder: Recorder) -> None:
    """Wrap torch's own moving, saving and loading of scripted modules."""
    kind: Any = torch.jit.RecursiveScriptModule
    kind._apply = _apply_scripted(kind._apply)
    for name in _SAVERS:
        setattr(kind, name, _saver(recorder, getattr(kind, name)))
    torch.jit.load = _loader(recorder, torch.jit.load)
    for tracer in (torch.jit.trace, torch.jit.trace_module):
        setattr(torch.jit, tracer.__name__, _tracer(recorder, tracer))


def _held(module: torch.nn.Module) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Each parameter and buffer of this very module, with what holds it and its name there."""
    for held in (module._parameters, module._buffers):
        for name, tensor in list(held.items()):
            if tensor is not None:
                yield held, name, tensor


def _apply_scripted(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(original)
    def apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        with torch.no_grad():
            moved = [(held, name, tensor, fn(tensor)) for held, name, tensor in _held(self)]
        if not any(isinstance(new, LazyTensor) is not isinstance(old, LazyTensor) for _, _, old, new in moved):
            return original(self, fn, False)
        for held, name, old, new in moved:  # torch can only replace the memory of the tensors that C++ holds
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
    """Also inside `lazy_mode`, C++ reads a file into ordinary memory."""

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        with without_our_modes() if recorder.mode_depth else contextlib.nullcontext():
            return original(*args, **kwargs)

    return load


def _tracer(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Outside of `lazy_mode`: torch's tracer would take down what the mode itself does to real tensors."""

    @functools.wraps(original)
    def trace(*args: Any, **kwargs: Any) -> Any:
        if recorder.capture is not None:
            recorder.capture.refuse(f"it calls torch.jit.{original.__name__}; trace outside of the call")
        with outside_lazy_mode(recorder), without_our_modes():  # a mode of captures, too
            return original(*args, **kwargs)

    return trace


def install_optimizers(recorder: Recorder) -> None:
    """Flush at the end of every `optimizer.step()` and let optimizers use their foreach path."""
    allow_foreach(LazyTensor, "lazy")
    allow_capturable("lazy")
    keep_parameter_identity(lambda tensor: isinstance(tensor, LazyTensor))
    install_uninitialized()
    _step_as_on_the_cpu(recorder)
    _keep_step_counts_on_the_host()

    def flush(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        recorder.cut("optimizer step")

    register_optimizer_step_post_hook(flush)


def _keep_step_counts_on_the_host() -> None:
    """Move step counts of a state that was loaded onto the lazy device back to the host, where optimizers make them.

    `torch.load(map_location="lazy")` puts them on the lazy device, and each step would read each of them.
    """
    load = torch.optim.Optimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> None:
        load(self, state_dict)
        for group in self.param_groups:
            if group.get("capturable") or group.get("fused"):
                continue
            for state in [self.state[p] for p in group["params"] if p in self.state]:
                count = state.get("step") if isinstance(state, dict) else None
                if isinstance(count, torch.Tensor) and count.dim() == 0 and count.device.type == "lazy":
                    state["step"] = count.cpu()

    torch.optim.Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _step_as_on_the_cpu(recorder: Recorder) -> None:
    """On a CPU, `SGD(nesterov=True)` by default leaves gradients as they are, and a differentiable step has gradients.

    Its foreach path adds the momentum into the gradients, and saves parameters that it then writes to; eager uses that
    path by default on a GPU, but not on a CPU.
    """
    plain = sgd_module.sgd

    @functools.wraps(plain)
    def sgd(params: list[torch.Tensor], d_p_list: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        by_default = kwargs.get("foreach") is None and kwargs.get("fused") is None and not kwargs.get("has_sparse_grad")
        mine = recorder.target == "cpu" and any(isinstance(gradient, LazyTensor) for gradient in d_p_list)
        if by_default and mine and torch.is_grad_enabled():  # the step is differentiable
            kwargs["foreach"] = False
        elif by_default and kwargs.get("nesterov") and mine:
            d_p_list = list(torch._foreach_mul(d_p_list, 1))
        plain(params, d_p_list, *args, **kwargs)

    sgd_module.sgd = sgd


__all__ = ["install_scripted_modules"]

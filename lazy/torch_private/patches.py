"""Patches of private torch API, each with its reason. Works on torch 2.11 to 2.13.

They make torch accept the lazy device, and keep what torch does for everything else. Others exclude code from
`torch.compile`'s capture (dynamo): torch's calls into the recorder, and compiled callables. While a function that
dynamo captured runs, dynamo looks at every Python function that is called, also at one that C code calls for an
operator on a lazy tensor: it would capture the recorder, whose state changes at each call, and fail.

Invariant: nothing is captured from the excluded functions on; operators on lazy tensors are recorded as usual, and what
dynamo captured of the function around them runs without them.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._library import simple_registry
from torch.amp import autocast_mode
from torch.autograd.function import _HookMixin
from torch.fx.experimental import proxy_tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode


def allow_foreach(tensor_type: type, device_type: str) -> None:
    """Let optimizers and gradient clipping use their foreach path, and fused steps on request, on this device type.

    Why private: torch decides by lists of types and devices in two modules and offers no registration.
    """
    for module in (optimizer, _foreach_utils):
        if tensor_type not in module._foreach_supported_types:
            module._foreach_supported_types.append(tensor_type)
        for name in ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices"):
            original = getattr(module, name)
            if device_type not in original():
                setattr(module, name, _extended(original, device_type))


def allow_capturable(device_type: str) -> None:
    """Let optimizers keep their step counts on this device type on request (`capturable=True`).

    Why private: each optimizer's module calls a function that it imported by name for a list, and torch offers no
    registration.
    """
    name = "_get_capturable_supported_devices"
    original = getattr(optimizer, name)
    if device_type in original():
        return
    extended = _extended(original, device_type)
    for path, module in list(sys.modules.items()):
        if path.startswith("torch.optim.") and hasattr(module, name):
            setattr(module, name, extended)


def let_tracers_record(tensor_type: type) -> None:
    """Let `make_fx` record operators on this type of tensors as it does on ordinary ones.

    Why private: torch silently ignores tensor classes that it does not know, so that what it traces is a constant
    (`torch.func.linearize`); the list of those it knows is a module's variable.
    """
    if tensor_type not in proxy_tensor.HANDLED_TYPES:
        proxy_tensor.HANDLED_TYPES = (*proxy_tensor.HANDLED_TYPES, tensor_type)  # type: ignore[assignment]


def _extended(original: Callable[..., list[str]], device_type: str) -> Callable[..., list[str]]:
    return lambda *args, **kwargs: [*original(*args, **kwargs), device_type]


def teach_parse_to(is_told_lazy: Callable[[torch.Tensor], bool]) -> None:
    """Let `Module.to(tensor)` name the device that Python is told of the tensor: torch's parser asks its C++."""
    parse = torch._C._nn._parse_to

    @functools.wraps(parse)
    def parse_to(*args: Any, **kwargs: Any) -> Any:
        device, *rest = parse(*args, **kwargs)
        other = args[0] if args else kwargs.get("tensor")
        is_lazy = isinstance(other, torch.Tensor) and is_told_lazy(other)
        return (torch.device("lazy") if is_lazy else device, *rest)

    torch._C._nn._parse_to = parse_to


def teach_autocast(lazy_type: str, default: torch.dtype, computes: Callable[[], str]) -> None:
    """Make `torch.autocast(lazy_type)` switch the autocast state of the device type that `computes`; where that is "",
    of the unused PrivateUse1 backend.

    Why private: the table of device types with autocast is compiled into torch and does not know the lazy device.
    """
    stand_in = torch._C._get_privateuse1_backend_name()

    def mapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and args[0] == lazy_type:
                return function(computes() or stand_in, *args[1:], **kwargs)
            if kwargs.get("device_type") == lazy_type:
                kwargs["device_type"] = computes() or stand_in
            return function(*args, **kwargs)

        return call

    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        setattr(torch, name, mapped(getattr(torch, name)))
    available = autocast_mode.is_autocast_available

    def is_autocast_available(device_type: str) -> bool:
        return device_type == lazy_type or available(device_type)

    autocast_mode.is_autocast_available = is_autocast_available
    torch.amp.is_autocast_available = is_autocast_available
    torch.set_autocast_dtype(lazy_type, default)


def keep_parameter_identity(is_lazy: Callable[[object], bool]) -> None:
    """Let `module.to("lazy")` and back keep each Parameter object, so that optimizers and tied weights stay valid.

    Why private: torch does so for all modules behind a global flag (`torch.__future__`), or for none; this switches the
    flag on only while one module's own parameters cross to or from the lazy device.
    """
    original = torch.nn.Module._apply

    def _apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        future = torch.__future__
        if future.get_swap_module_params_on_conversion():
            return original(self, fn, recurse)
        for child in self.children() if recurse else ():
            child._apply(fn)
        if not _crosses(self, fn, is_lazy):
            return original(self, fn, False)
        future.set_swap_module_params_on_conversion(True)
        try:
            return original(self, fn, False)
        except RuntimeError as why:
            if "Couldn't swap" not in str(why):
                raise
        finally:
            future.set_swap_module_params_on_conversion(False)
        warnings.warn(
            f"torchlazy: parameters of {type(self).__name__} are part of a graph that is still alive; the moved module "
            "has new Parameter objects: make its optimizer after the move, or move it before the forward pass",
            stacklevel=2,
        )
        return original(self, fn, False)

    torch.nn.Module._apply = _apply  # type: ignore[method-assign]


def _crosses(module: torch.nn.Module, fn: Callable[..., Any], is_lazy: Callable[[object], bool]) -> bool:
    first = next(module.parameters(), None)
    if first is None:
        return False
    if is_lazy(first):
        return True
    try:
        return is_lazy(fn(torch.empty(0)))
    except Exception:  # a function that wants more than an empty tensor moves nothing to another device
        return False


def load_through_functions() -> None:
    """Let `torch.load(map_location=function)` place lazy tensors: it is called with an empty storage and "lazy".

    Why private: files hold lazy tensors as host tensors and a device, and torch calls no function for such a device.
    """
    original = torch._utils._get_restore_location

    def _get_restore_location(device: Any) -> Any:
        wish = torch.serialization._serialization_tls.map_location
        if not callable(wish) or not str(device).startswith("lazy"):
            return original(device)
        placed = wish(torch.UntypedStorage(0), "lazy")  # type: ignore[arg-type]  # the stub's own storage class
        return device if placed is None else placed.device

    torch._utils._get_restore_location = _get_restore_location


def share_loaded_memory(lazily: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Let `torch.load` and unpickling make lazy tensors of host tensors by `lazily`, unless that gives None.

    Why private: files name the function that moves a host tensor, and it moves each one separately.
    """
    original = torch._utils._rebuild_device_tensor_from_cpu_tensor

    @functools.wraps(original)
    def rebuild(data: torch.Tensor, dtype: torch.dtype, device: Any, requires_grad: bool) -> torch.Tensor:
        found = None
        if data.dtype == dtype and str(torch._utils._get_restore_location(device)).startswith("lazy"):
            found = lazily(data)
        if found is None:
            return original(data, dtype, device, requires_grad)
        found.requires_grad = requires_grad
        return found

    torch._utils._rebuild_device_tensor_from_cpu_tensor = rebuild


def load_inside(block: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Make the tensors of `torch.load` and of unpickling inside `block()`.

    Why private: a tensor is made in one step and gets its memory in a second one, by a function that only files name.
    """
    original = torch._utils._rebuild_tensor

    def _rebuild_tensor(*args: Any) -> Any:
        with block():
            return original(*args)

    torch._utils._rebuild_tensor = _rebuild_tensor


def on_default_dtype_change(changed: Callable[[], None]) -> None:
    """Call `changed` before the default dtype becomes another one.

    Why private: results of factories and of divisions of integers depend on it, and torch has no hook for its change.
    """

    def telling(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            changed()
            function(*args, **kwargs)

        return call

    torch.set_default_dtype = telling(torch.set_default_dtype)
    torch.set_default_tensor_type = telling(torch.set_default_tensor_type)


def make_subclasses(
    is_lazy: Callable[[object], bool], is_recording: Callable[[], bool], turned: Callable[..., Any]
) -> None:
    """Let classes of tensors be made of lazy tensors, and of new ones where operators are recorded: by
    `turned(tensor, class)`, whose gradients flow.

    Why private: torch makes these objects in C++, from a tensor that by then is a Python object of another class, and
    offers no function to do it otherwise. Custom parameters call `Tensor._make_subclass`, others `Tensor.__new__`.
    """
    original_make: Any = torch.Tensor._make_subclass
    original_new: Any = torch.Tensor.__new__

    @functools.wraps(original_make)
    def make(cls: type, data: torch.Tensor, require_grad: bool = False, **options: Any) -> Any:
        if not is_lazy(data):
            return original_make(cls, data, require_grad, **options)
        return turned(data.detach(), cls).requires_grad_(require_grad)

    @functools.wraps(original_new)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Tensor or not (is_recording() or (args and is_lazy(args[0]))):
            return original_new(cls, *args, **kwargs)
        return turned(original_new(torch.Tensor, *args, **kwargs), cls)

    torch.Tensor._make_subclass = staticmethod(make)  # type: ignore[method-assign, assignment]
    torch.Tensor.__new__ = new  # type: ignore[method-assign, assignment]


def let_numbers_format() -> None:
    """Let `f"{lr / 2:.2e}"` work for torch's symbolic numbers: it reads the plain value, and the read is reported.

    Why private: torch's classes have no `__format__` of their own, and the numbers that a captured call sees are these.
    """

    def plain(number: Any, spec: str) -> str:
        return format(float(number) if type(number) is torch.SymFloat else int(number), spec)

    for kind in (torch.SymFloat, torch.SymInt):
        if kind.__format__ is object.__format__:
            kind.__format__ = plain  # type: ignore[assignment,method-assign]


class _NumberCall(type):
    """A class that calls a function when it is called, and is a class of numbers in any other use."""

    kind: type
    function: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.function(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kind)


@contextlib.contextmanager
def patched_number(kind: type, function: Callable[..., Any], spaces: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Inside, code whose globals these are calls `function` where it calls `float`, `int` or `range`: a global
    shadows the builtin, which always gives or takes plain numbers. Code may use it as a class, too, in
    `isinstance` and unions."""
    name = kind.__name__
    kept = [space.get(name) for space in spaces]
    asked = _NumberCall(name, () if kind is range else (kind,), {})
    asked.kind, asked.function = kind, function
    for space in spaces:
        space[name] = asked
    try:
        yield
    finally:
        for space, own in zip(spaces, kept, strict=True):
            space.pop(name) if own is None else space.update({name: own})


def patched_float(function: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Inside, batch norms (for their count of batches, `momentum=None`), gradient clipping (for its limit), schedulers
    (`ReduceLROnPlateau`, for its metric) and `LBFGS` (for its loss) call `function` for a float."""
    lbfgs = sys.modules[torch.optim.LBFGS.__module__]  # no attribute of its package
    modules = (torch.nn.modules.batchnorm, torch.nn.utils.clip_grad, torch.optim.lr_scheduler, lbfgs)
    return patched_number(float, function, [vars(module) for module in modules])


@contextlib.contextmanager
def patched_type(function: Callable[[Any], type]) -> Iterator[None]:
    """Inside, the module `statistics`, which sorts its numbers by their types, calls `function` for a type."""
    space: dict[str, Any] = vars(statistics)
    kept = space.get("type", type)
    space["type"] = function
    try:
        yield
    finally:
        space["type"] = kept


@contextlib.contextmanager
def hooks_on_nodes(found: Callable[[], None]) -> Iterator[None]:
    """Inside, `found` is called where code that is not torch's or ours puts a hook on a node of autograd's graph.

    Why private: a node does not list its hooks. Its C++ calls this function for the table that holds them.
    """
    register = _HookMixin._register_hook

    def told(*given: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(_NOT_THE_PROGRAMS):
            found()
        return register(*given)

    _HookMixin._register_hook = staticmethod(told)  # type: ignore[assignment]
    try:
        yield
    finally:
        _HookMixin._register_hook = staticmethod(register)  # type: ignore[assignment]


_NOT_THE_PROGRAMS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1] / "joint"))


def answer_for_dispatch(rules: Callable[[Callable[[Any, type], Any]], Callable[[Any, type], Any]]) -> None:
    """Choose what torch calls for an operator on a tensor subclass, with (cls, op, types, args, kwargs).

    `rules` gets torch's own function, (op, class) -> callable or None, and returns the one that replaces it.

    Why private: before each `__torch_dispatch__` torch calls a Python function to find whether the operator has a rule
    for the tensor's type (`torch.library.register_torch_dispatch`), through two registries, and then looks the method
    up by a new string: a twentieth of the time of an operator. Torch binds the function when the first operator arrives
    at any subclass; where that was earlier, torch uses `__torch_dispatch__` as usual.
    """
    asked = getattr(simple_registry, "find_torch_dispatch_rule", None)
    if asked is not None:
        simple_registry.find_torch_dispatch_rule = rules(asked)  # type: ignore[assignment]


def _find_strategy() -> Callable[[CodeType], None] | None:
    """The function that makes dynamo skip a code object, and all that it calls; None where torch has none.

    Why private: the public way (`torch.compiler.disable`) wraps the function in Python, at a microsecond for each
    operator, and imports torch's compiler. This sets a mark on the code object, which costs calls nothing.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    mark = getattr(frames, "set_code_exec_strategy", None)
    if mark is None:
        return None
    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)
    return lambda code: mark(code, strategy)


_mark = _find_strategy()


def exclude_from_dynamo(*functions: Any) -> None:
    """Exclude these functions, methods or code objects, and what they call, from dynamo's capture."""
    for function in functions:
        code = function if isinstance(function, CodeType) else getattr(function, "__code__", None)
        if not isinstance(code, CodeType):
            raise TypeError(f"exclude_from_dynamo: {function!r} has no Python code")
        if _mark is not None:
            _mark(code)


class UnwrappedDispatchMode(TorchDispatchMode):
    """A mode that is called without torch's wrapper, which takes a twentieth of an operator's time.

    Why private: torch wraps each mode's method so that dynamo leaves it alone, unless the class says otherwise; a mark
    on the method does the same. Where torch knows no marks, it wraps.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        if _mark is not None and "__torch_dispatch__" in cls.__dict__:
            exclude_from_dynamo(cls.__dict__["__torch_dispatch__"])
        return _mark is None

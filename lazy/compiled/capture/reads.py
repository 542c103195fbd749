"""What a captured call's Python reads of tensors, and functions of torch that C++ composes of operators.

Reads of gradients need a guard, and numbers that are read are tracked.

C++ gets the plain value of a tracked number, and what it computes of it goes unseen into several operators. Here such a
function is composed the same way in Python, or (`NUMBER_ONCE`) it is known to pass the number on once, as it is.

Invariant: the operators, and their order, are those of torch's own function; a power by a float is one by a tensor that
holds it. Every read of `.grad` from Python is seen, of ordinary and of lazy tensors; a number that torch gives with an
expression behind it reaches the program as a tracked number.
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchlazy.lazy.compiled.capture.own_view import NOT_THE_PROGRAM, OwnViews
from torchlazy.lazy.compiled.capture.record import CaptureRecord
from torchlazy.lazy.compiled.template.template import HostArgument
from torchlazy.lazy.device.mode import VALUE_READERS, Readers
from torchlazy.lazy.numbers.questions import TrackedSize, plain_size
from torchlazy.lazy.numbers.tracked import TracedInt, as_tracked, node_of
from torchlazy.lazy.ops.host_lengths import BY_ADDRESS, CTC_LOSSES, UNPACK, lengths_beside
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import past_function_mode, uppermost_function_mode
from torchlazy.lazy.trace.user_frames import LAZY_FOLDER

# The number goes to one operator, as it is, but not to the first.
NUMBER_ONCE = frozenset(
    {F.rms_norm, torch.rms_norm, F.margin_ranking_loss, torch.margin_ranking_loss, F.hinge_embedding_loss,
     torch.hinge_embedding_loss, F.cosine_embedding_loss, torch.cosine_embedding_loss}
)  # fmt: skip


def composed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The function's value, where a number of it is tracked; else NotImplemented."""
    compose = _COMPOSED.get(func)
    if compose is None or not any(node_of(value) is not None for value in (*args, *kwargs.values())):
        return NotImplemented
    named = {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
    if not named.keys() <= inspect.signature(compose).parameters.keys():  # `out=`
        return NotImplemented
    return compose(*args, **named)


def _dropout(input: torch.Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Ordinary tensors on the CPU: input * mask / (1 - p), the mask drawn by `bernoulli_`."""
    if input.device.type != "cpu" or inplace or not training or not 0 < p < 1 or input.numel() == 0:
        return NotImplemented
    noise = torch.ops.aten.empty_like.default(input).bernoulli_(1 - p)
    torch.ops.aten.div_.Scalar(noise, 1 - p)  # the overloads of C++: a trace of before is a sample of this one
    return input * noise


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: Any = 0.0,
) -> Any:
    """Smoothed labels given as classes: (1 - smoothing) * nll + smoothing / classes * the sum of all."""
    classes = input.shape[input.dim() - 1 if input.dim() == 1 else 1]
    plain = target.dtype is torch.int64 and weight is None and size_average is None and reduce is None
    if not plain or reduction != "mean" or not 0 < label_smoothing < 1 or input.dim() == 1:
        return NotImplemented
    logs = torch.log_softmax(input, 1)
    likelihood = F.nll_loss(logs, target, ignore_index=ignore_index)
    everything = -logs.sum(1)
    ignored = target == ignore_index
    everything = everything.masked_fill_(ignored, 0.0)
    smooth = everything.sum() / (ignored.numel() - ignored.sum())
    return (1 - label_smoothing) * likelihood + smooth * (label_smoothing / classes)


def _power(input: Any, exponent: Any) -> Any:
    """An exponent, or a base, that is a float: as a tensor of one number. An operator that gets the number itself
    chooses its code by it, and so does its backward."""
    tensor, number = (input, exponent) if isinstance(input, torch.Tensor) else (exponent, input)
    if isinstance(number, torch.Tensor) or not isinstance(number, float) or tensor.dtype not in _EXACT:
        return NotImplemented
    dtype = torch.float64 if tensor.dim() else tensor.dtype
    made = torch.full((), number, dtype=dtype, device=tensor.device)
    return torch.pow(tensor, made) if tensor is input else torch.pow(made, tensor)


_OTHER_NAMES = {"self": "input", "train": "training"}  # of torch.pow, torch.dropout
_EXACT = (torch.float32, torch.float64)
_COMPOSED: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout, torch.dropout: _dropout, F.cross_entropy: _cross_entropy,
    torch.pow: _power, torch.Tensor.pow: _power, torch.Tensor.__pow__: _power,
    torch.Tensor.__rpow__: lambda exponent, input: _power(input, exponent),
}  # fmt: skip


_RETAIN = torch.Tensor.retain_grad
_READ = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_VERSION: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_WHOLE: dict[Any, Any] = {torch.Tensor.__int__: int, torch.Tensor.__index__: operator.index}
_BASE: Any = torch.Tensor._base.__get__  # type: ignore[union-attr]
# What distinguishes an argument view from a copy of it.
_OF_PLACES = frozenset(
    {torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.data_ptr, torch.Tensor.untyped_storage,
     torch.Tensor._is_view, _BASE, _VERSION}
)  # fmt: skip
_ADDRESSES = frozenset(  # torch 2.11 has no const_data_ptr
    getattr(torch.Tensor, name)
    for name in ("data_ptr", "const_data_ptr", "untyped_storage", "storage")
    if hasattr(torch.Tensor, name)
)
# Their backward takes the logarithm of a number, which a symbol does not have.
_POWERS = frozenset({torch.Tensor.__rpow__, torch.pow, torch.float_power})
# They take the plain value of a number, which would be a constant.
_OF_DATA = frozenset({torch.tensor, torch.as_tensor})
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_INTEGERS = (torch.int64, torch.int32)  # the shape of what a mask picks depends on its numbers
_POSITIONS = (numpy.dtype("int64"), numpy.dtype("int32"), numpy.dtype("bool"))
_SPLITS = frozenset({torch.tensor_split, torch.Tensor.tensor_split})
_SIMPLE = frozenset({"dtype", "device"})
_SYMBOLIC = frozenset({torch.SymFloat, torch.SymInt})
# An int among their arguments may be tracked. To others it is a size or a position, which a program has as a constant,
# and which autograd would keep as a symbol for a backward on ordinary tensors, where it has no value.
_ARITHMETIC = frozenset(
    {
        f"{before}{name}{after}"
        for name in ("add", "sub", "mul", "div", "truediv", "multiply", "subtract", "divide", "true_divide")
        for before, after in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
    }
    | {"rsub", "item", "full"}
)


class TensorReads(TorchFunctionMode):
    """Inside, `gradients` becomes True when a tensor is asked for its gradient."""

    def __init__(self, capture: CaptureRecord) -> None:
        super().__init__()
        self.gradients = False
        self._capture = capture
        self._windows = capture.themselves = OwnViews(capture) if capture.windows else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ:
            self.gradients = True
        if self._windows is not None and not self._capture.recorder.busy:
            self._windows.look(func, args)
            if self._windows:
                args, kwargs = self._windows.instead(args), self._windows.instead(kwargs)
        if func == _RETAIN:
            self._capture.retaining.append(weakref.ref(args[0]))
        if func == torch.Tensor.register_hook:
            self._capture.hooked = True
        if func in VALUE_READERS and not isinstance(args[0], LazyTensor) and not self._capture.recorder.busy:
            self._capture.read_on_host(VALUE_READERS[func].strip("_"))  # lazy tensors report it themselves
        if func in _ADDRESSES and not self._capture.recorder.busy and self._is_asked_of_argument(args[0]):
            self._capture.read_on_host(func.__name__.strip("_"))
        if func in _OF_PLACES and not sys._getframe(1).f_code.co_filename.startswith(NOT_THE_PROGRAM):
            if func == _VERSION:
                self._capture.refuse("it asks how often a tensor was written to")
            window = self._capture.argument_view_of(args[0])
            if window is not None:
                self._capture.asked_of_views = True
                return func(window, *args[1:], **(kwargs or {}))
        if func in _OF_DATA and len(args) == 1 and _SIMPLE.issuperset(kwargs or ()):
            is_listed = node_of(args[0]) is None and _is_position(args[0])
            number = args[0][0] if is_listed else args[0]
            if is_listed or node_of(number) is not None:
                if _is_taken_by_full(number, **(kwargs or {})):
                    return _filled((1,) if is_listed else (), number, **(kwargs or {}))
                number = _plain(number, escapes=True)
                args = ([number] if is_listed else number,)
        if func is UNPACK and not self._capture.recorder.mode_depth:  # its C++ writes lengths by their address
            return BY_ADDRESS[func](func, *args, **(kwargs or {}))
        found = composed(func, args, kwargs or {})
        if found is not NotImplemented:
            return found
        if func in _WHOLE and args[0].numel() == 1 and _is_whole(func, args[0]):  # C++ would take the number unseen
            return _WHOLE[func](as_tracked(args[0].item()))
        if func in _POWERS:
            args = tuple([arg if node_of(arg) is None else arg.node.operand_value() for arg in args])
        if getattr(func, "__name__", "") not in _ARITHMETIC:
            args = tuple(map(_with_plain_ints, args))
            kwargs = {name: _with_plain_ints(value) for name, value in kwargs.items()} if kwargs else None
        if func in _INDEXING:  # C++ would make tensors of lists unseen
            beside = isinstance(args[0], LazyTensor) and not self._capture.recorder.mode_depth
            args = (
                args[0],
                _with_tensors(args[1], args[0].device if beside else None),
                *map(_written(args[0]), args[2:]),
            )
        if func in _SPLITS and any(map(_is_ordinary, (*args[1:], *(kwargs or {}).values()))):
            self._capture.read_on_host("tolist")  # C++ reads them from their memory
        if func in CTC_LOSSES:
            args, kwargs = lengths_beside(args, kwargs or {})
        if func in NUMBER_ONCE:
            result = self._later(func, args, kwargs or {})
        else:
            below = uppermost_function_mode()
            if type(below) is Readers and not below.looks_at(func):
                result = past_function_mode(below, func, args, kwargs or {})
            else:
                result = func(*args, **(kwargs or {}))
        asked = self._capture.asked
        if asked is not None and args and not sys._getframe(1).f_code.co_filename.startswith(LAZY_FOLDER):
            result = asked.seen(func, args[0], result)
        if type(result) in _SYMBOLIC:
            return as_tracked(result)
        if type(result) is list and result and type(result[0]) in _SYMBOLIC:  # Tensor.tolist
            return [as_tracked(item) for item in result]
        return result

    def _is_asked_of_argument(self, tensor: torch.Tensor) -> bool:
        """Whether the program asks for the address of an argument, which is another one at each call."""
        if sys._getframe(2).f_code.co_filename.startswith(NOT_THE_PROGRAM):
            return False
        return isinstance(self._capture.host_of(tensor), HostArgument)

    def _later(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._capture.takes_number_later = True
        try:
            return func(*args, **kwargs)
        finally:
            self._capture.takes_number_later = False


def _is_whole(func: Any, tensor: torch.Tensor) -> bool:
    """Whether the tensor's number becomes an int by the function, and is neither a truth nor complex."""
    if tensor.is_floating_point():
        return _WHOLE[func] is int
    return tensor.dtype is not torch.bool and not tensor.is_complex()


def _with_plain_ints(value: Any) -> Any:
    kind = type(value)
    if kind is TracedInt:
        return value.node.operand_value()
    if kind is list or kind is tuple:
        found = [_with_plain_ints(item) for item in value]
        return kind(found) if any(a is not b for a, b in zip(found, value, strict=True)) else value
    if kind is slice:
        return slice(*map(_with_plain_ints, (value.start, value.stop, value.step)))
    return value


def _with_tensors(index: Any, device: torch.device | None) -> Any:
    """An index with tensors in place of lists and arrays of positions; on the device, if one is given: what backward
    keeps of an index is then there too."""
    if type(index) is tuple:
        return tuple([_with_tensors(item, device) for item in index])
    if type(index) is range:
        index = list(index)
    if type(index) is numpy.ndarray and index.dtype in _POSITIONS:
        index = torch.tensor(index)
    elif _is_position(index):
        index = torch.full((1,), index[0], dtype=torch.int64)
    elif _is_positions(index):
        index = torch.tensor(index, dtype=None if index else torch.int64)
    on_host = type(index) is torch.Tensor and index.dim() and index.device.type == "cpu"
    return index.to(device) if on_host and device is not None and index.dtype in _INTEGERS else index


def _written(tensor: torch.Tensor) -> Callable[[Any], Any]:
    """A number that is written to a part of the tensor, as a tensor of one number: C++ would make one unseen, and for a
    position in a ring (`pointer[0] = (place + rows) % places`) another one at each call."""

    def made(value: Any) -> Any:
        is_position = type(value) in (int, TrackedSize) and tensor.dtype in _INTEGERS
        if not is_position and node_of(value) is None:
            return value
        return torch.full((), value, dtype=tensor.dtype, device=tensor.device)

    return made


def _is_ordinary(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor)


def _is_positions(index: Any) -> bool:
    return type(index) is list and all(type(item) in (int, bool) or _is_positions(item) for item in index)


def _is_position(data: Any) -> bool:
    """Whether it is a list of one int: where a row is written, which may be another one at the next call."""
    return type(data) is list and len(data) == 1 and type(data[0]) in (int, TrackedSize)


def _filled(size: tuple[int, ...], number: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """`torch.tensor(number)`, or of a list of one, by the operator that takes any number."""
    return torch.full(size, number, dtype=_dtype_of(number, dtype), device=device)


def _is_taken_by_full(number: Any, dtype: torch.dtype | None = None, device: Any = None) -> bool:
    """Whether `full` takes the number as it is now: it refuses others than `torch.tensor`, and by other errors."""
    plain, dtype = plain_size(_plain(number)), _dtype_of(number, dtype)  # comparing a size would ask about it
    if isinstance(plain, int) and not -(2**63) <= plain < 2**63:
        return False
    if dtype is torch.bool:
        return True
    if not math.isfinite(plain):
        return dtype.is_floating_point or dtype.is_complex
    limits: Any = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)
    return bool(limits.min <= plain <= limits.max)


def _dtype_of(number: Any, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or (torch.get_default_dtype() if isinstance(number, float) else torch.int64)


def _plain(number: Any, escapes: bool = False) -> Any:
    node = node_of(number)
    return number if node is None else node.operand_value() if escapes else node.value


__all__ = ["NUMBER_ONCE", "composed"]

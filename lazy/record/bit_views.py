"""Views by the conjugate or negative bit (`x.conj()`), and views of a storage's bytes as another dtype.

Both are recorded as operators of the trace, writes through them included.

Invariant: operators on a view with bits are recorded on its resolved values, in memory of their own; views of it are
views of the stored memory, with the bits; what is written to it is written to the stored memory, conjugated back.
Bytes that a view of another dtype cannot reach keep their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torchlazy.lazy.numbers.tracked import plain_number
from torchlazy.lazy.record.tensor import LazyTensor, wrap_view
from torchlazy.lazy.shapes.infer import to_meta
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.geometry import CONJUGATED, NEGATED, Geometry, bits_of, flat, show_bits, with_bits
from torchlazy.lazy.trace.op_schema import IDENTITY_OPS, OpPlan
from torchlazy.lazy.trace.trace import Slot

aten = torch.ops.aten
_BIT = {aten._conj.default: CONJUGATED, aten._neg_view.default: NEGATED}
_COPIES = {None, torch.preserve_format, torch.contiguous_format}


class Records(Protocol):
    """A recorder of operators."""

    ops_recorded: int

    def twin(self, source: LazyTensor) -> LazyTensor:
        """The same view of the same storage."""

    def dispatch(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of one more operator."""


def have_bits(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether one of the operands is a view with bits."""
    return any(tensor._geometry.bits for tensor in _lazies((*args, *kwargs.values())))


def _lazies(values: Sequence[Any]) -> Iterator[LazyTensor]:
    for value in values:
        if isinstance(value, LazyTensor):
            yield value
        elif type(value) is list or type(value) is tuple:
            yield from _lazies(value)


def conjugate(recorder: Records, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`x.conj()` and the negative view of an imaginary part: the same memory, seen with a bit, or without it again."""
    source = args[0]
    if not isinstance(source, LazyTensor):
        return NotImplemented
    recorder.ops_recorded += 1
    return _seen(source, source, _BIT[plan.op])


def _seen(source: LazyTensor, window: LazyTensor, bits: int) -> LazyTensor:
    """The view `window` with these bits flipped, as a view of `source`."""
    geom = with_bits(window._geometry, window._geometry.bits ^ bits)
    return wrap_view(source, window._storage_, geom, None, -1)


def _as_it_lies(tensor: LazyTensor) -> LazyTensor:
    return _seen(tensor, tensor, tensor._geometry.bits)


def resolved(recorder: Records, tensor: LazyTensor) -> LazyTensor:
    """The values of a view with bits, in memory of their own."""
    return _turned(recorder, _as_it_lies(tensor), tensor._geometry.bits)


def _turned(recorder: Records, tensor: Any, bits: int) -> Any:
    if bits & CONJUGATED:
        tensor = recorder.dispatch(aten._conj_physical.default, (tensor,), {})
    return recorder.dispatch(aten.neg.default, (tensor,), {}) if bits & NEGATED else tensor


def record_with_bits(recorder: Records, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record an operator with an operand that is a view with bits."""
    if plan.op in IDENTITY_OPS:
        return recorder.twin(args[0])
    if (plan.kind == "view" or plan.op is aten.as_strided.default) and isinstance(args[0], LazyTensor):
        return _view(recorder, plan, args, kwargs)
    shown = {id(tensor): tensor for tensor in _lazies((*args, *kwargs.values())) if tensor._geometry.bits}
    numbers = {key: resolved(recorder, tensor) for key, tensor in shown.items()}
    given, named = _put(tuple(args), numbers), {name: _put(value, numbers) for name, value in kwargs.items()}
    if plan.op is aten.clone.default and named.get("memory_format") in _COPIES and given[0].is_contiguous():
        return given[0]
    found = recorder.dispatch(plan.op, given, named)
    back: dict[int, LazyTensor] = {}
    for position in plan.written:
        value = args[position] if position < len(args) else kwargs.get(plan.names[position])
        for target in _lazies((value,)):
            if target._geometry.bits:
                made = numbers[id(target)]
                back[id(made)] = target
                lies = _turned(recorder, made, target._geometry.bits)
                recorder.dispatch(aten.copy_.default, (_as_it_lies(target), lies), {})
    return _put(found, back)


def _put(value: Any, others: Mapping[int, LazyTensor]) -> Any:
    """The value with some tensors replaced by others. Not a closure: a recursive one would keep the call's tensors
    alive until the cycle collector runs."""
    if type(value) is list or type(value) is tuple:
        return type(value)([_put(item, others) for item in value])
    return others.get(id(value), value)


def _view(recorder: Records, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The view of the stored memory, with the bits that torch's own operator gives; or its error."""
    source = args[0]
    with below_autograd():
        (sample,) = show_bits(to_meta([with_bits(source._geometry, 0)]), source._geometry.bits)
        expected = plan.op(sample, *map(plain_number, args[1:]), **kwargs)
    found = recorder.dispatch(plan.op, (_as_it_lies(source), *args[1:]), kwargs)
    if isinstance(found, LazyTensor):
        return _seen(source, found, bits_of(expected))
    return type(found)(_seen(source, one, bits_of(like)) for one, like in zip(found, expected, strict=True))


_aten = torch.ops.aten


class Appends(Protocol):
    """A trace that grows."""

    def append(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: tuple[Any, ...], results: Any) -> Any:
        """The slots of the results of one more operator."""


def memory_as(real: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory from where `real` begins as one contiguous row, whatever the strides of `real` are; a rest that is
    smaller than an element is left out."""
    size = real.element_size()
    nbytes = real.untyped_storage().nbytes() - real.storage_offset() * size
    nbytes -= nbytes % max(size, dtype.itemsize)
    return real.as_strided((nbytes // size,), (1,), real.storage_offset()).view(dtype)


def as_dtype(trace: Appends, base_slot: Slot, base: Geometry, dtype: torch.dtype) -> tuple[Slot, Geometry]:
    """A storage's bytes as one row of elements of another dtype; a rest that is smaller than one is left out."""
    count = base.span * base.dtype.itemsize // dtype.itemsize
    used = flat(count * dtype.itemsize // base.dtype.itemsize, base.dtype, base.device, base.compute)
    if used is not base:
        base_slot = trace.append(_aten.as_strided.default, (base_slot, used.shape, (1,), 0), (), used)
    if used.nbytes != base.nbytes:  # torch wants memory of whole elements under some operators
        base_slot = trace.append(_aten.clone.default, (base_slot,), (), used)
    whole = flat(count, dtype, base.device, base.compute)
    return trace.append(_aten.view.dtype, (base_slot, dtype), (), whole), whole


def written_as_dtype(trace: Appends, old: Slot, base: Geometry, value: Slot, geom: Geometry) -> Slot:
    """The storage's value `old` after a write of `value` through a view of another dtype."""
    row, whole = as_dtype(trace, old, base, geom.dtype)
    if geom.is_plain and geom.numel == whole.numel:
        row = value if geom is whole else trace.append(_aten.view.default, (value, whole.shape), (), whole)
    else:
        window = (geom.shape, geom.strides, geom.offset)
        row = trace.append(_aten.as_strided_scatter.default, (row, value, *window), (), whole)
    count = whole.nbytes // base.dtype.itemsize
    used = flat(count, base.dtype, base.device, base.compute)
    row = trace.append(_aten.view.dtype, (row, base.dtype), (), used)
    if used is base:
        return row
    if count == base.span:
        return trace.append(_aten.as_strided.default, (row, base.shape, base.strides, 0), (), base)
    everything = flat(base.span, base.dtype, base.device, base.compute)  # with the rest that no view can reach
    if everything is not base:
        old = trace.append(_aten.as_strided.default, (old, everything.shape, (1,), 0), (), everything)
    row = trace.append(_aten.as_strided_scatter.default, (old, row, used.shape, (1,), 0), (), everything)
    if everything is base:
        return row
    return trace.append(_aten.as_strided.default, (row, base.shape, base.strides, 0), (), base)


__all__ = ["conjugate", "have_bits", "record_with_bits", "resolved"]

"""Operators that write: recorded as their functional forms, whose results become the written tensors' values.

Invariant: not recorded is what eager refuses, and what depends on the order in which elements are written: such an
operator raises `NeedsMemory` before any tensor has a new value, and runs for real.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.record.running_trace import NeedsMemory
from torchlazy.lazy.record.tensor import LazyTensor, is_inference_mode
from torchlazy.lazy.trace.geometry import Geometry, overlap, overlaps_itself
from torchlazy.lazy.trace.op_schema import OpPlan
from torchlazy.lazy.trace.trace import Slot

if TYPE_CHECKING:
    from torchlazy.lazy.record.recorder import Recorder

_MAX_PLAIN_WRITES = 100_000
_ADDED_TO = frozenset({"addmm", "addmv", "addbmm", "baddbmm", "addr"})  # their first argument is read elementwise


def record_inplace(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record an operator that changes arguments, lists among them; returns what the operator itself returns."""
    targets = _write_targets(plan, args, kwargs)
    key: list[Any] = [plan]
    encoded, named = recorder.encode_call(plan, args, kwargs, key)
    target = targets[0]
    plain = recorder.plain_writes.get(tuple(key))
    if plain is not None and not any(getattr(a, "_storage_", None) is target._storage_ for a in args[1:]):
        value = recorder.append(plan.functional, encoded, named, plain)
        recorder.write(target, value)
        recorder.ops_recorded += 1
        if len(recorder.entries) > config.max_trace_length:
            recorder.cut("trace length limit")
        return target
    # First the call itself, for eager's checks, then its functional form.
    _, (args_after, kwargs_after) = recorder.infer(key, plan, plan.op, args, kwargs)
    results, _ = recorder.infer(key, plan, plan.functional, args, kwargs)
    if type(results) is Geometry and type(target) is LazyTensor:  # the real operator raises
        if results.shape != target._geometry.shape:
            raise NeedsMemory("the written tensor would have to grow")
        if not torch.can_cast(results.dtype, target._geometry.dtype):
            raise NeedsMemory("the written tensor cannot hold the result")
    if plan.written == (0,) and type(target) is LazyTensor and results is target._geometry is args_after[0]:
        if len(recorder.plain_writes) >= _MAX_PLAIN_WRITES:
            recorder.plain_writes.clear()
        recorder.plain_writes[tuple(key)] = results
    for position, target in zip(plan.written, targets, strict=True):
        if type(target) is list or target is None:
            continue
        after = args_after[position] if position < len(args) else kwargs_after[plan.names[position]]
        if after is not target._geometry:
            raise NeedsMemory("changes the size of memory")
        _check_overlap(target, args)
    _check_lists(targets, args)
    outputs = recorder.append(plan.functional, encoded, named, results)
    recorder.ops_recorded += 1
    returned = _write_results(recorder, plan, targets, outputs, results)
    if len(recorder.entries) > config.max_trace_length:
        recorder.cut("trace length limit")
    return returned


def _write_targets(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The written arguments, in schema order (lists stay lists)."""
    targets: list[Any] = []
    for position in plan.written:
        value = args[position] if position < len(args) else kwargs.get(plan.names[position])
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if item is not None and not isinstance(item, LazyTensor):
                raise NeedsMemory(f"a write to a tensor on {getattr(item, 'device', type(item))}")
        targets.append(list(value) if isinstance(value, (list, tuple)) else value)
    return targets


def _check_overlap(target: LazyTensor, args: Sequence[Any], elementwise: bool = True) -> None:
    """A write to memory that also an argument, or the target twice, refers to: an error, or dependent on order."""
    if overlaps_itself(target._geometry):
        raise NeedsMemory("elements of the written tensor share memory")
    for value in _each(args):
        if (
            isinstance(value, LazyTensor)
            and value._storage_ is target._storage_
            and not (elementwise and value._geometry is target._geometry)
            and overlap(value._geometry, target._geometry)
        ):
            raise NeedsMemory("an argument overlaps the written memory")


def _check_lists(targets: Sequence[Any], args: Sequence[Any]) -> None:
    """A tensor of a written list that shares memory with another argument: its values depend on the order.

    Not so where each element is read before it is written: the same view at the same position of another list.
    """
    written = [(i, item) for target in targets if type(target) is list for i, item in enumerate(target)]
    if not written:
        return
    if not is_inference_mode() and any(item.is_inference() for _, item in written):  # torch does not check our lists
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a "
            "normal tensor before doing inplace update."
        )
    seen: dict[int, list[tuple[int, LazyTensor]]] = {}
    for argument in args:
        is_list = isinstance(argument, (list, tuple))
        for i, item in enumerate(argument) if is_list else ((-1, argument),):
            if isinstance(item, LazyTensor):
                seen.setdefault(id(item._storage_), []).append((i, item))
    for i, item in written:
        if overlaps_itself(item._geometry):
            raise NeedsMemory("elements of a written tensor share memory")
        others = seen.get(id(item._storage_), ())
        if len(others) > 1 and any(
            (j != i or other._geometry is not item._geometry) and overlap(other._geometry, item._geometry)
            for j, other in others
        ):
            raise NeedsMemory("tensors of a written list share memory")


def _write_results(recorder: Recorder, plan: OpPlan, targets: list[Any], outputs: Any, results: Any) -> Any:
    """Write the functional results into the targets; returns what the mutating operator returns."""
    flat_outputs = outputs if type(outputs) is tuple else (outputs,)
    schema_returns = len(plan.op._schema.returns)
    if len(targets) == 1 and isinstance(targets[0], list):
        flat_outputs = (flat_outputs,) if type(flat_outputs[0]) is Slot or not flat_outputs else flat_outputs
    own = len(flat_outputs) - len(targets)  # functional forms return their own results first or last
    order = _functional_order(plan)
    for target, position in zip(targets, order, strict=True):
        value = flat_outputs[position]
        if target is None:
            continue
        if isinstance(target, list):
            for item, item_value in zip(target, value, strict=True):
                recorder.write(item, item_value)
        else:
            recorder.write(target, value)
    if plan.is_list_write:
        torch.autograd.graph.increment_version(targets[0])
    if schema_returns == 0:
        return None
    if own <= 0:
        return targets[0] if schema_returns == 1 else tuple(targets)
    flat_results = results if type(results) is tuple else (results,)
    kept = [i for i in range(len(flat_outputs)) if i not in order]
    fresh = iter(recorder.wrap_new(flat_outputs[i], flat_results[i]) for i in kept)
    writes = iter(targets)
    out = [
        next(writes) if r.alias_info is not None and r.alias_info.is_write else next(fresh)
        for r in plan.op._schema.returns
    ]
    return out[0] if len(out) == 1 else tuple(out)


def record_out(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record an operator with `out=`; returns the tensors that it was given there."""
    targets = _write_targets(plan, args, kwargs)
    written = {plan.names[i] for i in plan.written}
    key: list[Any] = [plan]
    inputs = {name: value for name, value in kwargs.items() if name not in written}
    count = len([i for i in range(len(args)) if i not in plan.written])
    encoded, named = recorder.encode_call(plan, args[:count], inputs, key)
    for target in targets:
        recorder.encode(target, False, key)
    _, (args_after, kwargs_after) = recorder.infer(key, plan, plan.op, args, kwargs)
    results, _ = recorder.infer(key, plan, plan.functional, args[:count], inputs)
    after = [kwargs_after[plan.names[i]] if i >= len(args) else args_after[i] for i in plan.written]
    values = (results,) if len(targets) == 1 else results
    added_to = args[: plan.base in _ADDED_TO]
    for target, geom, value in zip(targets, after, values, strict=False):
        _check_out(target, geom, value, args[len(added_to) : count], torch.Tag.pointwise in plan.op.tags)
        if added_to:
            _check_overlap(target, added_to)
    outputs = recorder.append(plan.functional, encoded, named, results)
    recorder.ops_recorded += 1
    for target, slots in zip(targets, (outputs,) if len(targets) == 1 else outputs, strict=False):
        if isinstance(target, list):
            for item, item_slot in zip(target, slots, strict=True):
                recorder.write(item, item_slot)
                torch.autograd.graph.increment_version(item)  # torch's own kernels do so for single tensors only
        elif target is not None and slots is not None:
            recorder.write(target, slots)
    returns = len(plan.op._schema.returns)
    return None if returns == 0 else targets[0] if len(targets) == 1 else tuple(targets)


def _check_out(target: Any, after: Any, value: Any, inputs: Sequence[Any], elementwise: bool) -> None:
    """Only an `out=` of the functional result's size and dtype can be recorded: eager's rules for others differ."""
    if isinstance(target, list):
        for each in zip(target, after, value, strict=True):
            _check_out(*each, inputs, elementwise)
    elif target is not None and value is not None:
        have = target._geometry
        if after is not have or have.shape != value.shape or have.dtype != value.dtype:
            raise NeedsMemory("out= of another size or dtype")
        _check_overlap(target, inputs, elementwise)


def _each(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


_ORDERS: dict[torch._ops.OpOverload, tuple[int, ...]] = {}


def _functional_order(plan: OpPlan) -> tuple[int, ...]:
    """Positions among the functional results of the new values of the written arguments, in their order.

    Generated functional forms return the operator's own results first, then the new values.
    """
    found = _ORDERS.get(plan.op)
    if found is None:
        own = sum(
            1
            for r in plan.op._schema.returns
            if "Tensor" in str(r.type) and not (r.alias_info is not None and r.alias_info.is_write)
        )
        found = _ORDERS[plan.op] = tuple(range(own, own + len(plan.written)))
    return found


__all__ = ["record_inplace", "record_out"]

"""Collectives between processes: those of `torch.distributed`, functional ones, and their futures.

A collective of `torch.distributed` runs at once, on the memory of its tensors: its schema names no written argument,
and each may be one. Functional collectives are recorded, each with the wait for it: no value of a trace is in flight.

Invariant: operators recorded before a collective read its tensors as they were, those after it as they are then.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from torchlazy.lazy.ops.collective_log import COLLECTIVE_LOG
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.running_trace import NeedsMemory
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, wrap, writes_with_grad
from torchlazy.lazy.torch_private.dispatch import below_autograd, memory_key
from torchlazy.lazy.torch_private.distributed import finished_work
from torchlazy.lazy.trace.geometry import geometry_like
from torchlazy.lazy.trace.nested import map_nested
from torchlazy.lazy.trace.op_schema import OpPlan
from torchlazy.lazy.trace.storage import LazyStorage

_COPY = torch.ops.aten.copy_.default
# torch defines it in Python, when it is first needed: it makes a tensor that is waited for at its first read.
_WRAPS = "_c10d_functional::_wrap_tensor_autograd"
_WRITE_WHEN_WAITED_FOR = ("reduce_scatter_", "_reduce_scatter_base_")  # over gloo: by operators, under our modes
# Their schemas declare no effect; they write, or read their tensor later.
_MESSAGES = frozenset({"isend", "irecv", "batch_p2p_ops"})


def install(recorder: Recorder) -> None:
    """Put the handlers of all collectives into the recorder's table, and let futures return lazy tensors."""
    if not torch.distributed.is_available():
        return
    given = GivenMemory()
    at_once = functools.partial(_run_at_once, given)
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and schema.name != _WRAPS:
            op = getattr(getattr(getattr(torch.ops, namespace), name), schema.overload_name or "default")
            if namespace == "c10d" or name in _MESSAGES:
                recorder.handlers[op] = at_once
            else:
                recorder.handlers[op] = _wait if name == "wait_tensor" else _record_and_wait
    recorder.handlers_by_name[_WRAPS] = _wait
    future: Any = torch._C.Future
    for read in ("value", "wait"):
        setattr(future, read, _read_lazily(getattr(future, read), given))
    future.then = _leaving_memory(future.then, recorder, given)


class GivenMemory:
    """Memory of lazy tensors that was passed to collectives: futures hold it as ordinary tensors."""

    def __init__(self) -> None:
        self._storages: weakref.WeakValueDictionary[int, LazyStorage] = weakref.WeakValueDictionary()

    def note(self, storage: LazyStorage) -> None:
        if storage.base.device == LAZY and storage.real is not None:
            self._storages[memory_key(storage.real)] = storage

    def lazily(self, value: Any) -> Any:
        """A future's value, with lazy tensors again in place of ordinary ones over their memory."""
        if type(value) is list or type(value) is tuple:
            return type(value)(map(self.lazily, value))
        if type(value) is not torch.Tensor or not self._storages:
            return value
        storage = self._storages.get(memory_key(value))
        if storage is None or storage.real is None or memory_key(storage.real) != memory_key(value):
            return value
        return wrap(storage, geometry_like(value, LAZY, storage.base.compute), None, -1)


def _read_lazily(read: Callable[[Any], Any], given: GivenMemory) -> Callable[[Any], Any]:
    @functools.wraps(read)
    def lazily(future: Any) -> Any:
        return given.lazily(read(future))

    return lazily


def _leaving_memory(then: Callable[..., Any], recorder: Recorder, given: GivenMemory) -> Callable[..., Any]:
    """`Future.then` whose future holds real memory: the future of a GPU's collective needs its value's address."""

    def memory(value: Any) -> Any:
        if not isinstance(value, LazyTensor) or value.device != LAZY:
            return value
        with recorder.lock:
            real = recorder.hand_out(value, "held by a future")
            given.note(value._storage_)
        return real

    @functools.wraps(then)
    def leaving(future: Any, callback: Callable[[Any], Any]) -> Any:
        return then(future, lambda done: map_nested(memory, callback(done)))

    return leaving


def _run_at_once(
    given: GivenMemory, recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run on real memory, which stays the tensors' own: the collective may write it until it is waited for."""
    cause = f"{plan.op.name()}: communication between processes"
    recorder.cut(cause)  # what is pending may read what is written now
    capture = recorder.capture
    is_noted = capture is not None and capture.communicates(plan.op, args, kwargs)
    storages = {id(tensor._storage_): tensor._storage_ for tensor in _lazies((args, tuple(kwargs.values())))}
    memory = {id(tensor): recorder.hand_out(tensor, cause) for tensor in _lazies((args, tuple(kwargs.values())))}
    is_done = plan.op.namespace == "c10d" and _is_at_hand(plan.op, [memory[id(one)] for one in _lazies(args[:1])])
    if is_noted:
        recorder.capture = None  # it is no eager fallback: the capture knows it
    try:
        if is_done:
            result = finished_work() if len(plan.op._schema.returns) == 1 else (args[0], finished_work())
        else:
            result = recorder.run_eagerly(plan.op, args, kwargs, "communication between processes")
            if is_noted and plan.op.name().partition("::")[2].startswith(_WRITE_WHEN_WAITED_FOR):
                with recorder.apart():
                    work = torch.distributed.Work.unbox(result[1])  # type: ignore[attr-defined]
                    if work is not None:  # NCCL has waited already
                        work.wait()
                result = (result[0], finished_work())
    finally:
        recorder.capture = capture
    for storage in storages.values():
        storage.version += 1
        given.note(storage)
    writes_with_grad[0] += 1
    return result


def _is_at_hand(op: torch._ops.OpOverload, written: Sequence[torch.Tensor]) -> bool:
    """Whether a replay of this call ran the collective already; its results are in the tensors then."""
    with below_autograd():
        return COLLECTIVE_LOG.take(op, written)


def _lazies(value: Any) -> Iterator[LazyTensor]:
    if isinstance(value, LazyTensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _lazies(item)


def _record_and_wait(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A functional collective in its form that returns new tensors, each waited for."""
    if plan.kind not in ("pure", "inplace", "out"):
        return NotImplemented
    written = [args[i] if i < len(args) else kwargs[plan.names[i]] for i in plan.written]
    targets = [tensor for value in written for tensor in (value if isinstance(value, list | tuple) else [value])]
    if not all(isinstance(target, LazyTensor) for target in targets):
        raise NeedsMemory("it writes to a tensor that is not lazy")
    made = _record(recorder, plan.functional, args, {name: value for name, value in kwargs.items() if name != "out"})
    waited = [_record(recorder, _wait_op(), (one,), {}) for one in (made if isinstance(made, list | tuple) else [made])]
    if not targets:
        return waited if isinstance(made, list | tuple) else waited[0]
    for target, value in zip(targets, waited, strict=True):
        if target.shape != value.shape or target.dtype != value.dtype:
            raise NeedsMemory("its result does not fit the written tensor")
        recorder.dispatch(_COPY, (target, value), {})
    return written[0]


def _record(recorder: Recorder, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record an entry without a step: an operator of that name is two entries here, not this one alone."""
    plan = recorder.plan(op)
    key: list[Any] = [plan]
    encoded, named = recorder.encode_call(plan, args, kwargs, key)
    results, _ = recorder.infer(key, plan, op, args, kwargs)
    recorder.ops_recorded += 1
    return recorder.wrap_new(recorder.append(op, encoded, named, results), results)


def _wait(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The tensor itself: recorded values include their wait, real memory is waited for now."""
    tensor = args[0]
    if not isinstance(tensor, LazyTensor):
        return NotImplemented
    storage = tensor._storage_
    if not (storage.epoch == recorder.epoch and storage.dirty):
        _wait_op()(recorder.real(tensor, "wait_tensor"))
    return recorder.twin(tensor)


def _wait_op() -> torch._ops.OpOverload:
    return torch.ops._c10d_functional.wait_tensor.default


__all__ = ["install"]

"""Eager fallback: an operator that cannot be recorded runs at once, on the real memory of lazy tensors.

Invariant: afterwards every alias is as in eager: results that share memory with an argument share its lazy storage, and
an argument whose size or memory changed is updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.numbers.tracked import plain_number
from torchlazy.lazy.record.bit_views import memory_as
from torchlazy.lazy.record.lent_memory import mark_lent
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, note_change, wrap, wrap_view, writes_with_grad
from torchlazy.lazy.torch_private.dispatch import below_autograd, without_bits
from torchlazy.lazy.trace.geometry import flat, geometry_like, is_dense, show_bits, with_bits
from torchlazy.lazy.trace.nested import map_nested

if TYPE_CHECKING:
    from torchlazy.lazy.record.recorder import Recorder

# Operators that accept index or length tensors on the CPU beside operands on a device, as they do for CUDA.
_TAKES_CPU_TENSORS = frozenset(
    {
        "aten::index.Tensor",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index.Tensor",
        "aten::copy_",
        "aten::_pack_padded_sequence",
        "aten::_pack_padded_sequence_backward",
        "aten::set_.source_Storage_storage_offset",
        "aten::set_.source_Storage",
    }
)


# Sparse tensors are never lazy. They are on the host, whatever the target: as gradients of lazy tensors on a GPU they
# would make torch's engine, which knows the accelerator's streams only, look for streams of the lazy device.
_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def real_memory(recorder: Recorder, tensor: LazyTensor, cause: str) -> torch.Tensor:
    """The tensor's memory, with its geometry; cuts the trace when it is not there yet. Aliases the storage."""
    with recorder.lock:
        storage = tensor._storage_
        if storage.epoch == recorder.epoch and storage.dirty:
            recorder.cut(cause)
        elif recorder.gate is not None:
            recorder.gate(cause)
        if storage.poison is not None:
            raise storage.poison
        real = storage.real
        assert real is not None
        geom = tensor._geometry
        with below_autograd():
            if geom.bits:
                lies = with_bits(geom, 0)
                return show_bits([real_memory(recorder, wrap(storage, lies, None, -1), cause)], geom.bits)[0]
            if geom.dtype != real.dtype:
                real = memory_as(real, geom.dtype)
            elif geom.shape == storage.base.shape and geom.strides == storage.base.strides and not geom.offset:
                return real.detach()
            return real.as_strided(geom.shape, geom.strides, real.storage_offset() + geom.offset)


@contextmanager
def _one_read(recorder: Recorder, op: torch._ops.OpOverload, reason: str) -> Iterator[str]:
    """Report that `op` runs at once. Inside, its operands are read: one read with one cause, however many they are."""
    cause = f"{op.name().removeprefix('aten::')}: {reason}"
    gate = recorder.gate
    if gate is not None:
        gate(cause)
    recorder.on_eager(op, reason)
    if recorder.capture is not None:
        recorder.capture.ran_eagerly(op, reason)
    recorder.gate = None
    try:
        yield cause
    finally:
        recorder.gate = gate


def run_unwrapped(
    recorder: Recorder, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], reason: str
) -> Any:
    """Under `lazy_mode`, an operator with another kind of tensor among its operands: run on real memory by that kind's
    own rules; its result is not wrapped."""
    with _one_read(recorder, op, reason) as cause:
        recorder.cut(cause)

        def real(value: Any) -> Any:
            if isinstance(value, LazyTensor):
                memory = recorder.hand_out(value, cause)
                mark_lent(recorder, value._storage_)
                return memory
            return value

        real_args = map_nested(real, tuple(args))
        real_kwargs = {name: map_nested(real, value) for name, value in kwargs.items()}
        if recorder.plan(op).written:
            recorder.rematerialize_pending()
    was_busy, recorder.busy = recorder.busy, True
    try:
        return op(*real_args, **real_kwargs)
    finally:
        recorder.busy = was_busy


def run_eagerly(
    recorder: Recorder, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], reason: str
) -> Any:
    """Cut, run `op` on real memory at once, and wrap what it returns; aliases of arguments stay aliases."""
    for value in (*args, *kwargs.values()):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, LazyTensor):
                recorder.move_to_target(tensor)
    device, compute = recorder.claimed(args, kwargs)
    lazies: list[tuple[LazyTensor, torch.Tensor]] = []
    known: dict[int, torch.Tensor] = {}
    brought: list[tuple[torch.Tensor, torch.Tensor]] = []  # sparse tensors, and their copies on the target

    def unwrap(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            real = known.get(id(value))
            if real is None:  # one tensor stays one object: torch checks whether `out=` is an operand too
                real = known[id(value)] = real_memory(recorder, value, cause)
                lazies.append((value, real))
            return real
        if isinstance(value, torch.device) and value.type == "lazy":
            return torch.device(recorder.target)
        if isinstance(value, torch.Tensor) and device == LAZY:
            _check_same_device(op, value)
            if value.layout in _SPARSE and value.device.type == "cpu" and compute != "cpu":
                moved = value.to(compute)
                brought.append((value, moved))
                return moved
        return plain_number(value)  # autograd keeps sizes that a captured call computed

    with _one_read(recorder, op, reason) as cause:
        real_args = [map_nested(unwrap, a) for a in args]
        real_kwargs = {name: map_nested(unwrap, value) for name, value in kwargs.items()}
        written_before = [(tensor, real, real._version) for tensor, real in lazies]
        if recorder.plan(op).written:
            recorder.rematerialize_pending()
        # A storage that this operator may write no longer holds what the running trace has as its input.
        if lazies and recorder.plan(op).written and any(t._storage_.epoch == recorder.epoch for t, _ in lazies):
            recorder.cut(cause)
    if recorder.compute_others is not None:
        recorder.compute_others()
    was_busy, recorder.busy = recorder.busy, True
    try:
        with below_autograd():
            result = op(*real_args, **real_kwargs)
    finally:
        recorder.busy = was_busy
    if lazies and any(not is_dense(one) for one in _flat(result)):
        _lend_kept(recorder, lazies, cause)
    owners = {real.untyped_storage()._cdata: tensor for tensor, real in lazies}
    by_identity = {id(real): tensor for tensor, real in lazies}
    for tensor, real, before in written_before:
        if real._version != before or recorder.plan(op).written:
            tensor._storage_.version += 1
            writes_with_grad[0] += 1
            _adopt_geometry(recorder, tensor, real)

    if recorder.plan(op).is_list_write:
        torch.autograd.graph.increment_version([one for one in args[0] if isinstance(one, LazyTensor)])
    for host, moved in brought:
        if recorder.plan(op).written:
            with below_autograd():
                host.copy_(moved)

    def rewrap(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in by_identity:
                return by_identity[id(value)]
            if device == LAZY and value.layout in _SPARSE:
                return next((host for host, moved in brought if moved is value), None) or value.cpu()
            if device != LAZY and not recorder.mode_depth and is_dense(value):
                owner = owners.get(value.untyped_storage()._cdata)
                if owner is not None:  # an ordinary tensor shares this memory from now on
                    recorder.hand_out(owner, cause)
                return value
            if not is_dense(value):
                return value
            owner = owners.get(value.untyped_storage()._cdata)
            if owner is not None:
                geom = geometry_like(value, owner._geometry.device, compute)
                return wrap_view(owner, owner._storage_, geom, None, -1)
            if str(value.device) != compute:
                return value
            with below_autograd():
                return recorder.new_real_tensor(value.resolve_conj().resolve_neg(), device)
        return value

    return map_nested(rewrap, result)


def _flat(result: Any) -> Iterator[torch.Tensor]:
    for value in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(value, torch.Tensor):
            yield value


def _lend_kept(recorder: Recorder, lazies: Sequence[tuple[LazyTensor, torch.Tensor]], cause: str) -> None:
    """An operator gave a tensor of another kind (sparse, nested): it may hold the memory of what it was made from."""
    for tensor, _ in lazies:
        if tensor._geometry.device == LAZY:
            mark_lent(recorder, tensor._storage_)
        else:
            recorder.hand_out(tensor, cause)


def _adopt_geometry(recorder: Recorder, tensor: LazyTensor, real: torch.Tensor) -> None:
    """Adopt the size and memory that a real in-place operator (`resize_`, `set_`) gave the tensor."""
    geom = geometry_like(real, tensor._geometry.device, tensor._geometry.compute)
    storage = tensor._storage_
    if storage.real is not None and real.untyped_storage()._cdata == storage.real.untyped_storage()._cdata:
        if geom is tensor._geometry:
            return
        count = real.untyped_storage().nbytes() // real.element_size()
        storage.base = flat(count, real.dtype, geom.device, geom.compute)
        note_change(None)  # other tensors on this memory
        storage.real = without_bits(real).as_strided((count,), (1,), 0)
    else:
        replacement = recorder.new_real_tensor(real, geom.device)
        storage = replacement._storage_
    tensor._become(wrap(storage, geom, None, -1))


def _check_same_device(op: torch._ops.OpOverload, value: torch.Tensor) -> None:
    if isinstance(value, LazyTensor) or value.dim() == 0 or op.name() in _TAKES_CPU_TENSORS:
        return
    if not is_dense(value):
        return  # such tensors are never lazy: they are real, and meet lazy ones where both are read
    if value.device.type == "lazy":
        raise RuntimeError(
            f"torchlazy: {op.name()} has tensors of the lazy device that were made under different settings: one is "
            "recorded natively, the other in Python (config.native_device, native, tiers or debug was changed); move "
            "one anew: x.cpu().to('lazy')"
        )
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, lazy and {value.device}! "
        f"(when recording {op.name()}; move the tensor with .to('lazy'))"
    )


def check_one_device(op: torch._ops.OpOverload, values: Sequence[Any]) -> None:
    """Raises eager's error where tensors made under `lazy_mode` meet tensors on the lazy device."""
    if op.name() in _TAKES_CPU_TENSORS:
        return
    flat_values = [item for v in values for item in (v if isinstance(v, (list, tuple)) else (v,))]
    devices = {v._geometry.device: v for v in flat_values if isinstance(v, LazyTensor) and v.dim()}
    if len(devices) > 1:
        first, second, *_ = devices
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
            f"(when recording {op.name()})"
        )

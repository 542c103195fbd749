"""Handlers of single operators: identities, reads on the host, transfers, undeclared writes.

Invariant: a handler either records, runs for real, or returns NotImplemented to let the schema decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchlazy.lazy.ops.loading import loaded_storage, loaded_view
from torchlazy.lazy.record.bit_views import conjugate
from torchlazy.lazy.record.lent_memory import storage_on
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.running_trace import NeedsMemory
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, wrap, wrap_view
from torchlazy.lazy.shapes.infer import to_meta
from torchlazy.lazy.torch_private.dispatch import below_autograd, refuse_gradients_by_view, views_of
from torchlazy.lazy.trace.geometry import CONJUGATED, NEGATED, check_lazy_index, overlap
from torchlazy.lazy.trace.op_schema import IDENTITY_OPS, OpPlan

aten = torch.ops.aten
MOVES = "to be on other memory"  # what `set_` and an assignment to `.data` require of a tensor


def identity(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`detach`, `alias`: the same view of the same storage; nothing is recorded."""
    source = args[0]
    if type(source) is not LazyTensor and not isinstance(source, LazyTensor):
        return NotImplemented
    return recorder.twin(source)


def is_same_size(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Called by forward derivatives; shapes are known."""
    return tuple(args[0].shape) == tuple(args[1].shape)


def assert_tensor_metadata(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Exported programs assert dtypes: known now, and an error of eager's own. A lazy tensor is on no other device."""
    source = args[0]
    if not isinstance(source, LazyTensor):
        return NotImplemented
    device = kwargs.get("device")
    if device is not None and source.device != LAZY and torch.device(device) != source.device:
        raise RuntimeError(f"Tensor device mismatch! Expected: {device}, Got: {source.device}")
    with below_autograd():
        plan.op(to_meta(source._geometry), *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})


def has_same_storage_numel(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Asked where a tangent is put on a tensor: how much memory each lies in is known."""
    first, second = map(_room, args)
    return first == second


def _room(x: torch.Tensor) -> int:
    """How many elements like its own the memory of a tensor holds."""
    if isinstance(x, LazyTensor):
        return x._storage_.base.span * x._storage_.base.dtype.itemsize // x.dtype.itemsize
    return x.untyped_storage().nbytes() // x.dtype.itemsize


def zeros_for_tangent(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Zeros that lie as a tensor does, in as much memory: a view of it may reach beyond its window. Conjugated where it
    is: torch would only set a bit afterwards, and asks no operator for it."""
    tangent, of = args[:2]
    if not isinstance(of, LazyTensor):
        return NotImplemented
    geom, room = of._geometry, _room(of)
    batch = tuple(tangent.shape[: (args[2:] or (kwargs.get("self_num_batch_dims", 0),))[0]])
    on = {"dtype": tangent.dtype, "device": geom.device}
    found = recorder.dispatch(aten.zeros.default, ([*batch, room],), on)
    window = ([*batch, *geom.shape], [*found.stride()[:-1], *geom.strides], geom.offset)
    found = recorder.dispatch(aten.as_strided.default, (found, *window), {})
    if geom.bits & CONJUGATED and tangent.dtype.is_complex:
        found = recorder.dispatch(aten._conj.default, (found,), {})
    return recorder.dispatch(aten._neg_view.default, (found,), {}) if geom.bits & NEGATED else found


def recurrent_layer(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """oneDNN's kernel makes the backward's workspace where gradients are on, whatever `train` (the 16th) is: recorded
    with `train` set accordingly."""
    if len(args) < 16:
        return NotImplemented
    return recorder.record_pure(plan.op, [*args[:15], torch.is_grad_enabled()], kwargs)


def local_scalar(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`item()`, `bool()`, `int()`, `float()`: the one value, on the host."""
    source = args[0]
    if not isinstance(source, LazyTensor):
        return NotImplemented
    if recorder.reading_as == "bool" and (known := recorder.constant(source)) is not None:
        return known
    cause = recorder.reading_as or "item"
    if (found := recorder.read_apart(source, cause)) is not None:
        return found.value
    real = recorder.real(source, cause)
    with below_autograd():
        return real.item()


def is_pinned(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """What is recorded never is; an ordinary tensor in `lazy_mode` may be."""
    real = args[0]._storage_.real if isinstance(args[0], LazyTensor) else args[0]
    with below_autograd():
        return real is not None and real.is_pinned()


def to_copy(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`.to(...)`: within the lazy device a recorded cast, across devices a transfer."""
    source = args[0]
    device = kwargs.get("device")
    if device is not None and device.type == "lazy":
        check_lazy_index(device)
        device = LAZY
    if isinstance(source, LazyTensor):
        if device is None or device == source._geometry.device:
            return NotImplemented
        if device.type == "lazy":
            return _to_lazy(recorder, recorder.real(source, "to lazy"), kwargs)
        if device.type == "meta":  # no values needed: forward derivatives use it for a tangent's layout
            return aten._to_copy.default(to_meta(source._geometry), **kwargs)
        real = recorder.real(source, "cpu" if device.type == "cpu" else f"to {device}")
        with below_autograd():
            return aten._to_copy.default(real, **kwargs)
    if device is not None and device.type == "lazy":
        return _to_lazy(recorder, source, kwargs)
    return NotImplemented


def transfer(recorder: Recorder) -> Callable[..., Any]:
    """`.to("lazy")` of an ordinary tensor, which records nothing; else NotImplemented."""

    def to_copy(source: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
        if device is None or args or isinstance(source, LazyTensor) or device.type != "lazy":
            return NotImplemented
        if recorder.mode_depth or recorder.capture is not None:
            return NotImplemented
        check_lazy_index(device)
        return _to_lazy(recorder, source, kwargs)

    return to_copy


def _to_lazy(recorder: Recorder, source: torch.Tensor, kwargs: dict[str, Any]) -> LazyTensor:
    """A copy of an ordinary tensor on the compute device, as the memory of a new lazy tensor."""
    kwargs = dict(kwargs)
    kwargs["device"] = torch.device(recorder.target)
    with below_autograd():
        real = aten._to_copy.default(source.detach(), **kwargs)
        if real.untyped_storage()._cdata == source.untyped_storage()._cdata:
            real = real.clone()
        made = recorder.new_real_tensor(real, LAZY)
        if recorder.capture is not None:
            recorder.capture.moved(source, made._storage_)
    return made


def copy_(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`a.copy_(b)`: from the host a transfer, to the host a read, else a recorded write."""
    target, source = args[0], args[1]
    if not isinstance(source, torch.Tensor):  # a number is taken as a tensor that holds it exactly
        made = {bool: torch.bool, int: torch.int64, float: torch.float64}.get(type(source), torch.complex128)
        on = {"dtype": made, "device": target.device}
        source = recorder.dispatch(aten.full.default, ([], source), on)
        return recorder.dispatch(aten.copy_.default, (target, source, *args[2:]), kwargs)
    if isinstance(target, LazyTensor):
        if isinstance(source, LazyTensor) and source._geometry.device == target._geometry.device:
            return NotImplemented
        if isinstance(source, LazyTensor):
            source = recorder.real(source, "copy_")
        if recorder.capture is not None:
            recorder.capture.refuse("it copies from one device to another")
        with below_autograd():
            moved = torch.empty_strided(
                tuple(target.shape), target._geometry.strides, dtype=target.dtype, device=target._geometry.compute
            )
            moved.copy_(source.detach())
        _replace(recorder, target, moved)
        return target
    if isinstance(source, LazyTensor) and not recorder.mode_depth:
        real = recorder.real(source, "copy_")
        with below_autograd():
            target.copy_(real)
        return target
    return NotImplemented


def _replace(recorder: Recorder, target: LazyTensor, real: torch.Tensor) -> None:
    """Give `target` the value in `real`, a new tensor: as an input of the trace where it must be merged."""
    storage = target._storage_
    if target._geometry is storage.base and not storage.pinned and storage.epoch != recorder.epoch:
        storage.real, storage.poison = real, None
        storage.version += 1
        return
    fresh = recorder.new_real_tensor(real, target._geometry.device)
    recorder.write(target, recorder.read(fresh))


def become_view(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`t_`, `squeeze_`, `as_strided_`, ...: the same storage, seen through another geometry from now on."""
    target = args[0]
    if not isinstance(target, LazyTensor):
        return NotImplemented
    name = plan.op._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(aten, name)
    overload = plan.op._overloadname
    seen = recorder.dispatch(getattr(packet, overload if overload in packet.overloads() else "int"), args, kwargs)
    moved = seen._geometry != target._geometry
    views = views_of(target) if moved else []
    if target.requires_grad and views:
        raise RuntimeError(
            f"{plan.op._schema.name.removeprefix('aten::')} of a tensor that needs a gradient, while views of it are "
            "alive: torch would differentiate the views as those of the new shape (on this device it repeats them, "
            f"where it has no strides to go by) / write y = y.{name}(...) instead, or make the views afterwards"
        )
    target._become(seen)
    # A later write may bring a gradient: autograd would repeat the view on the new shape, and now raises instead.
    for view in (*views, target) if moved and target._is_view() else views:
        refuse_gradients_by_view(view)
    return target


def as_strided(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A view of the storage, whatever view it is called on: recorded when it is read."""
    source = args[0]
    if not isinstance(source, LazyTensor):
        return NotImplemented
    geom = recorder.infer_call(plan, args, kwargs)
    storage = source._storage_
    if geom.numel and geom.nbytes > storage.base.nbytes:
        raise NeedsMemory("beyond the storage")  # the real operator raises its own error
    recorder.ops_recorded += 1
    return wrap_view(source, storage, geom, None, -1)


def index(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`x[i, j]`: recorded, unless a mask makes the result's shape depend on data. Indices may be on the host."""
    source, indices = args[0], args[1]
    if not isinstance(source, LazyTensor) or any(i is not None and i.dtype in _MASKS for i in indices):
        return NotImplemented
    on_device = [
        i if i is None or isinstance(i, LazyTensor) or i.dim() == 0 else _to_lazy(recorder, i, {}) for i in indices
    ]
    if source._geometry.device != LAZY and any(a is not b for a, b in zip(indices, on_device, strict=True)):
        return NotImplemented
    return recorder.record_pure(plan.op, (source, on_device), kwargs)


def index_put(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Writes at indices that are on the host, such as the gradient of `index`: they are moved, as for reads."""
    source, indices = args[0], args[1]
    if not isinstance(source, LazyTensor) or source._geometry.device != LAZY:
        return NotImplemented
    if all(i is None or isinstance(i, LazyTensor) or i.dim() == 0 for i in indices):
        return NotImplemented
    moved = [i if i is None or isinstance(i, LazyTensor) else _to_lazy(recorder, i, {}) for i in indices]
    return recorder.dispatch(plan.op, (source, moved, *args[2:]), kwargs)


def histc(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of integers too: torch supports them on every device but the CPU, and programs test for the device type."""
    source = args[0]
    is_counted = not isinstance(source, LazyTensor) or source.dtype.is_floating_point or source.dtype == torch.bool
    if is_counted or source.dtype.is_complex or source._geometry.device != LAZY or source._geometry.compute != "cpu":
        return NotImplemented
    cast = aten._to_copy.default
    exact = recorder.dispatch(cast, (source,), {"dtype": torch.float64})
    counts = recorder.dispatch(plan.op, (exact, *args[1:]), kwargs)
    return recorder.dispatch(cast, (counts,), {"dtype": source.dtype})


_MASKS = (torch.bool, torch.uint8)


def set_(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`a.set_(b)`: a becomes an alias of b; a raw storage where the target has its memory is shared, another copied."""
    target = args[0]
    if not isinstance(target, LazyTensor):
        return NotImplemented
    if len(args) > 1 and isinstance(args[1], LazyTensor):
        source = args[1]
        if len(args) > 2:
            offset, size, stride = args[2], args[3], args[4] if len(args) > 4 else None
            if stride is None:
                stride = torch.empty(tuple(size), device="meta").stride()
            source = recorder.dispatch(aten.as_strided.default, (source, size, stride, offset), {})
            torch.autograd.graph.increment_version(target)  # torch does so for the forms that are one operator
        target._become(wrap(source._storage_, source._geometry, source._slot, source._epoch))
        return target
    with below_autograd():
        on = args[1].device if len(args) > 1 and args[1].device.type == "cuda" else None
        host = torch.empty(0, dtype=target.dtype, device=on)
        plan.op(host, *args[1:], **kwargs)
    if target._geometry.device != LAZY:  # under `lazy_mode` a raw storage is ordinary memory, shared with others
        target._become(recorder.view_of_plain(host, recorder.storage_of_plain(host)))
        recorder.shared.add(target._storage_)
        return target
    if len(args) > 1 and args[1].device.type == torch.device(recorder.target).type:
        storage = storage_on(recorder, args[1], target.dtype, LAZY)
        with below_autograd():
            target._become(loaded_view(storage, host))
        return target
    if len(args) > 1 and hasattr(args[1], "lazily"):  # memory of a file, which lazy tensors share
        with below_autograd():
            if args[1].lazily is None:
                args[1].lazily = loaded_storage(recorder, host)
            target._become(loaded_view(args[1].lazily, host))
        return target
    with below_autograd():
        real = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=recorder.target).copy_(host)
    target._become(recorder.new_real_tensor(real, target._geometry.device))
    return target


def resize_(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`resize_`: on real memory, because the allocator decides what is after the old end."""
    target = args[0]
    if not isinstance(target, LazyTensor):
        return NotImplemented
    if tuple(args[1]) == target._geometry.shape:
        return target
    return recorder.run_eagerly(plan.op, args, kwargs, "changes the size of memory")


_BATCH_NORM = aten._native_batch_norm_legit_functional.default


def batch_norm(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`native_batch_norm` and `cudnn_batch_norm` write the running statistics, undeclared: record these writes."""
    if kwargs:
        return NotImplemented
    x = args[0]
    if x.dim() < 2:
        low, high = -max(x.dim(), 1), max(x.dim(), 1) - 1
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{low}, {high}], but got 1): the channels of the norm"
        )
    found = _batch_norm(recorder, args)
    if plan.op is aten.cudnn_batch_norm.default:
        return *found, recorder.dispatch(aten.new_empty.default, (x, [0]), {"dtype": torch.uint8})
    return found


def _batch_norm(recorder: Recorder, args: Sequence[Any]) -> tuple[Any, ...]:
    """The results of `native_batch_norm`."""
    x, weight, bias, mean, var, training, momentum, eps = args
    if mean is None or var is None:
        legit = aten._native_batch_norm_legit.no_stats
        return tuple(recorder.dispatch(legit, (x, weight, bias, training, momentum, eps), {}))
    if not training:
        return tuple(recorder.record_pure(aten.native_batch_norm.default, args, {}))
    out, save_mean, save_invstd, new_mean, new_var = recorder.record_pure(_BATCH_NORM, args, {})
    if mean._storage_ is var._storage_ and overlap(mean._geometry, var._geometry):
        new_var = _behind(recorder, mean, var, new_mean, new_var, momentum)
    recorder.write(mean, recorder.read(new_mean))
    recorder.write(var, recorder.read(new_var))
    return out, save_mean, save_invstd


def _behind(recorder: Recorder, mean: Any, var: Any, new_mean: Any, new_var: Any, momentum: float) -> Any:
    """The new running variance where it shares the running mean's memory: a kernel writes the mean first."""
    if mean._geometry is not var._geometry:
        raise NeedsMemory("an argument overlaps the written memory")
    moved = recorder.record_pure(aten.sub.Tensor, (new_mean, mean), {})
    return recorder.record_pure(aten.add.Tensor, (new_var, moved), {"alpha": 1 - momentum})


def cudnn_batch_norm_backward(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The forward was recorded as `native_batch_norm`; so is its backward."""
    x, grad, weight, mean, var, save_mean, save_invstd, eps, _reserve = args
    return recorder.dispatch(
        aten.native_batch_norm_backward.default,
        (grad, x, weight, mean, var, save_mean, save_invstd, True, eps, [True, True, True]),
        {},
    )


def batch_norm_backward(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In training the running statistics are not read, and a forward has replaced them: leave them out."""
    if kwargs or len(args) != 10 or not args[7] or (args[3] is None and args[4] is None):
        return NotImplemented
    return recorder.record_pure(plan.op, (*args[:3], None, None, *args[5:]), {})


def embedding_bag(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """For bfloat16 the CPU kernel's helper results are empty; the fake kernel gives others."""
    weight = args[0]
    if isinstance(weight, LazyTensor) and weight.dtype == torch.bfloat16 and weight._geometry.compute == "cpu":
        raise NeedsMemory("the sizes of its helper results are the kernel's business")
    return NotImplemented


def nansum(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An empty list of dimensions means all of them, which its fake kernel does not know."""
    if isinstance(args[0], LazyTensor) and len(args) > 1 and isinstance(args[1], (list, tuple)) and not args[1]:
        return recorder.record_pure(plan.op, (args[0], None, *args[2:]), kwargs)
    return NotImplemented


def lift(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`lift_fresh`: the tensor itself."""
    return args[0] if isinstance(args[0], LazyTensor) else NotImplemented


def record_stream(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Streams order real work; the program that computes this tensor runs on the current stream."""
    return None


def _overloads(*packets: Any) -> tuple[torch._ops.OpOverload, ...]:
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


_VIEWS_IN_PLACE = _overloads(
    aten.t_, aten.transpose_, aten.squeeze_, aten.unsqueeze_, aten.as_strided_, aten.swapdims_, aten.swapaxes_,
    aten.detach_,
)  # fmt: skip
SETS = _overloads(aten.set_)
# Must run on an ordinary tensor itself: its own geometry or memory changes.
CHANGES_THE_TENSOR = frozenset({*_VIEWS_IN_PLACE, *SETS, aten.resize_.default, aten.resize_as_.default})


def primitive_of_complex(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.ops.prims.conj`, `real`, `imag`: views whose bits their schemas do not tell, as ATen has them."""
    return getattr(torch, plan.op.overloadpacket.__name__)(*args, **kwargs)


def install(recorder: Recorder) -> None:
    """Put every handler of this file into the recorder's table."""
    table = recorder.handlers
    for op in IDENTITY_OPS:
        table[op] = identity
    table[aten._local_scalar_dense.default] = local_scalar
    table[aten.is_same_size.default] = is_same_size
    table[aten._assert_tensor_metadata.default] = assert_tensor_metadata
    table[aten._has_same_storage_numel.default] = has_same_storage_numel
    table[aten._new_zeros_with_same_feature_meta.default] = zeros_for_tangent
    table[aten.is_pinned.default] = is_pinned
    table[aten.mkldnn_rnn_layer.default] = recurrent_layer
    table[aten._to_copy.default] = to_copy
    recorder.unrecorded[id(aten._to_copy.default)] = transfer(recorder)
    table[aten.copy_.default] = copy_
    table[aten.lift_fresh.default] = lift
    table[aten.lift.default] = lift
    table[aten.record_stream.default] = record_stream
    table[aten.resize_.default] = resize_
    table[aten.as_strided.default] = as_strided
    table[aten.index.Tensor] = index
    table[aten._unsafe_index.Tensor] = index
    for op in (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default):
        table[op] = index_put
    table[aten.histc.default] = histc
    table[aten.nansum.default] = nansum
    for op in (aten._conj.default, aten._neg_view.default):
        table[op] = conjugate
    for name in ("conj", "real", "imag"):
        recorder.handlers_by_name[f"prims::{name}"] = primitive_of_complex
    recorder.bit_handlers = frozenset(
        {primitive_of_complex, conjugate, become_view, set_, resize_, has_same_storage_numel, zeros_for_tangent}
    )
    for op in _VIEWS_IN_PLACE:
        table[op] = become_view
    for op in SETS:
        table[op] = set_
    table[aten.native_batch_norm.default] = batch_norm
    for packet in (aten._embedding_bag, aten._embedding_bag_forward_only):
        table[packet.default] = embedding_bag
    table[aten.cudnn_batch_norm.default] = batch_norm
    table[aten.native_batch_norm_backward.default] = batch_norm_backward
    table[aten.cudnn_batch_norm_backward.default] = cudnn_batch_norm_backward

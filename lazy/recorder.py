"""The recorder: turns operators on lazy tensors into entries of a trace, and cuts the trace when a value is needed.

Invariant: between two cuts every live lazy storage is either real memory or a slot of the running trace. Each write to a
storage rebinds its slot and raises its version; nothing that was recorded is ever changed.

There is one recorder and one trace for all threads (autograd runs a backward on its own thread for some devices), guarded by a
re-entrant lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchlazy.lazy import frames
from torchlazy.lazy.geometry import Geometry, base_of, flat, geometry, geometry_like
from torchlazy.lazy.infer import CannotInfer, infer
from torchlazy.lazy.op_plan import OpPlan, plan_of
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.tensor import LAZY, LazyTensor, wrap
from torchlazy.lazy.torch_private import below_autograd
from torchlazy.lazy.trace import CutTrace, Entry, Float, Slot, scalar_slot, slot, slots_in

_aten = torch.ops.aten
_PLAIN_CONSTANTS = frozenset(
    {int, bool, type(None), str, torch.dtype, torch.layout, torch.memory_format, complex}
)
_NEVER_VARYING = frozenset({float("inf"), float("-inf")})

Driver = Callable[["CutTrace", "list[torch.Tensor]", "list[Any]", str, str], "list[torch.Tensor | BaseException]"]
Handler = Callable[["Recorder", OpPlan, Any, Any], Any]


class Recorder:
    """The running trace and what it takes to append to it, read from it and cut it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.lock = threading.RLock()
        self.epoch = 0
        self.target = "cpu"
        self.max_entries = 20_000
        self.keep_frames = False
        self.busy = False  # the driver is running real operators
        self.handlers: dict[torch._ops.OpOverload, Handler] = {}
        self.ops_recorded = 0
        self._plans: dict[torch._ops.OpOverload, OpPlan] = {}
        self._results: dict[tuple[Any, ...], Any] = {}
        # lazy_mode: the lazy storage that stands for an ordinary tensor's memory, by the identity of that memory.
        self._registry: weakref.WeakValueDictionary[int, LazyStorage] = weakref.WeakValueDictionary()
        self._held: dict[int, LazyStorage] = {}  # those of this trace, until it is cut
        self.mode_depth = 0
        self.has_mode_tensors = False
        self._held = {}
        self._start_trace()

    # ------------------------------------------------------------------ the running trace

    def _start_trace(self) -> None:
        self.epoch += 1
        self.entries: list[Entry] = []
        self.geometries: list[Geometry] = []
        self.inputs: list[tuple[Slot, LazyStorage]] = []
        self.input_memory: list[torch.Tensor] = []
        self.scalars: list[Any] = []
        self.frames: list[str] = []
        self._scalar_numbers: dict[tuple[Any, ...], int] = {}
        self._written: list[weakref.ref[LazyStorage]] = []
        self._held.clear()

    def reset_after_fork(self) -> None:
        """A forked child shares no lock with its parent; what was recorded so far is still valid memory."""
        self.lock = threading.RLock()

    def _new_slot(self, geom: Geometry) -> Slot:
        number = len(self.geometries)
        self.geometries.append(geom)
        return slot(number)

    def append(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: tuple[Any, ...], results: Any) -> Any:
        """Append an entry whose results have the given geometries (same structure); returns their slots."""
        outputs = self._slots_for(results)
        self.entries.append(Entry(op, args, kwargs, outputs))
        if self.keep_frames:
            self.frames.append(frames.user_frame())
        return outputs

    def _slots_for(self, results: Any) -> Any:
        if type(results) is Geometry:
            return self._new_slot(results)
        if type(results) is tuple:
            return tuple(self._slots_for(item) for item in results)
        return None

    # ------------------------------------------------------------------ storages and reading

    def base_slot(self, storage: LazyStorage) -> Slot:
        """The slot that holds the storage's current value in its base geometry; enters it as an input if need be."""
        if storage.epoch != self.epoch:
            if storage.poison is not None:
                raise storage.poison
            if storage.real is None:
                raise RuntimeError(
                    "torchlazy: internal error: a lazy storage has neither memory nor a slot; please report this"
                )
            if not storage.pinned and storage.base.device == LAZY and storage.base.compute != self.target:
                self._move_storage(storage)
            storage.slot = self._new_slot(storage.base)
            storage.epoch = self.epoch
            storage.dirty = False
            self.inputs.append((storage.slot, storage))
            self.input_memory.append(storage.real)
        assert storage.slot is not None
        return storage.slot

    def _move_storage(self, storage: LazyStorage) -> None:
        """The target changed since this storage was computed: bring it over."""
        old = storage.base
        storage.base = geometry(old.shape, old.strides, old.offset, old.dtype, old.device, self.target)
        assert storage.real is not None
        moved = torch.empty_strided(old.shape, old.strides, dtype=old.dtype, device=self.target)
        storage.real = moved.copy_(storage.real)

    def read(self, tensor: LazyTensor) -> Slot:
        """The slot of a tensor's current value, regenerated from its storage if somebody wrote to it."""
        storage = tensor._storage_
        if tensor._epoch == self.epoch and tensor._seen == storage.version:
            return tensor._slot
        found = self.base_slot(storage)
        geom = tensor._geometry
        if geom.compute != storage.base.compute:
            geom = geometry(geom.shape, geom.strides, geom.offset, geom.dtype, geom.device, storage.base.compute)
            tensor._geometry = geom
        if geom is not storage.base:
            found = self._view_of_base(found, storage.base, geom)
        tensor._slot, tensor._epoch, tensor._seen = found, self.epoch, storage.version
        return found

    def _view_of_base(self, base_slot: Slot, base: Geometry, geom: Geometry) -> Slot:
        if geom.dtype != base.dtype:
            whole = flat(base.span, base.dtype, base.device, base.compute)
            if whole is not base:
                base_slot = self.append(_aten.as_strided.default, (base_slot, whole.shape, (1,), 0), (), whole)
            ratio_numel = base.span * base.dtype.itemsize // geom.dtype.itemsize
            whole = flat(ratio_numel, geom.dtype, base.device, base.compute)
            base_slot = self.append(_aten.view.dtype, (base_slot, geom.dtype), (), whole)
            base = whole
            if geom is base:
                return base_slot
        return self.append(
            _aten.as_strided.default, (base_slot, geom.shape, geom.strides, geom.offset), (), geom
        )

    def write(self, tensor: LazyTensor, value: Slot) -> None:
        """`tensor` now holds `value` (in its own geometry): rebind its storage."""
        storage = tensor._storage_
        geom = tensor._geometry
        if self.geometries[value.number] is not geom:
            value = self._fit(value, tensor, geom)
        base = storage.base
        if geom is base:
            new_base = value
        elif geom.numel == base.numel and geom.is_plain and base.is_plain and geom.dtype == base.dtype:
            new_base = self.append(_aten.view.default, (value, base.shape), (), base)
        elif geom.dtype != base.dtype:
            raise _NeedsMemory("a write through a view of another dtype")
        else:
            old = self.base_slot(storage)
            new_base = self.append(
                _aten.as_strided_scatter.default, (old, value, geom.shape, geom.strides, geom.offset), (), base
            )
        if storage.epoch != self.epoch or not storage.dirty:
            if storage.epoch != self.epoch and storage.real is not None:
                # Written without being read: its memory is an input all the same, so that it can be donated.
                self.base_slot(storage)
            storage.epoch = self.epoch
            storage.dirty = True
            self._written.append(weakref.ref(storage))
        storage.slot = new_base
        storage.version += 1
        tensor._slot, tensor._epoch, tensor._seen = value, self.epoch, storage.version

    def _fit(self, value: Slot, tensor: LazyTensor, geom: Geometry) -> Slot:
        """`value` broadcast, cast and laid out as `geom`, as `copy_` would."""
        have = self.geometries[value.number]
        if have.meta == geom.meta:
            return value
        return self.append(_aten.copy.default, (self.read(tensor), value), (), geom)

    def new_tensor(self, value: Slot, geom: Geometry) -> LazyTensor:
        """A tensor with a storage of its own that holds `value`."""
        storage = LazyStorage(base_of(geom))
        storage.slot = value
        storage.epoch = self.epoch
        storage.dirty = True
        self._written.append(weakref.ref(storage))
        return wrap(storage, storage.base, value, self.epoch)

    def new_real_tensor(self, real: torch.Tensor, device: torch.device) -> LazyTensor:
        """A lazy tensor whose storage is the memory of `real`, which nobody else holds."""
        geom = geometry_like(real, device, str(real.device))
        base = base_of(geom)
        if geom.offset or geom.span * real.element_size() != real.untyped_storage().nbytes():
            count = real.untyped_storage().nbytes() // real.element_size()
            base = flat(count, real.dtype, device, str(real.device))
            storage = LazyStorage(base, real.as_strided((count,), (1,), 0))
        else:
            storage = LazyStorage(base, real)
        return wrap(storage, geom, None, -1)

    def storage_of_plain(self, tensor: torch.Tensor) -> LazyStorage:
        """Under `lazy_mode`: the lazy storage that stands for an ordinary tensor's memory."""
        memory = tensor.untyped_storage()
        found = self._registry.get(memory._cdata)
        if found is None:
            device = tensor.device
            geom = geometry_like(tensor.detach(), device, str(device))
            nbytes = memory.nbytes()
            whole = tensor.detach()
            if geom.offset or geom.span * tensor.element_size() != nbytes or geom.numel != geom.span:
                count = nbytes // tensor.element_size()
                geom = flat(count, tensor.dtype, device, str(device))
                whole = whole.as_strided((count,), (1,), 0)
            found = LazyStorage(geom, whole, pinned=True)
            self._registry[memory._cdata] = found
        self._held[memory._cdata] = found
        return found

    # ------------------------------------------------------------------ encoding arguments

    def encode(self, value: Any, varying: bool, key: list[Any]) -> Any:
        """The trace's form of an argument; appends to `key` what the result's geometry depends on."""
        kind = type(value)
        if kind is LazyTensor:
            key.append(value._geometry)
            return self.read(value)
        if kind is float:
            if varying and value == value and value not in _NEVER_VARYING:
                key.append(float)
                return self._varying(value, key)
            encoded = Float(value)
            key.append(encoded)
            return encoded
        if kind in _PLAIN_CONSTANTS:
            key.append(kind)
            key.append(value)
            return bool(value) if kind is bool else value
        if kind is list or kind is tuple or kind is torch.Size:
            key.append(len(value))
            return tuple(self.encode(item, varying, key) for item in value)
        if kind is torch.device:
            real = torch.device(self.target) if value.type == "lazy" else value
            key.append(real)
            return real
        if isinstance(value, LazyTensor):
            key.append(value._geometry)
            return self.read(value)
        if isinstance(value, torch.Tensor):
            return self._encode_plain(value, key)
        if isinstance(value, (bool, int)):
            return self.encode(int(value), varying, key)
        if isinstance(value, float):
            return self.encode(float(value), varying, key)
        raise _NeedsMemory(f"an argument of type {kind.__name__}")

    def _varying(self, value: float, key: list[Any]) -> Any:
        # Equal values at one argument of one operator share an input: all parameters have one learning rate.
        place = (key[0], value.hex())
        number = self._scalar_numbers.get(place)
        if number is None:
            number = self._scalar_numbers[place] = len(self.scalars)
            self.scalars.append(value)
        return scalar_slot(number, float)

    def scalar_input(self, value: int | float) -> Any:
        """A number that is an input of the program at each run (a random seed, for one)."""
        self.scalars.append(value)
        return scalar_slot(len(self.scalars) - 1, type(value))

    def _encode_plain(self, tensor: torch.Tensor, key: list[Any]) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise _NeedsMemory(f"a {tensor.layout} tensor")
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            with below_autograd():
                copy = tensor.detach().clone()
            geom = geometry_like(copy, copy.device, "cpu")
            key.append(geom)
            return self._constant_input(copy, geom)
        raise _NeedsMemory(f"a tensor on {tensor.device}")

    def view_of_plain(self, tensor: torch.Tensor, storage: LazyStorage) -> LazyTensor:
        """The lazy twin of an ordinary tensor: the same geometry over the same storage."""
        geom = geometry_like(tensor.detach(), tensor.device, str(tensor.device))
        return wrap(storage, geom, None, -1)

    def _constant_input(self, real: torch.Tensor, geom: Geometry) -> Slot:
        return self.base_slot(LazyStorage(geom, real))

    # ------------------------------------------------------------------ recording an operator

    def plan(self, op: torch._ops.OpOverload) -> OpPlan:
        found = self._plans.get(op)
        if found is None:
            found = self._plans[op] = plan_of(op)
        return found

    def dispatch(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record `op`, or run it for real where it cannot be recorded."""
        with self.lock:
            if self.has_mode_tensors and not self.mode_depth and self._claimed(args, kwargs)[0] != LAZY:
                return self.run_eagerly(op, args, kwargs, "outside lazy_mode")
            plan = self._plans.get(op)
            if plan is None:
                plan = self.plan(op)
            handler = self.handlers.get(op)
            try:
                if handler is not None:
                    result = handler(self, plan, args, kwargs)
                    if result is not NotImplemented:
                        return result
                if plan.kind == "pure":
                    return self.record_pure(plan.op, args, kwargs)
                if plan.kind == "view":
                    return self._record_view(plan, args, kwargs)
                if plan.kind == "inplace":
                    return self._record_inplace(plan, args, kwargs)
                if plan.kind == "out":
                    return self._record_out(plan, args, kwargs)
                if plan.kind == "composite":  # inference_mode hands these over whole
                    result = op.decompose(*args, **kwargs)
                    if result is not NotImplemented:
                        return result
                reason = plan.reason
            except (_NeedsMemory, CannotInfer) as why:
                reason = str(why)
            return self.run_eagerly(op, args, kwargs, reason)

    def _encode_call(self, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any], key: list[Any]) -> Any:
        positions = plan.varying_positions
        encoded = tuple([self.encode(a, bool(positions) and i in positions, key) for i, a in enumerate(args)])
        if not kwargs:
            return encoded, ()
        names = []
        for name in sorted(kwargs):
            key.append(name)
            names.append((name, self.encode(kwargs[name], name in plan.varying, key)))
        return encoded, tuple(names)

    def _claimed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.device, str]:
        """The device that results claim, and the one that computes them, from the first lazy argument."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, LazyTensor):
                return value._geometry.device, value._geometry.compute
            if isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, LazyTensor):
                        return item._geometry.device, item._geometry.compute
            if isinstance(value, torch.device) and value.type == "lazy":
                return LAZY, self.target
        return LAZY, self.target

    def infer(self, key: list[Any], plan: OpPlan, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """Cached `infer`: the results' geometry, then the arguments' geometry afterwards."""
        cached_key = (op, *key)
        found = self._results.get(cached_key)
        if found is None:
            device, compute = self._claimed(args, kwargs)
            geoms = tuple(self._geometry_arguments(a) for a in args)
            named = {name: self._geometry_arguments(value) for name, value in kwargs.items()}
            found = infer(op, geoms, named, device, compute)
            self._results[cached_key] = found
        return found

    def _geometry_arguments(self, value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return value._geometry
        if isinstance(value, torch.Tensor):
            return geometry_like(value.detach(), value.device, str(value.device))
        if isinstance(value, (list, tuple)):
            return [self._geometry_arguments(item) for item in value]
        if isinstance(value, torch.device) and value.type == "lazy":
            return torch.device(self.target)
        return value

    def record_pure(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record an operator without side effects; returns new tensors."""
        plan = self._plans.get(op) or self.plan(op)
        key: list[Any] = [plan.op]
        encoded, named = self._encode_call(plan, args, kwargs, key)
        results = self._results.get((plan.op, *key)) or self.infer(key, plan, plan.op, args, kwargs)
        outputs = self.append(plan.op, encoded, named, results[0])
        self.ops_recorded += 1
        if len(self.entries) > self.max_entries:
            wrapped = self._wrap_new(outputs, results[0])
            self.cut("trace length limit")
            return wrapped
        return self._wrap_new(outputs, results[0])

    def _wrap_new(self, outputs: Any, results: Any) -> Any:
        if type(outputs) is Slot:
            return self.new_tensor(outputs, results)
        if outputs is None:
            return None
        return tuple(self._wrap_new(o, r) for o, r in zip(outputs, results, strict=True))

    def _record_view(self, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        if not isinstance(source, LazyTensor):
            raise _NeedsMemory("a view of a tensor that is not lazy")
        key: list[Any] = [plan.op]
        encoded, named = self._encode_call(plan, args, kwargs, key)
        results, _ = self._results.get((plan.op, *key)) or self.infer(key, plan, plan.op, args, kwargs)
        self.ops_recorded += 1
        if type(results) is not tuple and results is source._geometry:
            return wrap(source._storage_, results, encoded[0], self.epoch)
        outputs = self.append(plan.op, encoded, named, results)
        return self._wrap_views(outputs, results, source._storage_)

    def _wrap_views(self, outputs: Any, results: Any, storage: LazyStorage) -> Any:
        if type(outputs) is Slot:
            return wrap(storage, results, outputs, self.epoch)
        return [self._wrap_views(o, r, storage) for o, r in zip(outputs, results, strict=True)]

    def _record_inplace(self, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        targets = self._write_targets(plan, args, kwargs)
        key: list[Any] = [plan.op]
        encoded, named = self._encode_call(plan, args, kwargs, key)
        self.infer(key, plan, plan.op, args, kwargs)  # eager's checks of the call itself
        results, _ = self.infer(key, plan, plan.functional, args, kwargs)
        outputs = self.append(plan.functional, encoded, named, results)
        self.ops_recorded += 1
        return self._write_results(plan, targets, outputs, results)

    def _write_targets(self, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The written arguments, in schema order (lists stay lists)."""
        targets: list[Any] = []
        for position in plan.written:
            value = args[position] if position < len(args) else kwargs.get(plan.names[position])
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if item is not None and not isinstance(item, LazyTensor):
                    raise _NeedsMemory(f"a write to a tensor on {getattr(item, 'device', type(item))}")
            targets.append(list(value) if isinstance(value, (list, tuple)) else value)
        return targets

    def _write_results(self, plan: OpPlan, targets: list[Any], outputs: Any, results: Any) -> Any:
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
                    self.write(item, item_value)
            else:
                self.write(target, value)
        if schema_returns == 0:
            return None
        if own <= 0:
            return targets[0] if schema_returns == 1 else tuple(targets)
        flat_results = results if type(results) is tuple else (results,)
        kept = [i for i in range(len(flat_outputs)) if i not in order]
        fresh = iter(self._wrap_new(flat_outputs[i], flat_results[i]) for i in kept)
        writes = iter(targets)
        out = [
            next(writes) if r.alias_info is not None and r.alias_info.is_write else next(fresh)
            for r in plan.op._schema.returns
        ]
        return out[0] if len(out) == 1 else tuple(out)

    def _record_out(self, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        targets = self._write_targets(plan, args, kwargs)
        written = {plan.names[i] for i in plan.written}
        key: list[Any] = [plan.op]
        inputs = {name: value for name, value in kwargs.items() if name not in written}
        count = len([i for i in range(len(args)) if i not in plan.written])
        encoded, named = self._encode_call(plan, args[:count], inputs, key)
        for target in targets:
            self.encode(target, False, key)
        _, (args_after, kwargs_after) = self.infer(key, plan, plan.op, args, kwargs)
        results, _ = self.infer(key, plan, plan.functional, args[:count], inputs)
        after = [kwargs_after[plan.names[i]] if i >= len(args) else args_after[i] for i in plan.written]
        for target, geom in zip(targets, after, strict=True):
            if target is not None and not isinstance(target, list) and geom is not target._geometry:
                raise _NeedsMemory("out= of another size")
        outputs = self.append(plan.functional, encoded, named, results)
        self.ops_recorded += 1
        flat_outputs = outputs if type(outputs) is tuple else (outputs,)
        for target, value in zip(targets, flat_outputs, strict=False):
            if isinstance(target, list):
                for item, item_value in zip(target, value, strict=True):
                    self.write(item, item_value)
            elif target is not None and value is not None:
                self.write(target, value)
        returns = len(plan.op._schema.returns)
        return None if returns == 0 else targets[0] if len(targets) == 1 else tuple(targets)

    # ------------------------------------------------------------------ running for real

    def real(self, tensor: LazyTensor, cause: str) -> torch.Tensor:
        """The tensor's memory, with its geometry; cuts the trace when it is not there yet. Aliases the storage."""
        with self.lock:
            storage = tensor._storage_
            if storage.epoch == self.epoch and storage.dirty:
                self.cut(cause)
            if storage.poison is not None:
                raise storage.poison
            real = storage.real
            assert real is not None
            geom = tensor._geometry
            with below_autograd():
                if geom.dtype != real.dtype:
                    whole = real.as_strided((storage.base.span,), (1,), 0) if storage.base.numel else real.reshape(-1)
                    real = whole.view(geom.dtype)
                elif geom.shape == storage.base.shape and geom.strides == storage.base.strides and not geom.offset:
                    return real.detach()
                return real.as_strided(geom.shape, geom.strides, real.storage_offset() + geom.offset)

    def run_eagerly(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], reason: str) -> Any:
        """Cut, run `op` on real memory at once, and wrap what it returns; aliases of arguments stay aliases."""
        device, compute = self._claimed(args, kwargs)
        lazies: list[tuple[LazyTensor, torch.Tensor]] = []
        cause = f"{op.name().removeprefix('aten::')}: {reason}"

        def unwrap(value: Any) -> Any:
            if isinstance(value, LazyTensor):
                real = self.real(value, cause)
                lazies.append((value, real))
                return real
            if isinstance(value, (list, tuple)):
                return type(value)(unwrap(v) for v in value) if type(value) in (list, tuple) else [*map(unwrap, value)]
            if isinstance(value, torch.device) and value.type == "lazy":
                return torch.device(self.target)
            if isinstance(value, torch.Tensor) and device == LAZY:
                self._check_same_device(op, value)
            return value

        self.on_eager(op, reason)
        real_args = [unwrap(a) for a in args]
        real_kwargs = {name: unwrap(value) for name, value in kwargs.items()}
        written_before = [(tensor, real, real._version) for tensor, real in lazies]
        if lazies:
            # A storage that this operator may write is no longer what a trace in progress took as its input.
            if self.plan(op).written and any(t._storage_.epoch == self.epoch for t, _ in lazies):
                self.cut(cause)
        was_busy, self.busy = self.busy, True
        try:
            with below_autograd():
                result = op(*real_args, **real_kwargs)
        finally:
            self.busy = was_busy
        owners = {real.untyped_storage()._cdata: tensor for tensor, real in lazies}
        by_identity = {id(real): tensor for tensor, real in lazies}
        for tensor, real, before in written_before:
            if real._version != before or self.plan(op).written:
                tensor._storage_.version += 1
                self._adopt_geometry(tensor, real)

        def rewrap(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) in by_identity:
                    return by_identity[id(value)]
                if device != LAZY and not self.mode_depth:
                    self._hand_out(owners.get(value.untyped_storage()._cdata))
                    return value
                owner = owners.get(value.untyped_storage()._cdata) if value.layout is torch.strided else None
                if owner is not None:
                    return wrap(owner._storage_, geometry_like(value, owner._geometry.device, compute), None, -1)
                if str(value.device) != compute or value.layout is not torch.strided:
                    return value
                return self.new_real_tensor(value, device)
            if isinstance(value, (list, tuple)):
                return type(value)(rewrap(v) for v in value) if type(value) in (list, tuple) else [*map(rewrap, value)]
            return value

        return rewrap(result)

    def _adopt_geometry(self, tensor: LazyTensor, real: torch.Tensor) -> None:
        """After a real in-place operator that changed the size or the memory (`resize_`, `set_`): follow it."""
        geom = geometry_like(real, tensor._geometry.device, tensor._geometry.compute)
        storage = tensor._storage_
        if storage.real is not None and real.untyped_storage()._cdata == storage.real.untyped_storage()._cdata:
            if geom is tensor._geometry:
                return
            count = real.untyped_storage().nbytes() // real.element_size()
            storage.base = flat(count, real.dtype, geom.device, geom.compute)
            storage.real = real.as_strided((count,), (1,), 0)
        else:
            replacement = self.new_real_tensor(real, geom.device)
            storage = replacement._storage_
        tensor._become(wrap(storage, geom, None, -1))

    def _hand_out(self, owner: LazyTensor | None) -> None:
        """An ordinary tensor now shares this storage's memory: new values must be written there from now on."""
        if owner is not None:
            owner._storage_.pinned = True

    def _check_same_device(self, op: torch._ops.OpOverload, value: torch.Tensor) -> None:
        if isinstance(value, LazyTensor) or value.dim() == 0 or op.name() in _TAKES_CPU_TENSORS:
            return
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, lazy and {value.device}! "
            f"(when recording {op.name()}; move the tensor with .to('lazy'))"
        )

    # ------------------------------------------------------------------ cuts

    on_cut: Callable[[str, str, int], None] = staticmethod(lambda cause, frame, entries: None)
    on_eager: Callable[[torch._ops.OpOverload, str], None] = staticmethod(lambda op, reason: None)

    def cut(self, cause: str) -> None:
        """Run what was recorded: every live storage gets its memory. A no-op when nothing is pending."""
        with self.lock:
            if self.busy:
                return
            live = [s for s in (ref() for ref in self._written) if s is not None and s.epoch == self.epoch and s.dirty]
            live = list({id(s): s for s in live}.values())
            if not live:
                if self.entries or self.inputs:
                    self._start_trace()
                return
            frame = frames.user_frame()
            self.on_cut(cause, frame, len(self.entries))
            trace, memory, scalars = self._snapshot(live)
            self._start_trace()
            self.busy = True
            try:
                values = self.driver(trace, memory, scalars, cause, frame)
            finally:
                self.busy = False
            error: BaseException | None = None
            for storage, value in zip(live, values, strict=True):
                storage.dirty = False
                storage.slot = None
                if isinstance(value, BaseException):
                    error = value
                    if storage.real is None:
                        storage.poison = value  # else the write never happened: the old value stands, as in eager
                elif storage.pinned and storage.real is not None:
                    if value.data_ptr() != storage.real.data_ptr():
                        with below_autograd():
                            storage.real.copy_(value)
                else:
                    storage.real = value
                    if storage.base.device != LAZY:
                        self._registry[value.untyped_storage()._cdata] = storage
            if error is not None:
                raise error

    def _snapshot(self, live: list[LazyStorage]) -> tuple[CutTrace, list[torch.Tensor], list[Any]]:
        position_of = {id(storage): i for i, (_, storage) in enumerate(self.inputs)}
        donations = tuple(
            (out, position_of[id(storage)]) for out, storage in enumerate(live) if id(storage) in position_of
        )
        outputs = tuple((storage.slot, storage.base) for storage in live)
        trace = CutTrace(
            tuple(self.entries),
            tuple(self.geometries),
            tuple((number, storage.base) for number, storage in self.inputs),
            tuple(type(value) for value in self.scalars),
            outputs,  # type: ignore[arg-type]
            donations,
            tuple(self.frames),
        )
        return trace, self.input_memory, self.scalars

    def live_storages(self) -> int:
        """Storages with a pending value that somebody still holds."""
        return sum(1 for ref in self._written if ref() is not None)


class _NeedsMemory(Exception):
    """This call cannot be recorded; run it on real memory."""


# Operators that take index tensors on the CPU beside operands on a device, as they do for CUDA.
_TAKES_CPU_TENSORS = frozenset(
    {
        "aten::index.Tensor",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index.Tensor",
        "aten::copy_",
        "aten::set_.source_Storage_storage_offset",
        "aten::set_.source_Storage",
    }
)

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


def register_fork(recorder: Recorder) -> None:
    """DataLoader workers fork: give the child a lock of its own."""
    os.register_at_fork(after_in_child=recorder.reset_after_fork)


__all__ = ["Recorder", "register_fork", "slots_in"]

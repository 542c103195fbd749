"""The recorder: turns operators on lazy tensors into entries of the running trace, and cuts it when a value is needed.

There is one recorder and one trace for all threads (autograd runs a backward on its own thread for some devices),
guarded by a re-entrant lock.

Invariant: an operator is either recorded as a whole or run for real; when it raises, every tensor has the value that it
had before.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.numbers.tracked import plain_number
from torchlazy.lazy.record import eager_fallback
from torchlazy.lazy.record.bit_views import have_bits, record_with_bits
from torchlazy.lazy.record.constants import ConstantValues
from torchlazy.lazy.record.ending import rules_up_to_the_end
from torchlazy.lazy.record.lock import TraceLock
from torchlazy.lazy.record.paths import Paths
from torchlazy.lazy.record.rematerialize import RematerializedValue, assign_values
from torchlazy.lazy.record.running_trace import NeedsMemory, RunningTrace
from torchlazy.lazy.record.sliced_read import Lines, Reading, read_apart
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, any_of_others, made_with_bits, wrap_view
from torchlazy.lazy.record.writes import record_inplace, record_out
from torchlazy.lazy.shapes.infer import CannotInfer, check_by_running, infer
from torchlazy.lazy.torch_private.dispatch import below_autograd, memory_key
from torchlazy.lazy.trace import user_frames
from torchlazy.lazy.trace.geometry import Geometry, check_lazy_index, geometry_like, indexed, is_dense, kind_of
from torchlazy.lazy.trace.op_schema import OpPlan, plan_of
from torchlazy.lazy.trace.storage import LazyStorage, storage_of
from torchlazy.lazy.trace.trace import Complex, CutTrace, Float, Slot, scalar_slot

_PLAIN_CONSTANTS = frozenset({int, bool, type(None), str, torch.dtype, torch.layout, torch.memory_format, complex})
_MOST = 2**63 - 1  # programs have no larger ints; torch takes some as uint64
_MAX_CACHED_RESULTS = 100_000
_FORK_PATIENCE = 5.0  # seconds; the thread that holds the lock may itself wait for the one that forks
_DETACH = torch.ops.aten.detach.default
UNVARYING = frozenset({float("inf"), float("-inf")})

if TYPE_CHECKING:
    from torchlazy.lazy.compiled.capture.session import Capture

Interpret = Callable[["CutTrace", Sequence[Any], Sequence[Any]], list[Any]]
Driver = Callable[["CutTrace", "list[torch.Tensor]", "list[Any]", str, str], "list[torch.Tensor | BaseException]"]
Handler = Callable[["Recorder", OpPlan, Any, Any], Any]


def current() -> Recorder:
    """The process's recorder; its `driver` runs what is cut."""
    return LazyTensor.recorder


class Recorder(RunningTrace):
    """The running trace with the means to record operators into it and to cut it."""

    on_cut: Callable[[str, str, int], None] = staticmethod(lambda cause, frame, entries: None)
    on_eager: Callable[[torch._ops.OpOverload | str, str], None] = staticmethod(lambda op, reason: None)
    on_draw: Callable[[torch._ops.OpOverload], None] = staticmethod(lambda op: None)  # a draw at once, in place
    on_host_write: Callable[[torch._ops.OpOverload], None] = staticmethod(lambda op: None)  # on ordinary tensors

    def __init__(self, driver: Driver, interpret: Interpret) -> None:
        super().__init__()
        self.driver = driver
        self.interpret = interpret  # runs a small trace operator by operator
        self.busy = False  # real operators are running: record nothing
        # Called before each cut and each read of memory, with the cause; it may raise. True: nothing is run now.
        self.gate: Callable[[str], bool] | None = None
        self.reading_as = ""  # "bool", "int", ...: the conversion that the next read of one value is for
        self.handlers: dict[torch._ops.OpOverload, Handler] = {}
        self.handlers_by_name: dict[str, Handler] = {}  # of operators that torch defines in Python, when first needed
        self.bit_handlers: frozenset[Handler] = frozenset()  # handlers of conjugated operands
        self._constants = ConstantValues()
        self.rematerializing: weakref.WeakSet[Any] = weakref.WeakSet()  # sources of rematerialized values
        self.lines = Lines()  # the user's lines that read numbers without a cut
        self.capture: Capture | None = None  # the call that `torchlazy.compile` captures
        self._plans: dict[int, OpPlan] = {}  # by the overload's identity
        self._by_identity: dict[int, tuple[OpPlan, Handler | None]] = {}
        # By identity, operators that record nothing themselves (made of others; transfers): called without the lock.
        self.unrecorded: dict[int, Callable[..., Any]] = {}
        self._results: dict[tuple[Any, ...], Any] = {}
        # In-place calls whose functional form has the target's own geometry: no checks, no casts or broadcasts.
        self.plain_writes: dict[tuple[Any, ...], Geometry] = {}

    def lock_before_fork(self) -> None:
        """Wait until no other thread is inside an operator before the process is copied, but not for a long cut."""
        self.lock.acquire(timeout=_FORK_PATIENCE)

    def unlock_after_fork(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was not acquired in time
            self.lock.release()

    def reset_after_fork(self) -> None:
        """Give a forked child a lock of its own; what was recorded so far is still valid."""
        self.lock.end_pause()
        self.lock = TraceLock(self)

    def plan(self, op: torch._ops.OpOverload) -> OpPlan:
        found = self._plans.get(id(op))  # an overload's own hash is a Python function
        if found is None:
            found = self._plans[id(op)] = plan_of(op)  # which keeps the overload alive
        return found

    def default_dtype_changes(self) -> None:
        """Forget inferred geometries and known paths: they are valid under the old default dtype only."""
        with self.lock:
            self.forget_paths("set_default_dtype")
            self._results.clear()

    def dispatch(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record `op`, or run it for real where it cannot be recorded."""
        return self.general(None, op, (), args, kwargs)

    def torch_dispatch(
        self, op: torch._ops.OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """`dispatch` as torch calls it for each operator on a lazy tensor, where it asks for no rule."""
        return self.general(None, op, types, args, kwargs)

    def forget_paths(self, cause: str = "sync") -> None:
        """Cut for this cause and forget all known traces. Where nothing may be cut, what is recorded follows none."""
        with self.lock:
            self.cut(cause)
            self.paths, self.path = Paths(), None
            if not self.entries:
                self._start_trace()

    def rules(self, asked: Callable[[Any, type], Any]) -> Callable[[Any, type], Any]:
        """What torch calls for an operator on a tensor of a class: on ours the recorder's, else `asked`'s.

        Torch looks it up for each operator (`answer_for_dispatch`).
        """
        return rules_up_to_the_end(self, asked)

    def detach(self, cls: Any, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """`detach`, which autograd calls most often. It records nothing, and so needs no lock."""
        source = args[0]
        if type(source) is not LazyTensor or (
            self.has_mode_tensors and not self.mode_depth and source._geometry.device != LAZY
        ):
            return self.general(cls, op, types, args, kwargs)
        found = self.twin(source)
        if self.mark_result is not None:
            self.mark_result(op, found, args, {})
        return found

    def general(
        self,
        cls: Any,
        op: torch._ops.OpOverload,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """`dispatch` as torch calls it for each operator on a lazy tensor."""
        found = self._general(op, types, args, kwargs)
        if self.mark_result is not None and found is not NotImplemented:
            self.mark_result(op, found, args, kwargs or {})
        return found

    def _general(
        self,
        op: torch._ops.OpOverload,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if type(op) is tuple:  # torch asks the rule of a class again, without the class, after the answer below
            return NotImplemented
        if len(types) > 1 and any_of_others(types):
            return NotImplemented
        apart = self.unrecorded.get(id(op))
        if apart is not None and not self.has_mode_tensors:
            result = apart(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        with self.lock:
            if self.has_mode_tensors and not self.mode_depth and self.claimed(args, kwargs or {})[0] != LAZY:
                return self.run_eagerly(op, args, kwargs or {}, "outside lazy_mode")
            if op is _DETACH and type(args[0]) is LazyTensor:
                return self.twin(args[0])
            return self._record(op, args, kwargs or {})

    def _record(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if (device := kwargs.get("device")) is not None and device.type == "lazy" and self.lazy_type():
            check_lazy_index(device)  # lazy tensors of the ordinary class are on the device that computes
            kwargs = {**kwargs, "device": torch.device(self.target)}
        known = self._by_identity.get(id(op))
        if known is None:
            handler = self.handlers.get(op) or self.handlers_by_name.get(op.name())
            known = self._by_identity[id(op)] = (self.plan(op), handler)
            if known[0].kind == "composite" and handler is None:
                self.unrecorded[id(op)] = op.decompose
        plan, handler = known
        if made_with_bits[0] and have_bits(args, kwargs) and handler not in self.bit_handlers:
            return record_with_bits(self, plan, args, kwargs)
        try:
            if handler is not None:
                result = handler(self, plan, args, kwargs)
                if result is not NotImplemented:
                    return result
            if self.capture is not None and op is self.capture.runs_now:
                raise NeedsMemory("a number that varies")
            if plan.kind == "pure":
                return self._record_pure(plan, args, kwargs)
            if plan.kind == "view":
                return self._record_view(plan, args, kwargs)
            if plan.kind == "inplace":
                return record_inplace(self, plan, args, kwargs)
            if plan.kind == "out":
                return record_out(self, plan, args, kwargs)
            if plan.kind == "composite":  # inference_mode dispatches these without decomposing them
                result = op.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            reason = plan.reason
        except (NeedsMemory, CannotInfer) as why:
            reason = str(why)
        return self.run_eagerly(op, args, kwargs, reason)

    def encode(self, value: Any, varying: bool, key: list[Any]) -> Any:
        """The trace's form of an argument; appends to `key` what the result's geometry depends on."""
        kind = type(value)
        if kind is LazyTensor:
            key.append(value._geometry)
            return self.read(value)
        if kind is float:
            if varying and value == value and value not in UNVARYING:
                return self._varying(value, key)
            encoded = Float(value)
            key.append(encoded)
            return encoded
        if kind in _PLAIN_CONSTANTS:
            if kind is int and value > _MOST:
                raise NeedsMemory("a number beyond int64")
            key.append(kind)
            key.append(value)
            return bool(value) if kind is bool else Complex(value) if kind is complex else value
        if kind is list or kind is tuple or kind is torch.Size:
            key.append(len(value))
            return tuple(self.encode(item, varying, key) for item in value)
        if kind is torch.device:
            real = value
            if value.type == "lazy":
                check_lazy_index(value)
                real = torch.device(self.target)
            key += (value, real)  # the device that results claim, and the one that computes them
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
        raise NeedsMemory(f"an argument of type {kind.__name__}")

    def _varying(self, value: float, key: list[Any]) -> Any:
        # Equal values at one argument of one operator share an input: all parameters have one learning rate. Within a
        # capture a number with an expression shares an input with equal expressions only.
        expression = None if self.capture is None else self.capture.expression_for(value)
        place = (key[0], value.hex() if expression is None else expression)
        key.append(float)
        number = self._scalar_numbers.get(place)
        if number is None:
            number = self._scalar_numbers[place] = len(self.scalars)
            self.scalars.append(value)
            if self.capture is not None and expression is not None:
                self.capture.scalar_expressions[number] = expression
        return scalar_slot(number, float)

    def _encode_plain(self, tensor: torch.Tensor, key: list[Any]) -> Any:
        if not is_dense(tensor):
            raise NeedsMemory(f"a {kind_of(tensor)} tensor")
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            with below_autograd():
                copy = tensor.detach().clone()
            geom = geometry_like(copy, copy.device, "cpu")
            key.append(geom)
            storage = storage_of(geom, copy)
            if self.capture is not None:
                self.capture.host_operand(tensor, storage)
            return self.base_slot(storage)
        raise NeedsMemory(f"a tensor on {tensor.device}")

    def encode_call(self, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any], key: list[Any]) -> Any:
        """All arguments of a call in the form of the trace, the named ones by name; adds to `key` as `encode` does."""
        positions = plan.varying_positions
        if self.capture is not None and plan.followed_positions:
            positions |= self.capture.followed_among(plan.followed_positions, args)
        encoded = tuple([self.encode(a, bool(positions) and i in positions, key) for i, a in enumerate(args)])
        if not kwargs:
            return encoded, ()
        names = []
        varying = plan.varying
        if self.capture is not None and plan.followed:
            varying |= self.capture.followed_named(plan.followed, kwargs)
        for name in sorted(kwargs):
            key.append(name)
            names.append((name, self.encode(kwargs[name], name in varying, key)))
        return encoded, tuple(names)

    def claimed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.device, str]:
        """The device that results claim, and the one that computes them, from the first lazy argument."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, LazyTensor):
                return value._geometry.device, value._geometry.compute
            if isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, LazyTensor):
                        return item._geometry.device, item._geometry.compute
            if isinstance(value, torch.device):
                if value.type == "lazy":
                    check_lazy_index(value)
                    return LAZY, self.target
                if self.mode_depth:
                    return indexed(value), str(indexed(value))
        return (torch.device("cpu"), "cpu") if self.mode_depth else (LAZY, self.target)

    def infer(self, key: list[Any], plan: OpPlan, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """Cached `infer`: the results' geometry, then the arguments' geometry afterwards."""
        cached_key = tuple(key) if op is plan.op else (op, *key)
        found = self._results.get(cached_key)
        if found is None:
            device, compute = self.claimed(args, kwargs)
            if self.has_mode_tensors:
                eager_fallback.check_one_device(op, (*args, *kwargs.values()))
            geoms = tuple(self.geometry_arguments(a) for a in args)
            named = {name: self.geometry_arguments(value) for name, value in kwargs.items()}
            check_by_running(op, geoms, named, compute)
            found = infer(op, geoms, named, device, compute)
            if len(self._results) >= _MAX_CACHED_RESULTS:
                self._results.clear()  # ever-changing constants (slice bounds) must not fill the memory
            self._results[cached_key] = found
        return found

    def geometry_arguments(self, value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return value._geometry
        if isinstance(value, torch.Tensor):
            return geometry_like(value.detach(), value.device, str(value.device))
        if isinstance(value, (list, tuple)):
            return [self.geometry_arguments(item) for item in value]
        if isinstance(value, torch.device) and value.type == "lazy":
            return torch.device(self.target)
        return plain_number(value)

    def infer_call(self, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The geometry of the results that `plan.op` would have; records nothing, but may add inputs."""
        key: list[Any] = [plan]
        self.encode_call(plan, args, kwargs, key)
        return self.infer(key, plan, plan.op, args, kwargs)[0]

    def record_pure(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record an operator without side effects; returns new tensors."""
        return self._record_pure(self.plan(op), args, kwargs)

    def _record_pure(self, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        key: list[Any] = [plan]
        encoded, named = self.encode_call(plan, args, kwargs, key)
        results = self._results.get(tuple(key)) or self.infer(key, plan, plan.op, args, kwargs)
        outputs = self.append(plan.op, encoded, named, results[0])
        self.ops_recorded += 1
        if len(self._entries) > config.max_trace_length:
            wrapped = self.wrap_new(outputs, results[0])
            self.cut("trace length limit")
            return wrapped
        return self.wrap_new(outputs, results[0])

    def _record_view(self, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        if not isinstance(source, torch.Tensor):  # a number, which gives an ordinary tensor: `1j` in a backward
            with self.apart():
                return plan.op(*args, **kwargs)
        if not isinstance(source, LazyTensor):
            raise NeedsMemory("a view of a tensor that is not lazy")
        key: list[Any] = [plan]
        encoded, named = self.encode_call(plan, args, kwargs, key)
        results, _ = self._results.get(tuple(key)) or self.infer(key, plan, plan.op, args, kwargs)
        self.ops_recorded += 1
        if type(results) is not tuple and results is source._geometry:
            return wrap_view(source, source._storage_, results, encoded[0], self.epoch)
        outputs = self.append(plan.op, encoded, named, results)
        return self.wrap_views(outputs, results, source)

    def wrap_new(self, outputs: Any, results: Any) -> Any:
        """New tensors for new values, in the structure of `outputs`."""
        if type(outputs) is Slot:
            return self.new_tensor(outputs, results)
        if outputs is None:
            return results  # None, or a number that the operator returns beside its tensors
        return tuple(self.wrap_new(o, r) for o, r in zip(outputs, results, strict=True))

    def wrap_views(self, outputs: Any, results: Any, source: LazyTensor) -> Any:
        """Views of the memory of `source`, in the structure of `outputs`."""
        if type(outputs) is Slot:
            return wrap_view(source, source._storage_, results, outputs, self.epoch)
        return [self.wrap_views(o, r, source) for o, r in zip(outputs, results, strict=True)]

    def twin(self, source: LazyTensor) -> LazyTensor:
        """`detach` and its like: the same view of the same storage; nothing is recorded."""
        self.ops_recorded += 1
        storage, geom = source._storage_, source._geometry
        if geom is storage.base:  # the storage knows its value
            return wrap_view(source, storage, geom, None, -1)
        twin = wrap_view(source, storage, geom, source._slot, source._epoch)
        twin._seen = source._seen
        return twin

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, operators run on real tensors: nothing is recorded, under `lazy_mode` too."""
        with self.lock, below_autograd():
            was_busy, self.busy = self.busy, True
            try:
                yield
            finally:
                self.busy = was_busy

    def hand_out(self, tensor: LazyTensor, cause: str) -> torch.Tensor:
        """The tensor's memory for a caller that keeps it: from now on new values are written into that very memory."""
        real = self.real(tensor, cause)
        self.rematerialize_pending()
        storage = tensor._storage_
        storage.pinned = True
        if storage.base.device != LAZY:
            self._registry[memory_key(real)] = storage
        return real

    def real(self, tensor: LazyTensor, cause: str) -> torch.Tensor:
        """The tensor's memory, with its geometry; cuts the trace when it is not there yet. Aliases the storage."""
        return eager_fallback.real_memory(self, tensor, cause)

    def constant(self, tensor: LazyTensor) -> Any:
        """The one value of a pending tensor that depends on nothing outside the trace, without a cut; else None."""
        storage = tensor._storage_
        if not storage.dirty or storage.epoch != self.epoch or tensor._geometry.numel != 1:
            return None
        wanted = self.read(tensor)
        inputs = frozenset(number.number for number, _ in self.inputs)
        with self.apart():
            return self._constants.item(self._entries, self._geometries, inputs, wanted)

    def read_apart(self, tensor: LazyTensor, cause: str) -> Reading | None:
        """The one value of a pending tensor without a cut, where a few cheap operators lead to it; else None."""
        with self.lock:
            return read_apart(self, tensor, cause)

    def run_eagerly(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], reason: str) -> Any:
        """Cut, run `op` on real memory at once, and wrap what it returns; aliases of arguments stay aliases."""
        return eager_fallback.run_eagerly(self, op, args, kwargs, reason)

    def run_cut(
        self, trace: CutTrace, given: list[LazyStorage], versions: list[int], live: list[LazyStorage],
        memory: list[Any], scalars: list[Any], cause: str, frame: str,
    ) -> list[Any]:  # fmt: skip
        """The outputs of a cut trace; a `RematerializedValue` for one that is rematerialized. Empties `given`."""
        if self.compute_others is not None:
            self.compute_others()
        halves = getattr(self.driver, "halves", None)  # a recorder that never runs has a function as its driver
        if halves is None:
            read: list[Any] = [
                s.real if type(m) is RematerializedValue else m for s, m in zip(given, memory, strict=True)
            ]
            return self.driver(trace, read, scalars, cause, frame)
        return halves.run(trace, given, versions, live, memory, scalars, cause, frame)  # type: ignore[no-any-return]

    def rematerialize_pending(self, written: Sequence[torch.Tensor] | None = None) -> None:
        """Compute rematerialized values now, before memory that they depend on is written (None: any memory)."""
        for source in list(self.rematerializing):
            if written is None or source.is_computed_from(written):
                source.rematerialize_all()

    def leave_mode(self) -> None:
        """The outermost `lazy_mode` ends: writes to ordinary tensors are not seen from now on."""
        self.rematerialize_pending()
        halves = getattr(self.driver, "halves", None)
        if halves is not None:
            halves.leave_mode()

    def register_memory(self, storage: LazyStorage) -> None:
        """Note the memory that a storage now has: ordinary tensors on it belong to this storage."""
        if storage.base.device != LAZY and storage.real is not None:
            self._registry[memory_key(storage.real)] = storage

    def cut(self, cause: str) -> None:
        """Run what was recorded: every live storage gets its memory. A no-op when nothing is pending."""
        with self.lock:
            if self.busy or (self.capture is not None and not self.capture.lets_cut(cause)):
                return
            epoch = self.epoch
            live = [s for ref in self._pending if (s := ref()) is not None and s.epoch == epoch and s.dirty]
            live = list(dict.fromkeys(live))
            if not live:
                if self._entries or self.inputs:
                    self._start_trace()
                return
            if self.gate is not None and self.gate(cause):
                return
            frame = user_frames.user_frame()
            self.on_cut(cause, frame, len(self._entries))
            trace, memory, scalars = self._snapshot(live)
            given, versions = [storage for _, storage in self.inputs], self.input_versions
            if self.capture is not None:
                self.capture.segment(trace, given, scalars, live, cause, frame)
            self.paths.finish(self.path, self._entries, self._geometries)
            self._start_trace()
            self.busy = True
            error: BaseException | None = None
            try:
                values = self.run_cut(trace, given, versions, live, memory, scalars, cause, frame)
                if self.capture is not None:
                    self.capture.segment_ran()
            except BaseException as failure:  # an interrupt, or a compiler error in strict mode
                error = failure
                lost = RuntimeError(
                    f"torchlazy: this value was lost to a {type(failure).__name__} at the cut {cause!r}; make it anew "
                    "(a gradient: after optimizer.zero_grad()); what had memory before, as parameters do, still has it"
                )
                values = [lost] * len(live)
            finally:
                self.busy = False
            lost_one = assign_values(self, live, values)
            error = error or lost_one
            if error is not None:
                raise error


def register_fork(recorder: Recorder) -> None:
    """DataLoader workers fork: give the child a lock of its own."""
    os.register_at_fork(
        before=recorder.lock_before_fork,
        after_in_parent=recorder.unlock_after_fork,
        after_in_child=recorder.reset_after_fork,
    )


__all__ = ["Recorder", "current", "register_fork"]

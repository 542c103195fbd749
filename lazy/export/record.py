"""Records one call as one whole graph and runs nothing of it: the base of `export` and the `torch.compile` bridge.

The call gets twins of its tensors: lazy tensors with the same geometry (or, to learn how sizes move, another one) and
no data. Whatever would need a value is an `ExportError` with the user's line.

Invariant: afterwards nothing has changed: no tensor, no attribute of a module, no random state; twins that the program
kept somewhere raise when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.device.mode import RecordedBlock
from torchlazy.lazy.export.front_door import ExportError
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.record import eager_fallback
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.running_trace import UnsharedScalars
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, wrap
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.torch_private.patches import UnwrappedDispatchMode
from torchlazy.lazy.trace import user_frames
from torchlazy.lazy.trace.geometry import Geometry, geometry, indexed, is_dense, kind_of
from torchlazy.lazy.trace.storage import LazyStorage, storage_of
from torchlazy.lazy.trace.trace import CutTrace, Slot

aten = torch.ops.aten
_ONE_VALUE = frozenset({"bool", "int", "float", "complex", "index"})
_NO_EFFECT = frozenset({"aten::_assert_scalar"})


@dataclass(frozen=True)
class InputOrigin:
    """Where an input of the graph comes from: kind "argument", "state" or "constant", and its name there.

    `memory` holds a constant's value, and that of state.
    """

    kind: str
    key: str
    memory: torch.Tensor | None


@dataclass(frozen=True)
class RecordedCall:
    """One call as a trace. The trace's outputs are `results` tensors of the caller's, then new values of `updated`."""

    trace: CutTrace
    places: tuple[InputOrigin, ...]  # for each input of the trace
    scalars: tuple[Any, ...]
    seeds: frozenset[int]  # positions among the scalars that are random seeds
    results: int
    updated: tuple[int, ...]  # positions among the inputs that the call writes to


class WholeGraph:
    """One recording. Make twins with `twin`, enter it, run the program, then `finish` with what it returned."""

    def __init__(self, recorder: Recorder, purpose: str, on_lazy: bool) -> None:
        self.recorder = recorder
        self.purpose = purpose
        self.on_lazy = on_lazy
        self.may_draw = True  # random operators without a rule draw with torch's generators when the graph runs
        self._places: dict[int, InputOrigin] = {}
        self._storages: list[LazyStorage] = []  # held, so that their identities stay theirs
        self._seeds: set[int] = set()
        self._fresh: dict[int, torch.Tensor] = {}  # ordinary tensors that the program itself made

    def twin(self, tensor: torch.Tensor, kind: str, key: str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A lazy tensor without data in the place of `tensor`, of another shape if one is given."""
        geom = geometry_of(tensor, self.recorder.target, shape)
        storage = self.own_storage(geom, key)
        self._places[id(storage)] = InputOrigin(kind, key, tensor if kind == "state" else None)
        with torch.inference_mode(False):
            made = wrap(storage, geom, None, -1)
            if isinstance(tensor, torch.nn.Parameter):
                return torch.nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def own_storage(self, base: Geometry, key: str) -> LazyStorage:
        """Memory without data that twins may be views of."""
        with self.recorder.apart():
            storage = storage_of(base, torch.empty(0, dtype=base.dtype))
        self._places[id(storage)] = InputOrigin("argument", key, None)
        self._storages.append(storage)
        return storage

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Operators inside are recorded and nothing runs; the recorder is as before afterwards."""
        recorder = self.recorder
        recorder.cut(self.purpose)
        keep_frames, counted = recorder.keep_frames, recorder.ops_recorded
        random_state = torch.get_rng_state()
        overrides = {
            "cut": self._cut,
            "real": self._real,
            "read_apart": lambda tensor, cause: None,
            "run_eagerly": self._run_eagerly,
            "on_draw": self._refuse_draw,
            "scalar_input": self._scalar_input,
        }
        with recorder.lock:
            recorder.keep_frames = True
            recorder._start_trace()
            recorder._scalar_numbers = UnsharedScalars()
            recorder.__dict__.update(overrides)
        try:
            with ExitStack() as stack:
                if not self.on_lazy:
                    stack.enter_context(RecordedBlock())
                stack.enter_context(_Watch(self))
                yield
        finally:
            with recorder.lock:
                for name in overrides:
                    recorder.__dict__.pop(name, None)
                self._discard()
                recorder.keep_frames, recorder.ops_recorded = keep_frames, counted
                torch.set_rng_state(random_state)

    def finish(self, tensors: Sequence[torch.Tensor]) -> RecordedCall:
        """The trace whose results are `tensors`; call it inside `recording`."""
        recorder = self.recorder
        outputs = [self.slot_of(tensor) for tensor in tensors]
        updated, news = self._updates()
        trace = CutTrace(
            tuple(recorder.entries),
            tuple(recorder.geometries),
            tuple((number, storage.base) for number, storage in recorder.inputs),
            tuple(type(value) for value in recorder.scalars),
            tuple(outputs + news),
            (),
            tuple(recorder.frames),
        )
        places = tuple(self.place_of(storage) for _, storage in recorder.inputs)
        return RecordedCall(
            trace, places, tuple(recorder.scalars), frozenset(self._seeds), len(tensors), tuple(updated)
        )

    def slot_of(self, tensor: torch.Tensor) -> tuple[Slot, Geometry]:
        """The slot of a result and the geometry that it is recorded with."""
        if not isinstance(tensor, LazyTensor):
            if not is_dense(tensor):
                raise self.error(f"a result is a {kind_of(tensor)} tensor", "return dense tensors")
            with self.recorder.apart():
                twin = self.recorder.view_of_plain(tensor, self.recorder.storage_of_plain(tensor))
            return self.slot_of(twin)
        geom = tensor._geometry
        return self.recorder.read(tensor), geometry(geom.shape, geom.strides, 0, geom.dtype, geom.device, geom.compute)

    def place_of(self, storage: LazyStorage) -> InputOrigin:
        """Where the memory of an input of the trace comes from."""
        found = self._places.get(id(storage))
        return found if found is not None else InputOrigin("constant", "", storage.real)

    def is_fresh(self, storage: LazyStorage) -> bool:
        """Whether the program itself made an ordinary tensor (`torch.tensor([...])`), so no other code holds it."""
        real = storage.real
        if real is None or not storage.pinned:
            return True
        with self.recorder.apart():
            return any(t.untyped_storage()._cdata == real.untyped_storage()._cdata for t in self._fresh.values())

    def _updates(self) -> tuple[list[int], list[tuple[Slot, Geometry]]]:
        recorder = self.recorder
        updated, news = [], []
        for position, (number, storage) in enumerate(recorder.inputs):
            if storage.epoch != recorder.epoch or not storage.dirty or storage.slot is number:
                continue
            if id(storage) not in self._places:
                if self.is_fresh(storage):
                    continue
                raise self.error(
                    f"the program writes to a tensor of {storage.base.meta} that is neither an argument nor a "
                    "parameter or buffer of a module that it is known to use",
                    "pass the tensor as an argument, or register it as a buffer",
                )
            assert storage.slot is not None
            updated.append(position)
            news.append((storage.slot, storage.base))
        return updated, news

    def error(self, what: str, remedy: str) -> ExportError:
        """An ExportError at the user's line."""
        return ExportError(f"{self.purpose}: {what}\nwhere: {user_frames.user_frame() or '?'}\nremedy: {remedy}")

    # ---------------------------------------------------------------- instead of the recorder

    def _cut(self, cause: str) -> None:
        """Flushes are left out; a read of ordinary memory that the trace writes is refused."""
        recorder = self.recorder
        if cause in _ONE_VALUE:
            raise self._needs_value(cause)
        written = [s for s in (ref() for ref in recorder._written) if s is not None and s.dirty and s.pinned]
        if cause not in _SENDS_OFF and any(s.epoch == recorder.epoch for s in written):
            raise self._needs_value(cause)

    def _real(self, tensor: LazyTensor, cause: str) -> torch.Tensor:
        if not self._is_constant(tensor):
            raise self._needs_value(cause)
        return eager_fallback.real_memory(self.recorder, tensor, cause)

    def _is_constant(self, tensor: LazyTensor) -> bool:
        """Whether its value is known now: nothing in the trace has made it, and it is no argument and no state."""
        storage = tensor._storage_
        is_pending = storage.dirty and storage.epoch == self.recorder.epoch
        return not is_pending and id(storage) not in self._places and storage.real is not None

    def _run_eagerly(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], reason: str) -> Any:
        if op.name().split(".")[0] in _NO_EFFECT:
            return None
        if reason == "random":
            if torch.Tag.dynamic_output_shape in op.tags or not self.may_draw:
                self._refuse_draw(op)
            return self.recorder.record_pure(op, args, kwargs)  # torch's own operator draws when the graph runs
        flat = [v for a in (*args, *kwargs.values()) for v in (a if isinstance(a, (list, tuple)) else (a,))]
        if all(self._is_constant(v) for v in flat if isinstance(v, LazyTensor)):
            return eager_fallback.run_eagerly(self.recorder, op, args, kwargs, reason)
        name = op.name().removeprefix("aten::")
        if not any(isinstance(r.type, (torch.TensorType, torch.ListType)) for r in op._schema.returns):
            raise self._needs_value(name)  # a bool or a number: `torch.equal`, `torch.allclose`
        raise self.error(f"{name} has to run for real: {reason}", "keep it out of the exported function")

    def _refuse_draw(self, op: torch._ops.OpOverload) -> None:
        """Its numbers would be constants of the graph."""
        raise self.error(
            f"{op.name().removeprefix('aten::')} draws its numbers at once, with the device's own generator",
            'set torchlazy.config.rng = "philox"',
        )

    def _scalar_input(self, value: int | float) -> Any:
        self._seeds.add(len(self.recorder.scalars))
        return Recorder.scalar_input(self.recorder, value)

    def _needs_value(self, cause: str) -> ExportError:
        return self.error(
            f"{cause!r} needs a value on the host, which only a run of the program has",
            "compute it on tensors (torch.where instead of if), or keep it out of the exported function",
        )

    def _discard(self) -> None:
        """Forget the trace: nothing of it is ever run, and what it made says so when it is used."""
        recorder = self.recorder
        lost = ExportError(f"{self.purpose}: this tensor belongs to a recording that was never run; it has no value")
        for storage in (ref() for ref in recorder._written):
            if storage is not None:
                storage.dirty, storage.slot = False, None
                if storage.real is None:
                    storage.poison = lost
        for storage in self._storages:
            storage.poison, storage.real = lost, None
        recorder._start_trace()


_SENDS_OFF = frozenset({"optimizer step", "flush", "leaving lazy_mode", "trace length limit", "sync", "synchronize"})


class _Watch(UnwrappedDispatchMode):
    """Sees every operator before `lazy_mode` does: what the recorder would do at once, and what it could not replay."""

    def __init__(self, whole: WholeGraph) -> None:
        super().__init__()
        self.whole = whole

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        whole = self.whole
        if whole.recorder.busy:
            return func(*args, **kwargs)
        if any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values())):
            raise whole.error(
                f"{func.name()} draws from a generator of the program's own", "use torch's default generator"
            )
        if func._schema.is_mutable:
            self._check_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in (aten.lift_fresh.default, aten.lift.default) and not isinstance(result, LazyTensor):
            whole._fresh[id(result)] = result
        return result

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """A 0-dim ordinary tensor that only the host knows would be written for real, at once."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for target in value if isinstance(value, (list, tuple)) else (value,):
                if type(target) is not torch.Tensor or target.dim() or id(target) in self.whole._fresh:
                    continue
                if target.device.type == "cpu" and not self.whole.recorder.is_in_trace(target):
                    raise self.whole.error(
                        f"{func.name().removeprefix('aten::')} writes to a number in ordinary memory (an optimizer's "
                        "step count?)",
                        "pass it as an argument, or register it as a buffer of the exported module",
                    )


def geometry_of(tensor: torch.Tensor, target: str, shape: Sequence[int] | None = None) -> Geometry:
    """The geometry of a twin: dense, in memory of its own, with the strides' order of `tensor`."""
    if isinstance(tensor, LazyTensor):
        device, compute = tensor._geometry.device, target if tensor._geometry.device == LAZY else str(tensor.device)
    else:
        device, compute = indexed(tensor.device), str(indexed(tensor.device))
    sizes = tuple(int(n) for n in (tensor.shape if shape is None else shape))
    strides = tuple(int(n) for n in tensor.stride())
    return geometry(sizes, dense_strides(sizes, strides), 0, tensor.dtype, device, compute)


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for `shape`, its axes in memory in the order of the strides `like` (larger outside)."""
    order = sorted(range(len(shape)), key=lambda axis: (-like[axis], axis))
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


@contextmanager
def state_as_twins(
    whole: WholeGraph, modules: Mapping[str, torch.nn.Module], changed: Callable[[str, torch.Tensor, Any], None]
) -> Iterator[None]:
    """The modules' parameters and buffers are twins inside, named by their path ("layer.weight").

    After the block, and before all attributes are restored, `changed(key, twin, found)` is called for every
    parameter or buffer that is another object now.
    """
    parts = [(name, part) for prefix, module in modules.items() for name, part in _parts(prefix, module)]
    kept = [
        (part, dict(part.__dict__), {n: dict(part.__dict__[n]) for n in ("_parameters", "_buffers", "_modules")})
        for _, part in parts
    ]
    twins: dict[int, torch.Tensor] = {}
    placed: list[tuple[str, dict[str, Any], str, torch.Tensor]] = []
    for prefix, part in parts:
        held: list[dict[str, Any]] = [part._parameters, part._buffers]
        for table in held:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if tensor.device.type == "meta" or not is_dense(tensor):
                    kind = kind_of(tensor)
                    raise ExportError(f"{whole.purpose}: {prefix}{name} is a {kind} tensor on {tensor.device}")
                if id(tensor) not in twins:
                    twins[id(tensor)] = whole.twin(tensor, "state", prefix + name)
                table[name] = twins[id(tensor)]
                placed.append((prefix + name, table, name, twins[id(tensor)]))
    try:
        yield
        for key, table, name, twin in placed:
            if table.get(name) is not twin:
                changed(key, twin, table.get(name))
        for (prefix, part), (_, attributes, _) in zip(parts, kept, strict=True):
            _check_attributes(whole, prefix, part, attributes)
        for key, _, _, twin in placed:
            if twin.grad is not None:
                raise ExportError(
                    f"{whole.purpose}: the program leaves a gradient in {key}.grad, which is no result\n"
                    "remedy: return torch.autograd.grad(loss, parameters) instead of calling loss.backward()"
                )
    finally:
        for part, attributes, tables in kept:
            for name, table in tables.items():
                attributes[name].clear()
                attributes[name].update(table)
            part.__dict__.clear()
            part.__dict__.update(attributes)


def _parts(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    start = f"{prefix}." if prefix else ""
    for name, part in module.named_modules():
        yield (f"{start}{name}." if name else start), part


def _check_attributes(whole: WholeGraph, prefix: str, part: torch.nn.Module, before: dict[str, Any]) -> None:
    """A tensor stored in an attribute is state that the export would lose."""
    for name, value in part.__dict__.items():
        if isinstance(value, LazyTensor) and before.get(name) is not value:
            raise ExportError(
                f"{whole.purpose}: the program stores a tensor in the attribute {prefix}{name}, which is no result\n"
                f"remedy: return it, or register it: self.register_buffer({name!r}, ...)"
            )


def value_of(memory: torch.Tensor, geom: Geometry) -> torch.Tensor:
    """A copy of a constant's value in the geometry that the trace has it in."""
    memory = DEVICE.unmarked(memory)
    with below_autograd():
        window = memory if memory.shape == geom.shape else memory.as_strided(geom.shape, geom.strides)
        return torch.empty_strided(geom.shape, geom.strides, dtype=geom.dtype, device=memory.device).copy_(window)

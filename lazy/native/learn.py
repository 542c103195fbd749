"""A native log becomes a `CutTrace`: its operators are recorded by the Python recorder, on tensors without memory.

Nothing runs and nothing of the program changes. The Python recorder defines what a recorded operator means, so both
ways give equal traces; here its inputs, outputs and scalars get their places in the native log.

Invariant: an operator that the recorder would have to run makes the whole log `Unlearnable`, which names it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.record.paths import Paths
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.running_trace import UnsharedScalars
from torchlazy.lazy.record.tensor import LazyTensor, wrap
from torchlazy.lazy.trace.geometry import Geometry, flat, geometry
from torchlazy.lazy.trace.op_schema import draws
from torchlazy.lazy.trace.storage import LazyStorage, storage_of
from torchlazy.lazy.trace.trace import CutTrace, ScalarSlot, Slot
from torchlazy.runtime.program.steps import RNN_LAYER

NativeTensor = tuple[int, list[int], list[int], int, torch.dtype]  # memory, sizes, strides, offset, dtype

_LAYOUTS = {0: torch.strided}
_FORMATS = {
    0: torch.contiguous_format,
    1: torch.preserve_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
}


class Unlearnable(Exception):
    """This log cannot become a trace: `op` is the operator at fault, if it is one operator's."""

    def __init__(self, reason: str, op: tuple[str, str] | None = None) -> None:
        super().__init__(reason)
        self.op = op


@dataclass(frozen=True)
class LearnedTrace:
    """A trace, and where its inputs, scalars and outputs stand in the native log.

    `inputs`, `outputs` and `unchanged` (inputs that writes left as they were) are numbers of memory; `scalars`
    positions among the log's floats; floats at the two positions of each of `equal` share a scalar; floats at the
    positions `fixed` are constants of the trace.
    """

    trace: CutTrace
    inputs: tuple[int, ...]
    scalars: tuple[int, ...]
    equal: tuple[tuple[int, int], ...]
    fixed: tuple[int, ...]
    outputs: tuple[int, ...]
    unchanged: tuple[int, ...]
    scalar_values: tuple[float, ...]


def learn(recorder: Recorder, log: dict[str, Any], wanted: Sequence[int], shares_scalars: bool = True) -> LearnedTrace:
    """The trace of a native log whose memory `wanted` is read after it. Raises Unlearnable.

    With `shares_scalars` equal numbers at one argument of one operator are one scalar, as in the recorder.
    """
    with _recording(recorder):
        if not shares_scalars:
            recorder._scalar_numbers = UnsharedScalars()
        return _Learner(recorder, log).learn(wanted)


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    """Inside, operators are recorded in a trace of their own, as under `lazy_mode`, and nothing is run."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Unlearnable(str(args[-1]) if args else "its value is needed")

    overrides = {"cut": refuse, "real": refuse, "run_eagerly": refuse, "read_apart": lambda tensor, cause: None}
    with recorder.lock:
        recorder.cut("learning a trace")
        depth, had_mode, paths, counted = (
            recorder.mode_depth,
            recorder.has_mode_tensors,
            recorder.paths,
            recorder.ops_recorded,
        )
        recorder.mode_depth, recorder.has_mode_tensors, recorder.paths = 1, True, Paths()
        recorder._start_trace()
        recorder.__dict__.update(overrides)
        try:
            yield
        finally:
            for name in overrides:
                recorder.__dict__.pop(name, None)
            recorder.mode_depth, recorder.has_mode_tensors, recorder.paths = depth, had_mode, paths
            for ref in recorder._written:
                if (storage := ref()) is not None:
                    storage.epoch, storage.dirty, storage.slot = -1, False, None
            recorder._start_trace()
            recorder.ops_recorded = counted


class _Learner:
    def __init__(self, recorder: Recorder, log: dict[str, Any]) -> None:
        self.recorder, self.log = recorder, log
        self.storages: dict[int, LazyStorage] = {}
        self.views: dict[tuple[Any, ...], LazyTensor] = {}
        self.scalar_of: dict[int, int] = {}  # by position among the log's floats
        self.fixed: set[int] = set()

    def learn(self, wanted: Sequence[int]) -> LearnedTrace:
        for name, overload, arguments, results, is_view in self.log["entries"]:
            try:
                self._record(name, overload, arguments, results, is_view)
            except Unlearnable as why:
                if is_view:  # the geometry is enough where it is used
                    continue
                raise Unlearnable(str(why), (name, overload)) from None
            except Exception as error:
                if is_view:
                    continue
                raise Unlearnable(f"{type(error).__name__}: {error}", (name, overload)) from error
        return self._snapshot(wanted)

    def _record(self, name: str, overload: str, arguments: Any, results: Any, is_view: bool) -> None:
        # Its schema says that it returns memory of its own.
        recorder, op = self.recorder, operator("aten::view" if name == "aten::_unsafe_view" else name, overload)
        floats: list[int] = []
        args, kwargs = self._arguments(op, arguments, floats)
        before = len(recorder._entries)
        if name == "aten::native_dropout":
            found = recorder.record_pure(torch.ops.torchlazy.drawn_dropout.default, args[:2], {})
        elif op is RNN_LAYER:  # its last argument says whether gradients were on
            found = recorder.record_pure(op, args, kwargs)
        else:
            found = recorder.dispatch(op, args, kwargs)
        if is_view:
            self._keep_views(found, results)
            return
        if floats:
            self._place_floats(floats, before)
        made = [t for t in (found if isinstance(found, (list, tuple)) else (found,)) if isinstance(t, torch.Tensor)]
        made = [t for t in made if not any(t is given for given in _tensors(args, kwargs))]
        _check_same(made, _flat_tensors(results))
        for tensor, (_, (number, *_rest)) in zip(made, _flat_tensors(results), strict=True):
            self.storages[number] = tensor._storage_  # type: ignore[attr-defined]
            self._keep_view(tensor, number)

    def _place_floats(self, floats: Sequence[int], before: int) -> None:
        """Which of the log's floats became scalars of the trace: by value, among the scalars of the new entries."""
        recorder = self.recorder
        there: dict[str, list[int]] = {}
        for scalar in sorted({s.number for e in recorder._entries[before:] for s in _scalars(e)}):
            there.setdefault(recorder.scalars[scalar].hex(), []).append(scalar)
        for position in floats:
            numbers = there.get(self.log["floats"][position].hex())
            if not numbers:
                self.fixed.add(position)
            else:  # unshared equal ones come in the order of the arguments
                self.scalar_of[position] = numbers.pop(0) if len(numbers) > 1 else numbers[0]

    def _arguments(self, op: Any, arguments: Sequence[Any], floats: list[int]) -> tuple[list[Any], dict[str, Any]]:
        """As torch hands them to Python: without those that have their default value."""
        args, kwargs = [], {}
        for argument, value in zip(op._schema.arguments, arguments, strict=True):
            given = self._value(value, str(argument.real_type), floats)
            if argument.kwarg_only:
                if not _is_default(argument, given):
                    kwargs[argument.name] = given
            else:
                args.append(given)
        positional = [a for a in op._schema.arguments if not a.kwarg_only]
        while args and _is_default(positional[len(args) - 1], args[-1]):
            args.pop()
        return args, kwargs

    def _value(self, value: Any, kind: str, floats: list[int]) -> Any:
        if type(value) is list:
            inner = kind.removeprefix("Optional[").removeprefix("List[")
            return [self._value(item, inner, floats) for item in value]
        if type(value) is tuple:
            tag, payload = value
            if tag == "tensor":
                return self._tensor(payload)
            if tag == "float":
                floats.append(payload[0])
                return payload[1]
            return torch.device(payload)
        if type(value) is int:
            if "ScalarType" in kind:
                return self.log["dtype"](value)
            if "Layout" in kind:
                return _LAYOUTS[value]
            if "MemoryFormat" in kind:
                return _FORMATS[value]
        return value

    def _tensor(self, native: NativeTensor) -> LazyTensor:
        number = native[0]
        storage = self.storages.get(number)
        if storage is None:
            storage = self.storages[number] = self._input(native)
        geom = self._geometry(native)
        key = (number, geom)
        found = self.views.get(key)
        if found is None:
            found = self.views[key] = wrap(storage, geom, None, -1)
        return found

    def _geometry(self, native: NativeTensor) -> Geometry:
        number, sizes, strides, offset, dtype = native
        device = self.log["memories"][number][3]
        return geometry(tuple(sizes), tuple(strides), offset, dtype, torch.device(device), device)

    def _input(self, native: NativeTensor) -> LazyStorage:
        """Memory that was there before, in the geometry of the tensor that is met first, or flat."""
        number = native[0]
        made, _, nbytes, device = self.log["memories"][number]
        if made:
            raise Unlearnable("a value that no recorded operator made")
        geom = self._geometry(native)
        if geom.offset or geom.span * geom.dtype.itemsize != nbytes or geom.numel != geom.span:
            geom = flat(nbytes // geom.dtype.itemsize, geom.dtype, torch.device(device), device)
        with self.recorder.apart():
            return storage_of(geom, torch.empty(0, dtype=geom.dtype))

    def _keep_views(self, found: Any, results: Any) -> None:
        made = found if isinstance(found, (list, tuple)) else [found]
        for tensor, (_, native) in zip(made, _flat_tensors(results), strict=True):
            if isinstance(tensor, LazyTensor) and tensor._storage_ is self.storages.get(native[0]):
                self._keep_view(tensor, native[0])

    def _keep_view(self, tensor: Any, number: int) -> None:
        self.views[number, tensor._geometry] = tensor

    def _snapshot(self, wanted: Sequence[int]) -> LearnedTrace:
        recorder = self.recorder
        number_of = {id(storage): number for number, storage in self.storages.items()}
        inputs = [(slot, storage) for slot, storage in recorder.inputs]
        if any(id(storage) not in number_of for _, storage in inputs):
            raise Unlearnable("it reads memory that is not in the log")
        live, unchanged = [], []
        for number in wanted:
            storage = self.storages.get(number)
            made, _, nbytes, _ = self.log["memories"][number]
            if storage is None or not (storage.dirty and storage.epoch == recorder.epoch):
                if made:
                    raise Unlearnable("a value that no recorded operator made")
                unchanged.append(number)
                continue
            if made and storage.base.nbytes > nbytes:
                raise Unlearnable("a result larger than its memory")
            live.append((number, storage))
        position_of = {id(storage): i for i, (_, storage) in enumerate(inputs)}
        donations = tuple((i, position_of[id(s)]) for i, (_, s) in enumerate(live) if id(s) in position_of)
        trace = CutTrace(
            tuple(recorder._entries),
            tuple(recorder._geometries),
            tuple((slot, storage.base) for slot, storage in inputs),
            tuple(type(value) for value in recorder.scalars),
            tuple((storage.slot, storage.base) for _, storage in live),  # type: ignore[misc]
            donations,
            tuple(recorder._frames),
        )
        positions: dict[int, list[int]] = {}
        for position, scalar in sorted(self.scalar_of.items()):
            positions.setdefault(scalar, []).append(position)
        if not are_in_one_chain(trace):
            raise Unlearnable("its random operators do not depend on one another: their order could change")
        if len(positions) != len(recorder.scalars):
            raise Unlearnable("a number of the program that is not in the log")
        return LearnedTrace(
            trace,
            tuple(number_of[id(storage)] for _, storage in inputs),
            tuple(positions[scalar][0] for scalar in range(len(recorder.scalars))),
            tuple((places[0], other) for places in positions.values() for other in places[1:]),
            tuple(sorted(self.fixed)),
            tuple(number for number, _ in live),
            tuple(unchanged),
            tuple(recorder.scalars),
        )


def are_in_one_chain(trace: CutTrace) -> bool:
    """Whether each random operator of the trace depends on the one before: then any order of running draws alike."""
    behind: dict[int, int] = {}  # slot -> how many random operators its value depends on
    drawn = 0
    for entry in trace.entries:
        count = max((behind.get(slot.number, 0) for slot in _slots((entry.args, entry.kwargs))), default=0)
        if draws(entry):
            if count != drawn:
                return False
            count = drawn = drawn + 1
        behind.update((slot.number, count) for slot in _slots(entry.outputs))
    return True


def _slots(value: Any) -> Iterator[Slot]:
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _slots(item)


@functools.cache
def operator(name: str, overload: str) -> Any:
    """The operator overload with this name, "aten::add" and "Tensor"."""
    namespace, _, base = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def _is_default(argument: Any, given: Any) -> bool:
    if not argument.has_default_value():
        return False
    default = argument.default_value
    return (given is None and default is None) or (
        type(given) is type(default) and not isinstance(given, torch.Tensor) and bool(given == default)
    )


def _flat_tensors(results: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in results:
        found += _flat_tensors(value) if type(value) is list else [value] if type(value) is tuple else []
    return [value for value in found if value[0] == "tensor"]


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def _check_same(made: Sequence[Any], logged: Sequence[Any]) -> None:
    if len(made) != len(logged):
        raise Unlearnable(f"{len(made)} results in place of {len(logged)}")
    for tensor, (_, (_, sizes, strides, offset, dtype)) in zip(made, logged, strict=True):
        if not isinstance(tensor, LazyTensor):
            raise Unlearnable("its result is not recorded")
        geom = tensor._geometry
        if (list(geom.shape), list(geom.strides), geom.offset) != (sizes, strides, offset) or geom.dtype != dtype:
            raise Unlearnable(
                f"its result lies otherwise in memory: {geom.shape} {geom.strides}, not {sizes} {strides}"
            )


def _scalars(entry: Any) -> Iterator[ScalarSlot]:
    stack = [*entry.args, *(value for _, value in entry.kwargs)]
    while stack:
        value = stack.pop()
        if type(value) is ScalarSlot:
            yield value
        elif type(value) is tuple:
            stack += value

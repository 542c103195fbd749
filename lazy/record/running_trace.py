"""The running trace, and the storages whose values it holds.

Invariant: between two cuts every live lazy storage is either real memory or a slot of the running trace. Each write to
a storage rebinds its slot and raises its version; nothing that was recorded is ever changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torchlazy.lazy.record.bit_views import Records, as_dtype, resolved, written_as_dtype
from torchlazy.lazy.record.lent_memory import LentStorage, is_lent, stays_lent
from torchlazy.lazy.record.lock import TraceLock
from torchlazy.lazy.record.paths import KnownCut, Path, Paths
from torchlazy.lazy.record.rematerialize import memory_or_value
from torchlazy.lazy.record.shared_memory import SharedMemory
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, note_change, wrap, wrap_view, writes_with_grad
from torchlazy.lazy.torch_private.dispatch import without_bits
from torchlazy.lazy.trace import user_frames
from torchlazy.lazy.trace.geometry import Geometry, base_of, flat, geometry, geometry_like
from torchlazy.lazy.trace.storage import LazyStorage, storage_of
from torchlazy.lazy.trace.trace import CutTrace, Entry, Slot, scalar_slot, slot, slots_in

if TYPE_CHECKING:
    from torchlazy.lazy.record.recorder import Recorder

_aten = torch.ops.aten
_is_grad_enabled = torch.is_grad_enabled


class UnsharedScalars(dict[Any, Any]):
    """Numbers of the program that are inputs of their own each: two that are equal at one time differ at another."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default


class NeedsMemory(Exception):
    """This call cannot be recorded; run it on real memory."""


class RunningTrace:
    """Entries, inputs and scalars since the last cut; reads and writes of storages in terms of them."""

    busy: bool  # real operators are running: record nothing
    lock: TraceLock
    cut: Callable[[str], None]

    def __init__(self) -> None:
        self.epoch = 0
        self.target = "cpu"
        self.lock = TraceLock(self)
        self.ops_recorded = 0  # since this was last set to zero
        self.keep_frames = False  # whether the user's line is kept for each operator
        self.mode_depth = 0  # how many lazy_mode blocks are open
        self.has_mode_tensors = False
        # The type of the device that computes lazy tensors of the ordinary class; "" where they are `LazyTensor`s.
        self.lazy_type: Callable[[], str] = str
        # Marks what is made of lazy tensors of the ordinary class, once there are any.
        self.mark_result: Callable[[Any, Any, Any, Any], None] | None = None
        # Computes what the native recorder defers, before operators run here: these may read the same memory.
        self.compute_others: Callable[[], None] | None = None
        # lazy_mode: the lazy storage that stands for an ordinary tensor's memory, by the identity of that memory.
        self._registry: weakref.WeakValueDictionary[int, LazyStorage] = weakref.WeakValueDictionary()
        self._held: dict[int, LazyStorage] = {}  # those of this trace, until it is cut
        self.shared = SharedMemory()  # lazy_mode: memory that is shared outside of torch
        self.lent: weakref.WeakValueDictionary[int, LazyStorage] = weakref.WeakValueDictionary()  # by their memory
        self.is_overdue = False  # lent memory is in the trace: it is cut when the operator is recorded
        self.paths = Paths()
        self.path: Path | None = None
        # Within a captured call, each write: the number of entries before it, the storage, the slot of the value.
        self.written_values: list[tuple[int, weakref.ref[LazyStorage], Slot]] | None = None
        self._start_trace()

    # The trace for readers outside of the recorder.

    @property
    def entries(self) -> list[Entry]:
        """The operators recorded since the last cut."""
        return self._entries

    @property
    def geometries(self) -> list[Geometry]:
        """The geometry of each value of the trace, by slot number."""
        return self._geometries

    @property
    def frames(self) -> list[str]:
        """The user's line of each operator, where `keep_frames` is set."""
        return self._frames

    @property
    def _written(self) -> list[weakref.ref[LazyStorage]]:
        """The storages that the trace has a value for."""
        return self._pending

    def _start_trace(self) -> None:
        self.epoch += 1
        self.path = self.paths.begin()  # the known trace that this one has followed so far
        self.left_at: tuple[int, str] | None = None  # the operator and the user's line where it left all known traces
        self._entries: list[Entry] = []
        self._geometries: list[Geometry] = []
        self.inputs: list[tuple[Slot, LazyStorage]] = []
        self.input_memory: list[Any] = []  # tensors and rematerialized values (record/rematerialize.py)
        self.input_versions: list[int] = []  # of their storages, when they were entered
        self.scalars: list[Any] = []
        self._frames: list[str] = []
        self._scalar_numbers: dict[tuple[Any, ...], int] = {}
        self._pending: list[weakref.ref[LazyStorage]] = []
        if self.written_values:
            self.written_values = []
        self._held.clear()
        self.is_overdue = False

    def _new_slot(self, geom: Geometry) -> Slot:
        number = len(self._geometries)
        self._geometries.append(geom)
        path = self.path
        if path is not None and (number >= len(path.geometries) or path.geometries[number] is not geom):
            self.path = self.paths.with_geometry(self._entries, self._geometries)
            if self.path is None:
                self.left_at = len(self._entries), user_frames.user_frame()
        return slot(number)

    def append(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: tuple[Any, ...], results: Any) -> Any:
        """Append an entry whose results have the given geometries (same structure); returns their slots."""
        if self.keep_frames:
            self._frames.append(user_frames.user_frame())
        if self.path is not None:
            known = self._known_entry(op, args, kwargs, results)
            if known is not None:
                made = flat_geometries(results)
                self._geometries += made  # before the entry: a value that no entry makes does no harm
                self._entries.append(known)
                return known.outputs
        outputs = self._slots_for(results)
        self._entries.append(Entry(op, args, kwargs, outputs))
        return outputs

    def _known_entry(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: tuple[Any, ...], results: Any
    ) -> Entry | None:
        """The entry for this call of the followed path, or of another with the same beginning; else leave the path."""
        assert self.path is not None
        position, number = len(self._entries), len(self._geometries)
        geoms = flat_geometries(results)
        for path in self.paths.alternatives(self.path, self._entries, op):
            entry = path.entries[position]
            if entry.args != args or entry.kwargs != kwargs:
                continue
            if any(found.number != number for found in slots_in(entry.outputs)[:1]):
                continue  # an input of the same geometry was met earlier or later than there
            if path.geometries[number : number + len(geoms)] == geoms:
                if path is not self.path and path.geometries[:number] != self._geometries:
                    continue
                self.path = path
                return entry
        self.path = None
        self.left_at = position, user_frames.user_frame()  # once per trace, and only in a new one
        return None

    def _slots_for(self, results: Any) -> Any:
        if type(results) is Geometry:
            return self._new_slot(results)
        if type(results) is tuple:
            return tuple(self._slots_for(item) for item in results)
        return None

    def scalar_input(self, value: int | float) -> Any:
        """A number that is an input of the program at each run (such as a random seed)."""
        self.scalars.append(value)
        return scalar_slot(len(self.scalars) - 1, type(value))

    def base_slot(self, storage: LazyStorage) -> Slot:
        """The slot that holds the storage's current value in its base geometry; adds it as an input if need be."""
        if storage.epoch != self.epoch:
            if storage.poison is not None:
                raise storage.poison
            memory = memory_or_value(storage)
            if memory is None:
                raise RuntimeError(
                    "torchlazy: internal error: a lazy storage has neither memory nor a slot; please report this"
                )
            stays = storage.pinned and (type(storage) is not LentStorage or stays_lent(cast("Recorder", self), storage))
            if not stays and storage.base.device == LAZY and storage.base.compute != self.target:
                self._move_storage(storage)
                memory = storage.real
            number = self._new_slot(storage.base)
            # Nothing is called from here on, so that no interrupt can come.
            self.inputs += ((number, storage),)
            self.input_memory += (memory,)
            self.input_versions += (storage.version,)
            storage.slot = number
            storage.epoch = self.epoch
            storage.dirty = False
        assert storage.slot is not None
        return storage.slot

    def settle(self) -> None:
        """Run what was recorded on memory that is shared outside of the trace: the operator returns."""
        if self.is_overdue:
            self.cut("shared memory")

    def move_to_target(self, tensor: LazyTensor) -> None:
        """Move the tensor's memory to the current target: it may have been computed for another one."""
        storage = tensor._storage_
        is_lent(storage, self.target)
        if storage.base.device != LAZY or storage.pinned or storage.real is None:
            return
        if storage.base.compute != self.target:
            self._move_storage(storage)
        self._geometry_where_it_lies(tensor)

    @staticmethod
    def _geometry_where_it_lies(tensor: LazyTensor) -> Geometry:
        """The tensor's geometry, on the device that its memory has moved to if it has."""
        geom, compute = tensor._geometry, tensor._storage_.base.compute
        if geom.compute != compute:
            geom = geometry(geom.shape, geom.strides, geom.offset, geom.dtype, geom.device, compute, geom.bits)
            tensor._geometry = geom
        return geom

    def _move_storage(self, storage: LazyStorage) -> None:
        """The target changed since this storage was computed: copy it to the new one."""
        old = storage.base
        storage.base = geometry(old.shape, old.strides, old.offset, old.dtype, old.device, self.target)
        note_change(None)
        assert storage.real is not None
        moved = torch.empty_strided(old.shape, old.strides, dtype=old.dtype, device=self.target)
        storage.real = moved.copy_(storage.real)

    def read(self, tensor: LazyTensor) -> Slot:
        """The slot of a tensor's current value, regenerated from its storage if that was written to."""
        storage = tensor._storage_
        if tensor._epoch == self.epoch and tensor._seen == storage.version:
            return tensor._slot
        geom = tensor._geometry
        if geom.bits:
            return self.read(resolved(cast(Records, self), tensor))
        if storage.epoch == self.epoch and geom is storage.base:
            return storage.slot  # type: ignore[return-value]
        found = self.base_slot(storage)
        geom = self._geometry_where_it_lies(tensor)
        if geom is not storage.base:
            found = self._view_of_base(found, storage.base, geom)
        tensor._slot, tensor._epoch, tensor._seen = found, self.epoch, storage.version
        return found

    def _view_of_base(self, base_slot: Slot, base: Geometry, geom: Geometry) -> Slot:
        if geom.dtype != base.dtype:
            base_slot, base = as_dtype(self, base_slot, base, geom.dtype)
            if geom is base:
                return base_slot
        return self.append(_aten.as_strided.default, (base_slot, geom.shape, geom.strides, geom.offset), (), geom)

    def write(self, tensor: LazyTensor, value: Slot) -> None:
        """`tensor` now holds `value` (in its own geometry): rebind its storage."""
        storage = tensor._storage_
        geom = tensor._geometry
        if self._geometries[value.number] is not geom:
            value = self._fit(value, tensor, geom)
        base = storage.base
        if geom is base:
            new_base = value
        elif geom.numel == base.numel and geom.is_plain and base.is_plain and geom.dtype == base.dtype:
            new_base = self.append(_aten.view.default, (value, base.shape), (), base)
        elif geom.dtype != base.dtype:
            new_base = written_as_dtype(self, self.base_slot(storage), base, value, geom)
        else:
            old = self.base_slot(storage)
            new_base = self.append(
                _aten.as_strided_scatter.default, (old, value, geom.shape, geom.strides, geom.offset), (), base
            )
        if storage.epoch != self.epoch and storage.real is not None:
            # Written without being read: its memory is an input all the same, so that it can be donated.
            self.base_slot(storage)
        self.rebind(tensor, value, new_base)

    def rebind(self, tensor: LazyTensor, value: Slot, new_base: Slot) -> None:
        """`tensor` holds `value` from now on, and its storage `new_base`; both are recorded."""
        storage = tensor._storage_
        if storage.epoch != self.epoch or not storage.dirty:
            self._pending.append(weakref.ref(storage))
            storage.epoch = self.epoch
            storage.dirty = True
        storage.slot = new_base
        storage.version += 1
        if self.written_values is not None:
            self.written_values.append((len(self._entries), weakref.ref(storage), new_base))
        if _is_grad_enabled():
            writes_with_grad[0] += 1
        tensor._slot, tensor._epoch, tensor._seen = value, self.epoch, storage.version

    def _fit(self, value: Slot, tensor: LazyTensor, geom: Geometry) -> Slot:
        """`value` broadcast, cast and laid out as `geom`, as `copy_` would."""
        have = self._geometries[value.number]
        if have.meta == geom.meta:
            return value
        return self.append(_aten.copy.default, (self.read(tensor), value), (), geom)

    def new_tensor(self, value: Slot, geom: Geometry) -> LazyTensor:
        """A tensor with a storage of its own that holds `value`."""
        storage = LazyStorage()
        storage.base, storage.slot, storage.epoch, storage.version = base_of(geom), value, self.epoch, 0
        storage.dirty = True
        self._pending.append(weakref.ref(storage))
        return wrap(storage, storage.base, value, self.epoch)

    def new_real_tensor(self, real: torch.Tensor, device: torch.device) -> LazyTensor:
        """A lazy tensor whose storage is the memory of `real`, which must not be referenced elsewhere."""
        storage = storage_over(real, device)
        geom = storage.base if storage.real is real else geometry_like(real, device, storage.base.compute)
        return wrap(storage, geom, None, -1)

    def storage_of_plain(self, tensor: torch.Tensor) -> LazyStorage:
        """Under `lazy_mode`: the lazy storage that stands for an ordinary tensor's memory."""
        memory = tensor.untyped_storage()
        found = self._registry.get(memory._cdata)
        if found is None:
            device = tensor.device
            was_busy, self.busy = self.busy, True  # under lazy_mode both were recorded: tensors without memory
            try:
                # Not a detached view: a cut's write would raise the tensor's version once more.
                whole = without_bits(tensor.data)
                geom = geometry_like(whole, device, str(device))
                nbytes = memory.nbytes()
                if geom.offset or geom.span * tensor.element_size() != nbytes or geom.numel != geom.span:
                    count = nbytes // tensor.element_size()
                    geom = flat(count, tensor.dtype, device, str(device))
                    whole = whole.as_strided((count,), (1,), 0)
                if whole.is_inference():  # programs write outside of inference mode
                    whole = _without_inference(whole)
            finally:
                self.busy = was_busy
            found = storage_of(geom, whole, pinned=True)
            self._registry[memory._cdata] = found
            self.shared.add_if_foreign(found, tensor)
        self._held[memory._cdata] = found
        return found

    def let_go(self) -> None:
        """Where nothing is recorded: stop keeping the storages of a replay's ordinary tensors alive."""
        if not self.entries and not self.inputs:
            self._held.clear()

    def is_in_trace(self, tensor: torch.Tensor) -> bool:
        """Whether an ordinary tensor's memory is read or written by what is recorded."""
        found = self._registry.get(tensor.untyped_storage()._cdata)
        return found is not None and found.epoch == self.epoch

    def memory_changes(self, tensor: torch.Tensor) -> None:
        """An ordinary tensor's memory may have another size or address: update the storage that stands for it."""
        memory = tensor.untyped_storage()
        found = self._registry.get(memory._cdata)
        if found is None or found.base.nbytes == memory.nbytes():
            return
        count = memory.nbytes() // found.base.dtype.itemsize
        found.base = flat(count, found.base.dtype, found.base.device, found.base.compute)
        assert found.real is not None
        found.real = found.real.as_strided((count,), (1,), 0)
        found.version += 1
        note_change(None)

    def view_of_plain(self, tensor: torch.Tensor, storage: LazyStorage) -> LazyTensor:
        """The lazy twin of an ordinary tensor: the same geometry over the same storage."""
        geom = geometry_like(tensor, tensor.device, str(tensor.device))
        return wrap_view(tensor, storage, geom, None, -1)

    def _snapshot(self, live: list[LazyStorage]) -> tuple[CutTrace, list[torch.Tensor], list[Any]]:
        # A path that was followed to its end is mostly cut as it was last time.
        writes = self._writes_to(live)
        path = self.path if not self._frames and not writes else None
        whole = path is not None and len(self._entries) == len(path.entries) and self.left_at is None
        known = path.cut if whole and path is not None else None
        if known is not None and known.matches(live, self.inputs, self.scalars, len(self._geometries)):
            return known.trace, self.input_memory, self.scalars
        position_of = {id(storage): i for i, (_, storage) in enumerate(self.inputs)}
        donations = tuple(
            (out, position_of[id(storage)]) for out, storage in enumerate(live) if id(storage) in position_of
        )
        inputs = tuple((number, storage.base) for number, storage in self.inputs)
        kinds = tuple(type(value) for value in self.scalars)
        outputs = tuple((storage.slot, storage.base) for storage in live)
        trace = CutTrace(
            tuple(self._entries),
            tuple(self._geometries),
            inputs,
            kinds,
            outputs,  # type: ignore[arg-type]
            donations,
            tuple(self._frames),
            self.left_at,
            writes=writes,
        )
        if whole and path is not None:
            path.cut = KnownCut(trace)
        return trace, self.input_memory, self.scalars

    def _writes_to(self, live: list[LazyStorage]) -> tuple[tuple[int, int, Slot], ...]:
        if not self.written_values:
            return ()
        position_of = {id(storage): i for i, storage in enumerate(live)}
        found = [(count, position_of.get(id(ref())), value) for count, ref, value in self.written_values]
        return tuple((count, output, value) for count, output, value in found if output is not None)

    def live_storages(self) -> int:
        """Storages with a pending value that are still referenced."""
        return sum(1 for ref in self._written if ref() is not None)


def storage_over(real: torch.Tensor, device: torch.device) -> LazyStorage:
    """A storage, claimed to be on `device`, over the memory of `real`, which must not be referenced elsewhere."""
    geom = geometry_like(real, device, str(real.device))
    nbytes = real.untyped_storage().nbytes()
    if not geom.offset and geom.nbytes == nbytes:
        return storage_of(geom, real)
    count = nbytes // real.element_size()
    return storage_of(flat(count, real.dtype, device, geom.compute), real.as_strided((count,), (1,), 0))


def _without_inference(real: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that may be written everywhere."""
    with torch.inference_mode(False):
        whole = torch.empty(0, dtype=real.dtype, device=real.device)
        return whole.set_(real.untyped_storage(), real.storage_offset(), real.shape, real.stride())


def flat_geometries(results: Any) -> list[Geometry]:
    """The geometries of an operator's results, in order."""
    if type(results) is Geometry:
        return [results]
    if type(results) is tuple:
        return [geom for item in results for geom in flat_geometries(item)]
    return []

"""Following a known trace: what an operator needs when it comes again at the same place, learned the first time.

The recorder's general way handles an operator at a place of a path once and leaves a `PathStep` there. From then on
the operator costs a comparison with that step, and the objects that it makes: nothing is inferred or encoded.

Invariant: a step makes the very entry, slots, geometries and objects that the general way would make there. Whatever
does not compare equal goes the general way, which repeats the same reads and so arrives at the same slots.
"""

from __future__ import annotations

from _thread import get_ident as _get_ident
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.record.follow.compiled_step import compiled_step_to
from torchlazy.lazy.record.follow.native import NativeSteps, idle_record_of
from torchlazy.lazy.record.follow.path import (
    NEW,
    NEW_MANY,
    VIEW,
    VIEW_MANY,
    WRITE,
    WRITE_LIST,
    ArgumentWrite,
    CallScalar,
    Path,
    Paths,
    PathStart,
    PathStep,
    Unread,
    are_distinct,
    same_constants,
)
from torchlazy.lazy.record.running_trace import RunningTrace, flat_geometries
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, is_inference_mode, make_tensor, making, unknown, wrap_view
from torchlazy.lazy.torch_private.settings import draw_seed
from torchlazy.lazy.trace import user_frames
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.op_schema import OpPlan
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import ScalarSlot, Slot, slots_in
from torchlazy.runtime.native import compiled_step

if TYPE_CHECKING:
    from torchlazy.lazy.compiled.capture.session import Capture

NO_MATCH = object()  # what `follow` returns where the call differs from last time's
UNVARYING = frozenset({float("inf"), float("-inf")})
# Entries that one operator may append beside its own; this close to the limit the general way checks the length.
MARGIN = 8
_JOINED_AT_ONCE = 96  # known steps, once there is a native function: all 375 of a small GPT took 18 ms in one step
_MOST_IDLE = 8  # views that record nothing, at one place of a path
_NOT_GIVEN = object()
_UNREAD = Unread(None)


class Follower(RunningTrace):
    """A running trace that follows a path by the steps learned there."""

    capture: Capture | None
    cut: Callable[[str], None]
    plan: Callable[[torch._ops.OpOverload], OpPlan]
    detaching: Callable[..., Any]  # what torch calls for a detach
    learning_composite = False  # inside a composite call, which is learned as one step: not its parts
    _native: NativeSteps | None = None
    _to_join: Iterator[tuple[Path, int]] | None = None  # steps, once there is a native function

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, int] = {}  # by thread: the last seed that a compiled step drew
        self.seeds_at_hand: list[int] = []  # drawn already for the call that is being recorded

    @property
    def native_steps(self) -> NativeSteps:
        """The native steps; while their function is being compiled, steps are joined later."""
        if self._native is None:
            self._native = NativeSteps(self, self.detaching)
            self.detaching = self._native.detach
        return self._native

    def _start_trace(self) -> None:
        super()._start_trace()
        if self._to_join is not None or (self._native is not None and self._native.is_coming):
            self.use_native_steps(_JOINED_AT_ONCE)

    def use_native_steps(self, at_most: int | None = None) -> None:
        """Use native steps from now on, if their function has been compiled since; the lock is held. Of the steps known
        by then at most so many are joined at once, the others with the traces to come."""
        if self._native is not None and self._native.is_coming and not compiled_step.is_coming():
            self._native = None  # and made again by `native_steps`
            self._to_join = iter([(path, at) for path in self.paths for at, step in enumerate(path.steps) if step])
        if self._to_join is not None:
            now = list(islice(self._to_join, at_most))
            for path, position in now:
                self._join(path, position)
            if len(now) != at_most:
                self._to_join = None

    def forget_paths(self, cause: str = "sync") -> None:
        """Cut for this cause and forget all paths; whether there is a native function is tested again."""
        with self.lock:
            self.cut(cause)
            self.paths, self._to_join = Paths(), None
            if self._native is not None:
                self.detaching, self._native = self._native.general_detach, None
            self._start_trace()

    def follow(self, path: Path, step: PathStep, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """Record the operator of `step` and return its result, or `NO_MATCH`. Torch calls operators with few, flat
        arguments: they are compared here, lists and numbers by `_matches`."""
        epoch, position, wanted = self.epoch, len(self._entries), step.args
        if len(args) != len(wanted) or step.reads:
            return NO_MATCH
        for given, want in zip(args, wanted):  # the lengths are equal
            if type(given) is LazyTensor:
                # A tensor over its whole memory has its storage's value, which is faster to read (`__slots__`).
                storage = given._storage_
                if storage.slot is want and storage.epoch == epoch and given._geometry is storage.base:
                    continue
                if type(want) is Unread:
                    if want.geometry is not None and given._geometry is not want.geometry:
                        return NO_MATCH
                # Only where the entry has a tensor: reading may add an input, which the general way would not do.
                elif type(want) is not Slot or self.read(given) is not want:
                    return NO_MATCH
            elif given is not want and not self._matches(given, want, step.plan):
                return NO_MATCH
        if (kwargs or step.named) and not self._matches_named(kwargs or {}, step):
            return NO_MATCH
        geometries = self._geometries
        if self.path is not path or len(self._entries) != position or len(geometries) != step.number:
            return NO_MATCH  # an input of the same geometry was met earlier or later than there
        if step.compute is not None and step.compute != self.target:
            return NO_MATCH
        kind = step.kind
        if step.is_whole:
            return self._follow_whole(step, args, kwargs)
        if kind == NEW:
            if self._keep_frames:
                self._frames.append(user_frames.user_frame())
            geometries.append(step.results)
            self._entries.append(step.entry)
            self.counted += 1
            # `new_tensor` and `wrap` by hand: their calls would be a tenth of the operator's time.
            base = step.base
            storage = LazyStorage()
            storage.base, storage.slot, storage.epoch = base, step.outputs, epoch  # type: ignore[assignment]
            storage.version, storage.dirty = 0, True
            self._pending.append(ref(storage))
            tensor: LazyTensor = make_tensor(*step.making)
            tensor.__dict__ = unknown()
            tensor._storage_ = storage
            tensor._geometry = base  # type: ignore[assignment]
            return tensor
        first = args[0]
        if kind == VIEW:
            if first._geometry is not step.source:
                return NO_MATCH
            if self._keep_frames:
                self._frames.append(user_frames.user_frame())
            geometries.append(step.results)
            self._entries.append(step.entry)
            self.counted += 1
            if is_inference_mode() or first.is_inference():
                return wrap_view(first, first._storage_, step.results, step.outputs, epoch)
            tensor = make_tensor(*step.making)
            tensor.__dict__ = unknown()
            tensor._storage_ = storage = first._storage_
            tensor._geometry = step.results
            tensor._slot = step.outputs
            tensor._epoch = epoch
            tensor._seen = storage.version
            return tensor
        if kind == WRITE:
            storage = first._storage_
            if first._geometry is not step.source or self._meets(storage, args):
                return NO_MATCH
            geometries.append(step.results)
            self._append_entries(step)
            self.write(first, step.outputs)
            return first
        if kind == VIEW_MANY and first._geometry is not step.source:
            return NO_MATCH
        geometries.extend(step.flat)
        self._append_entries(step)
        if kind == VIEW_MANY:
            return self.wrap_views(step.outputs, step.results, first)
        if kind == NEW_MANY:
            return self.wrap_new(step.outputs, step.results)
        for item, value in zip(first, step.outputs, strict=True):
            self.write(item, value)
        if step.plan.is_list_write:
            torch.autograd.graph.increment_version(first)
        return None

    def _append_entries(self, step: PathStep) -> None:
        if self._keep_frames:
            self._frames += [user_frames.user_frame()] * len(step.entries)
        self._entries += step.entries
        self.counted += len(step.entries)

    def _follow_whole(self, step: PathStep, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """`follow` for a composite call: several entries, or writes to arguments beside its results."""
        if step.writes and not self._writes_as_before(step.writes, args, kwargs):
            return NO_MATCH
        if step.numbers and not self.enter_numbers(step.numbers):  # the lock is held: no other thread interferes
            return NO_MATCH
        self._geometries += step.flat
        self._append_entries(step)
        result = args[0] if step.kind == WRITE else None
        if step.kind in (NEW, NEW_MANY):
            result = self.wrap_new(step.outputs, step.results)
        for write in step.writes:  # last, as handlers do: a trace's outputs are in this order
            self.rebind(write.target(args), write.value, write.whole)
        if step.plan.is_list_write:
            torch.autograd.graph.increment_version(args[0])
        return result

    def _writes_as_before(
        self, writes: Sequence[ArgumentWrite], args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> bool:
        """Whether the written arguments are the same views of as many storages, which no other argument refers to."""
        if self.written_values is not None:  # it has the trace's length at each write
            return False
        written, alike = set(), 0
        for write in writes:
            target = write.target(args)
            storage, window = target._storage_, write.window
            if storage.epoch != self.epoch or target._geometry is not (storage.base if window is None else window):
                return False
            if window is not None and (storage.base is not write.base or storage.slot is not write.before):
                return False
            others = [args[position] for position in write.alike]
            if any(other._storage_ is not storage or other._geometry is not target._geometry for other in others):
                return False
            written.add(id(storage))
            alike += len(others)
        on_them = 0
        for given in (*args, *(kwargs or {}).values()):
            for item in given if type(given) is list else (given,):
                on_them += type(item) is LazyTensor and id(item._storage_) in written
        return len(written) == len(writes) == on_them - alike

    def enter_numbers(self, numbers: Sequence[CallScalar]) -> bool | None:
        """Add a call's numbers to the scalars; whether that is done. None: it is not, and no seed was drawn."""
        scalars, known = self.scalars, self._scalar_numbers
        if self.capture is not None or config.rng == "eager":
            return None
        count = len(scalars)
        for wanted, place, _ in numbers:
            found = None if place is None else known.get(place)
            if wanted.number != (count if found is None else found):
                return None
            count += found is None
        for wanted, place, value in numbers:
            if place is None:
                value = self._drawn[_get_ident()] = draw_seed(None)
            elif place in known:
                continue
            else:
                known[place] = wanted.number
            scalars.append(value)
        return self.scalars is scalars and len(scalars) == count

    def general_drawn(self, cls: Any, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """`general`, where a compiled step drew the call's seed before another thread changed the trace: it is used."""
        with self.lock:
            self.seeds_at_hand.append(self._drawn[_get_ident()])
            try:
                return self.general(cls, op, types, args, kwargs)
            finally:
                self.seeds_at_hand.clear()

    def draw_seed(self, generator: torch.Generator | None) -> int:
        """A seed for the call that is being recorded."""
        if generator is None and self.seeds_at_hand:
            return self.seeds_at_hand.pop()
        return draw_seed(generator)

    @staticmethod
    def _meets(storage: LazyStorage, args: Sequence[Any]) -> bool:
        """Another argument refers to the written memory: whether the two overlap is left to the general way."""
        return any(type(given) is LazyTensor and given._storage_ is storage for given in args[1:])

    def _matches(self, given: Any, want: Any, plan: OpPlan) -> bool:
        """Whether an argument is the one that the step has, tensors within lists included."""
        if given is want:
            return True
        kind = type(want)
        if kind is Slot:
            return type(given) is LazyTensor and self.read(given) is want
        if kind is tuple:
            if not isinstance(given, (list, tuple)) or len(given) != len(want):
                return False
            epoch = self.epoch
            for item, wanted in zip(given, want):  # the lengths are equal
                if type(item) is LazyTensor:
                    storage = item._storage_
                    if storage.slot is wanted and storage.epoch == epoch and item._geometry is storage.base:
                        continue
                    if type(wanted) is not Slot or self.read(item) is not wanted:
                        return False
                elif item is not wanted and not self._matches(item, wanted, plan):
                    return False
            return True
        if kind is ScalarSlot:
            return type(given) is float and self.is_scalar(given, want, plan)
        return same_constants(given, want)

    def _matches_named(self, kwargs: dict[str, Any], step: PathStep) -> bool:
        return len(kwargs) == len(step.named) and all(
            self._matches(kwargs.get(name, _NOT_GIVEN), want, step.plan) for name, want in step.named
        )

    def is_scalar(self, value: float, want: ScalarSlot, plan: OpPlan) -> bool:
        """Whether a varying number is, or now becomes, the scalar `want`."""
        if self.capture is not None or value != value or value in UNVARYING:
            return False
        place = (plan, value.hex())
        number = self._scalar_numbers.get(place)
        if number is not None:
            return number == want.number
        if want.number != len(self.scalars):
            return False
        self._scalar_numbers[place] = want.number
        self.scalars.append(value)
        return True

    def learn(self, kind: int, plan: OpPlan, results: Any, source: Geometry | None = None) -> None:
        """The entry recorded last is one of the followed path: leave a step for the next time."""
        path, position = self.path, len(self._entries) - 1
        assert path is not None
        known = path.steps[position]
        if (
            (known is not None and known.plan is plan)
            or self.learning_composite
            or position >= config.max_trace_length - MARGIN
        ):
            return
        entry = path.entries[position]
        if entry is self._entries[position] and slots_in(entry.outputs):
            if kind == WRITE_LIST and (plan.op._schema.returns or any(type(o) is not Slot for o in entry.outputs)):
                return
            if kind == WRITE_LIST and not are_distinct(entry.args):
                return
            step = PathStep(kind, plan, entry, results, flat_geometries(results), source, position, self.general)
            made = results if kind == VIEW else step.base if kind == NEW else None
            if made is not None:
                step.making = making(made)
            self.enter_step(path, step)

    def learn_idle(self, plan: OpPlan, source: LazyTensor, args: tuple[Any, ...], named: tuple[Any, ...]) -> None:
        """A view equal to its source recorded nothing, and will record nothing when it comes here again."""
        path = self.path
        if (
            path is None
            or self.capture is not None
            or named
            or self.learning_composite
            or source._geometry.device != LAZY
        ):
            return
        place = self.place_before(path, len(self._entries))
        if place is None or self.native_steps.walk is None or len(place.idle or ()) >= _MOST_IDLE:
            return
        record = idle_record_of(plan.op, args, source._geometry)
        if record is not None and record not in (place.idle or ()):
            place.idle = (*(place.idle or ()), record)
            place.following = self.native_steps.walk

    def enter_step(self, path: Path, step: PathStep) -> None:
        """Add this step to the path, joined to those before and after it."""
        first = step.position - len(step.entries) + 1
        path.steps[first] = path.places[step.position] = step
        self._join(path, first)
        self._join(path, step.position + 1)

    def place_before(self, path: Path, position: int) -> PathStep | PathStart | None:
        """The place on the path before its entry at `position`, if that is known."""
        if position:
            return path.places[position - 1]
        if path.start is None:
            path.start = PathStart(self.general)
        return path.start

    def _join(self, path: Path, position: int) -> None:
        """Set the compiled step from the place before to the step at `position`, if there can be one."""
        before, step = self.place_before(path, position), path.steps[position]
        if before is not None and step is not None:
            before.following = compiled_step_to(self, before, step, path.geometries) or self.general
            if before.idle is not None:
                before.following = self.native_steps.walk

    def leave_unread(self, plan: OpPlan, *positions: int) -> None:
        """The entry of the call just recorded leaves out the tensors at these positions: its step accepts any there."""
        step = self.path.steps[len(self._entries) - 1] if self.path is not None and self._entries else None
        if step is not None and step.plan is plan and step.entry is self._entries[-1]:
            step.args = tuple(_UNREAD if i in positions else argument for i, argument in enumerate(step.args))
            assert self.path is not None
            self._join(self.path, step.position)

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
        self.counted += 1
        storage, geom = source._storage_, source._geometry
        if is_inference_mode() or source.is_inference():
            twin = wrap_view(source, storage, geom, source._slot, source._epoch)
            twin._seen = source._seen
            return twin
        twin = make_tensor(*(geom.making or making(geom)))
        twin.__dict__ = unknown()
        twin._storage_ = storage
        twin._geometry = geom
        if geom is storage.base:  # the storage knows its value
            return twin
        twin._slot = source._slot
        twin._epoch = source._epoch
        twin._seen = source._seen
        return twin

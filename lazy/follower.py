"""Following a known trace: what an operator needs when it comes again at the same place, learned the first time.

The recorder's general way serves an operator at a place of a path once and leaves a `Step` there. From then on the
operator costs a comparison with that step, and the objects that it makes: nothing is looked up, inferred or encoded.

Invariant: a step makes the very entry, slots, geometries and objects that the general way would make there. Whatever
does not compare equal goes the general way, which repeats the same reads and so comes to the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torchlazy.lazy import frames
from torchlazy.lazy.config import config
from torchlazy.lazy.follow import (
    NEW,
    NEW_MANY,
    VIEW,
    VIEW_MANY,
    WRITE,
    WRITE_LIST,
    Path,
    Paths,
    Standing,
    Step,
    are_apart,
    same_constants,
)
from torchlazy.lazy.geometry import Geometry
from torchlazy.lazy.native_steps import NativeSteps
from torchlazy.lazy.op_plan import OpPlan
from torchlazy.lazy.running_trace import RunningTrace, flat_geometries
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.tensor import LazyTensor, is_inference_mode, make_tensor, making, unknown, wrap_view
from torchlazy.lazy.trace import ScalarSlot, Slot, slots_in
from torchlazy.lazy.walk import walk_to

if TYPE_CHECKING:
    from torchlazy.lazy.capture import Capture

LEFT = object()  # what `follow` returns where the operator is another call than last time
UNVARYING = frozenset({float("inf"), float("-inf")})
# Entries that one operator may append beside its own; so near to the limit the general way watches the length.
_MARGIN = 8
_NOT_GIVEN = object()
UNREAD = object()  # stands in a step for a tensor that the operator is given and leaves unread


class Follower(RunningTrace):
    """A running trace that walks along a path by the steps learned there."""

    capture: Capture | None
    cut: Callable[[str], None]
    detaching: Callable[..., Any]  # what torch calls for a detach
    _native: NativeSteps | None = None

    @property
    def native_steps(self) -> NativeSteps:
        """The native walk, which is compiled when the first step is learned."""
        if self._native is None:
            self._native = NativeSteps(self, self.detaching)
            self.detaching = self._native.detach
        return self._native

    def forget_paths(self, cause: str = "sync") -> None:
        """Cut for this cause and follow nothing recorded so far; whether there is a native walk is asked anew."""
        with self.lock:
            self.cut(cause)
            self.paths = Paths()
            if self._native is not None:
                self.detaching, self._native = self._native.general_detach, None
            self._start_trace()

    def follow(self, path: Path, step: Step, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """Record the operator of `step` and return its result, or LEFT. Torch calls operators with few, flat arguments:
        they are compared here, lists and numbers by `_matches`."""
        epoch, position, wanted = self.epoch, len(self._entries), step.args
        if len(args) != len(wanted):
            return LEFT
        for given, want in zip(args, wanted):  # the lengths are equal
            if type(given) is LazyTensor:
                # A tensor over its whole memory holds what the storage holds, which has slots of Python's own kind.
                storage = given._storage_
                if storage.slot is want and storage.epoch == epoch and given._geometry is storage.base:
                    continue
                # Only where the entry has a tensor: reading may enter an input, which the general way would not do.
                if want is not UNREAD and (type(want) is not Slot or self.read(given) is not want):
                    return LEFT
            elif given is not want and not self._matches(given, want, step.plan):
                return LEFT
        if (kwargs or step.named) and not self._matches_named(kwargs or {}, step):
            return LEFT
        geometries = self._geometries
        if self.path is not path or len(self._entries) != position or len(geometries) != step.number:
            return LEFT  # an input of the same geometry was met earlier or later than there
        kind = step.kind
        if kind == NEW:
            if self._keep_frames:
                self._frames.append(frames.user_frame())
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
                return LEFT
            if self._keep_frames:
                self._frames.append(frames.user_frame())
            geometries.append(step.results)
            self._entries.append(step.entry)
            self.counted += 1
            if is_inference_mode():
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
                return LEFT
            geometries.append(step.results)
            self._walk(step)
            self.write(first, step.outputs)
            return first
        if kind == VIEW_MANY and first._geometry is not step.source:
            return LEFT
        geometries.extend(step.flat)
        self._walk(step)
        if kind == VIEW_MANY:
            return self.wrap_views(step.outputs, step.results, first)
        if kind == NEW_MANY:
            return self.wrap_new(step.outputs, step.results)
        for item, value in zip(first, step.outputs, strict=True):
            self.write(item, value)
        return None

    def _walk(self, step: Step) -> None:
        if self._keep_frames:
            self._frames.append(frames.user_frame())
        self._entries.append(step.entry)
        self.counted += 1

    @staticmethod
    def _meets(storage: LazyStorage, args: Sequence[Any]) -> bool:
        """Another argument is on the written memory: whether the two overlap is for the general way to say."""
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

    def _matches_named(self, kwargs: dict[str, Any], step: Step) -> bool:
        return len(kwargs) == len(step.named) and all(
            self._matches(kwargs.get(name, _NOT_GIVEN), want, step.plan) for name, want in step.named
        )

    def is_scalar(self, value: float, want: ScalarSlot, plan: OpPlan) -> bool:
        """Whether a varying number gets the number `want` among the scalars, which it then has."""
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
        if (known is not None and known.plan is plan) or position >= config.max_trace_length - _MARGIN:
            return
        entry = path.entries[position]
        if entry is self._entries[position] and slots_in(entry.outputs):
            if kind == WRITE_LIST and (plan.op._schema.returns or any(type(o) is not Slot for o in entry.outputs)):
                return
            if kind == WRITE_LIST and not are_apart(entry.args):
                return
            flat = flat_geometries(results)
            if flat and any(type(value) is torch.device and value != flat[0].device for _, value in entry.kwargs):
                return  # made on "lazy"; the entry has the device behind it, on which `lazy_mode` makes the same entry
            step = Step(kind, plan, entry, results, flat, source, position, self.general)
            made = results if kind == VIEW else step.base if kind == NEW else None
            if made is not None:
                step.making = making(made)
            path.steps[position] = step
            self._join(path, position)
            self._join(path, position + 1)

    def _join(self, path: Path, position: int) -> None:
        """Let the trace walk to the step at `position` from the one before, if it can."""
        before: Step | Standing | None = path.steps[position - 1] if position else path.start
        if position == 0 and before is None:
            before = path.start = Standing(self.general)
        step = path.steps[position]
        if before is not None and step is not None:
            before.following = walk_to(self, before, step, path.geometries) or self.general

    def leave_unread(self, plan: OpPlan, *positions: int) -> None:
        """The call just recorded was given tensors at these positions that its entry leaves out; it will be again."""
        step = self.path.steps[len(self._entries) - 1] if self.path is not None and self._entries else None
        if step is not None and step.plan is plan and step.entry is self._entries[-1]:
            step.args = tuple(UNREAD if i in positions else argument for i, argument in enumerate(step.args))
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
        """Windows on the memory of `source`, in the structure of `outputs`."""
        if type(outputs) is Slot:
            return wrap_view(source, source._storage_, results, outputs, self.epoch)
        return [self.wrap_views(o, r, source) for o, r in zip(outputs, results, strict=True)]

    def twin(self, source: LazyTensor) -> LazyTensor:
        """`detach` and its like: the same window on the same storage; nothing is recorded."""
        self.counted += 1
        storage, geom = source._storage_, source._geometry
        if is_inference_mode():
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

"""Guards of tensors: facts that may change while a tensor stays the same object, and tensors whose memory moves.

The facts are geometry, memory, requires_grad, hooks and gradients. Moving tensors are those whose memory calls replace
(`p.data = q` in sharpness-aware minimisation): a captured call treats their memory like an argument, of which geometry
and aliasing matter.

Invariant: tensors that are found unchanged have the geometry, the size of memory and the aliasing that they had when
the guards were made. Lazy tensors are compared one by one only where one of them may have changed, which is counted as
it happens (record/tensor.py); changes of ordinary tensors are not counted, so that these are compared each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torchlazy.lazy.compiled.guards.reached import Reached
from torchlazy.lazy.record.tensor import LazyTensor, changed_lately, changes, writes_with_grad
from torchlazy.lazy.torch_private.dispatch import any_requires_grad, without_torch_function
from torchlazy.lazy.torch_private.distributed import how_distributed, is_distributed, part_of
from torchlazy.lazy.trace.geometry import has_memory, is_dense
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.runtime.native.identity_check import IdentityCheck


def memory_of(tensor: torch.Tensor) -> int:
    """The identity of the tensor's memory."""
    if isinstance(tensor, LazyTensor):
        return id(tensor._storage_)
    return int(tensor.untyped_storage()._cdata) if has_memory(tensor) else id(tensor)


def moving_in(reached: Reached, names: frozenset[str]) -> list[tuple[torch.Tensor, str]]:
    """The tensors of these names that `MovingTensors` can guard by their facts."""
    found = [(tensor, name) for tensor, name in reached.tensors.values() if name in names] if names else []
    return [(x, name) for x, name in found if isinstance(x, LazyTensor) or (is_dense(x) and x.dim())]


class MovingTensors:
    """Tensors of the state whose memory calls replace, in order."""

    def __init__(self, found: Sequence[tuple[torch.Tensor, str]], others: Sequence[torch.Tensor]) -> None:
        """`others`: all other tensors that are reached; their memory stays."""
        self.tensors = [tensor for tensor, _ in found]
        self.names = frozenset(name for _, name in found)
        self.ids = frozenset(map(id, self.tensors))
        self._names = [name for _, name in found]
        self._fixed: dict[int, int] = {}
        for tensor in others:
            self._fixed.setdefault(memory_of(tensor), len(self._fixed))
            self._fixed[-id(tensor)] = len(self._fixed)
        self._then = self._facts()

    def memories(self) -> dict[int, int]:
        """All memories by identity, numbered; tensors themselves by the negative of their identities."""
        if not self.tensors:
            return self._fixed
        found = dict(self._fixed)
        for tensor in self.tensors:
            found.setdefault(memory_of(tensor), len(found))
            found[-id(tensor)] = len(found)
        return found

    def hold(self) -> bool:
        """Whether they are as they were."""
        return not self.tensors or self._facts() == self._then

    def broken(self) -> list[tuple[str, Any, Any]]:
        """Those that are not: (name, fact then, fact now)."""
        rows = zip(self._names, self._then, self._facts(), strict=True)
        return [(name, then, now) for name, then, now in rows if then != now]

    def _facts(self) -> list[Any]:
        numbers = self.memories()
        return [(*_form(tensor), numbers[memory_of(tensor)]) for tensor in self.tensors]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = (tensor.requires_grad, tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    if isinstance(tensor, LazyTensor):
        return (tensor._geometry, tensor._storage_.base, *flags)
    if not is_dense(tensor):
        return (tensor.layout, tensor.shape, *flags)
    place = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
    return (*place, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg(), *flags)


_lazy_facts = attrgetter("_storage_", "_geometry", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_plain_facts = attrgetter("shape", "dtype", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_other_facts = attrgetter("dtype", "requires_grad", "layout", "_backward_hooks", "_post_accumulate_grad_hooks")
_base = attrgetter("_storage_.base")
_grad = attrgetter("grad")
_geometry, _storage, _base_of = attrgetter("_geometry"), attrgetter("_storage_"), attrgetter("base")
_stride, _address = torch.Tensor.stride, torch.Tensor.data_ptr
_NONE = frozenset({None})


class TensorGuards:
    """What was true of the tensors that a call reaches when this was made."""

    def __init__(self, reached: Reached, moving: frozenset[str] = frozenset()) -> None:
        """`moving`: names of tensors whose memory calls replace."""
        found = list(reached.tensors.values())
        self.moving = moving_tensors(reached, moving)
        stays = [(t, name) for t, name in found if id(t) not in self.moving.ids]
        lazy = [(t, name) for t, name in stays if isinstance(t, LazyTensor)]
        # Host tensors of one number (step counts) are read at each call; they share their memory with no other.
        plain = [(t, name) for t, name in stays if not isinstance(t, LazyTensor) and (t.dim() or t.requires_grad)]
        self.lazy = _TensorFacts(lazy, (_lazy_facts, _base))
        self.plain = _TensorFacts([(t, n) for t, n in plain if is_dense(t)], (_plain_facts, _address, _stride))
        self.others = _TensorFacts([(t, n) for t, n in plain if not is_dense(t)], (_other_facts, _place))
        self._has_no_others = not self.others.tensors and not self.moving.tensors
        self.constants = [t for t, _ in lazy if not t.requires_grad]
        self.plain_constants = [t for t, _ in found if not isinstance(t, LazyTensor) and not t.requires_grad]
        self._lazy_ids = frozenset(id(t) for t, _ in lazy)
        self._changes, self._writes = changes[0], writes_with_grad[0]
        # A frozen parameter may have a gradient, or get one, which its optimizer reads.
        leaves = [(t, name) for t, name in found if t.is_leaf and (t.requires_grad or _may_have_gradient(t))]
        self.leaves = [t for t, _ in leaves]
        self._leaf_names = [name for _, name in leaves]
        self.kept_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # that must stay the very same objects
        self._grads: list[Any] | None = self._facts_of_grads()
        self._without_grad = [leaf for leaf in self.leaves if leaf.grad is None]
        self._with_grad = [leaf for leaf in self.leaves if leaf.grad is not None]
        # Lazy gradients, each on memory of its own, are compared in a few passes.
        self._lazy_grads = self._lazy_facts_of_grads()

    @property
    def memories(self) -> dict[int, int]:
        """The memories of the tensors that were reached, by identity, numbered."""
        return self.moving.memories()

    @property
    def watches_gradients(self) -> bool:
        return self._grads is not None

    def ignore_gradients(self) -> None:
        """The call neither read nor set a gradient of what it reached."""
        self._grads = None

    def holds(self) -> bool:
        """Whether all of it is still true."""
        with without_torch_function():  # its overhead for each attribute of each tensor is half of the time
            return (
                not any_requires_grad(self.plain_constants)
                and self.plain.holds()
                and (self._grads is None or _NONE.issuperset(map(_grad, self._without_grad)))
                and self.rest_holds()
            )

    def enter(self, check: IdentityCheck) -> None:
        """Add rows for the ordinary tensors, and for gradients that are None."""
        without_grad = self._without_grad if self._grads is not None else []
        if not check.reads_tensors:
            for tensor in self.plain_constants:
                check.attribute(tensor, "requires_grad", False)
            for tensor in without_grad:
                check.attribute(tensor, "grad", None)
            return
        for tensor in self.plain.tensors:
            check.geometry(tensor)
        bare = {id(tensor) for tensor in without_grad}
        for tensor in without_grad:
            check.gradient(tensor, present=True)
        for tensor in (*self.plain_constants, *self.plain.tensors):
            if id(tensor) not in bare:
                check.gradient(tensor)
                bare.add(id(tensor))

    def left_by(self, check: IdentityCheck) -> bool:
        """Whether ordinary tensors could not be added."""
        return bool(not check.reads_tensors and self.plain.tensors)

    def left_holds(self, check: IdentityCheck) -> bool:
        """Whether these are as they were."""
        with without_torch_function():
            return not self.left_by(check) or self.plain.holds()

    def rest_holds(self) -> bool:
        """What no native pass compares."""
        return (
            (writes_with_grad[0] == self._writes or self._constants_hold())
            and (changes[0] == self._changes or self._lazy_as_it_was())
            and (self._has_no_others or self._others_hold())
            and (self._grads is None or not self._with_grad or self._grads_hold())
            and (not self.kept_gradients or all([owner.grad is found for owner, found in self.kept_gradients]))
        )

    def _others_hold(self) -> bool:
        with without_torch_function():
            return self.others.holds() and self.moving.hold()

    def _constants_hold(self) -> bool:
        """Lazy tensors were written to under autograd: those guarded here must still not require a gradient."""
        writes = writes_with_grad[0]
        if any_requires_grad(self.constants):
            return False
        self._writes = writes
        return True

    def _lazy_as_it_was(self) -> bool:
        now = changes[0]
        lately = set(islice(reversed(changed_lately), now - self._changes))
        known = now - self._changes <= len(changed_lately) and 0 not in lately
        if not (known and self._lazy_ids.isdisjoint(lately)):
            with without_torch_function():
                if not self.lazy.holds():
                    return False
        self._changes = now
        return True

    # ---------------------------------------------------------------- gradients

    def _grads_hold(self) -> bool:
        with without_torch_function():
            if self._lazy_grads is not None and self._lazy_facts_of_grads() == self._lazy_grads:
                return True
            return self._facts_of_grads() == self._grads

    def _lazy_facts_of_grads(self) -> Any:
        """Geometries and bases; None where a gradient is not lazy, requires one itself, or shares memory."""
        grads = list(map(_grad, self._with_grad))
        try:
            storages = list(map(_storage, grads))
            geometries, bases = list(map(_geometry, grads)), list(map(_base_of, storages))
        except AttributeError:  # some are None, or ordinary tensors
            return None
        apart = set(map(id, storages))
        if len(apart) < len(storages) or not apart.isdisjoint(self.memories) or any_requires_grad(grads):
            return None
        return geometries, bases

    def _facts_of_grads(self) -> list[Any]:
        """What a program depends on in each gradient, and which memory it is on, numbered with that of the state."""
        numbers = dict(self.memories)
        facts: list[Any] = []
        for grad in map(_grad, self.leaves):
            if grad is None:
                facts.append(None)
            else:
                facts.append((*_grad_facts(grad), numbers.setdefault(memory_of(part_of(grad)), len(numbers))))
        return facts

    # ---------------------------------------------------------------- reporting

    def broken(self) -> list[tuple[str, Any, Any]]:
        """What changed: (name, fact then, fact now)."""
        found = [*self.lazy.broken(), *self.plain.broken(), *self.others.broken(), *self.moving.broken()]
        if any_requires_grad([*self.constants, *self.plain_constants]):
            found.append(("requires_grad of a tensor", False, True))
        now = self._facts_of_grads() if self._grads is not None else []
        for name, a, b in zip(self._leaf_names, self._grads or (), now, strict=False):
            if a != b:
                found.append((f"{name}.grad", a, b))
        found += [("a gradient on the host", a, owner.grad) for owner, a in self.kept_gradients if owner.grad is not a]
        return found


class _TensorFacts:
    """Facts of some tensors, as given by some readers."""

    def __init__(self, found: Sequence[tuple[torch.Tensor, str]], readers: Sequence[Callable[[Any], Any]]) -> None:
        self.tensors = [t for t, _ in found]
        self._names = [name for _, name in found]
        self._readers = readers
        self._then = [list(map(read, self.tensors)) for read in readers]

    def holds(self) -> bool:
        if not self.tensors:
            return True
        try:
            now = [list(map(read, self.tensors)) for read in self._readers]
        except RuntimeError:  # one became sparse, and has no address
            return False
        return now == self._then

    def broken(self) -> list[tuple[str, Any, Any]]:
        found = []
        for read, facts in zip(self._readers, self._then, strict=True):
            for name, a, tensor in zip(self._names, facts, self.tensors, strict=True):
                try:
                    b = read(tensor)
                except RuntimeError as why:
                    b = why
                if a != b:
                    found.append((name, _printable(a), _printable(b)))
        return found


def moving_tensors(reached: Reached, names: frozenset[str]) -> MovingTensors:
    """The moving tensors of these names, among all that are reached."""
    found = moving_in(reached, names)
    ids = {id(tensor) for tensor, _ in found}
    return MovingTensors(found, [tensor for tensor, _ in reached.tensors.values() if id(tensor) not in ids])


def aliases_in(given: Sequence[Any], memories: dict[int, int]) -> tuple[tuple[int, int] | None, ...]:
    """For each argument the number of the memory that it is on, and its own among the tensors there (-1: it is another
    object); None where it is on none of these."""
    return tuple([_alias(x, memories) if isinstance(x, torch.Tensor) else None for x in given])


def _alias(tensor: torch.Tensor, memories: dict[int, int]) -> tuple[int, int] | None:
    number = memories.get(memory_of(tensor))
    return None if number is None else (number, memories.get(-id(tensor), -1))


def _place(tensor: torch.Tensor) -> Any:
    """Shape, and where they exist strides and address, of a tensor that is not dense."""
    if tensor.is_nested:
        return tensor.layout
    return (tensor.shape, tensor.stride(), tensor.data_ptr()) if has_memory(tensor) else tensor.shape


def _may_have_gradient(tensor: torch.Tensor) -> bool:
    return tensor.grad is not None or isinstance(tensor, torch.nn.Parameter)


def _grad_facts(grad: torch.Tensor) -> tuple[Any, ...]:
    if is_distributed(grad):
        return (grad.shape, grad.requires_grad, *how_distributed(grad), *_grad_facts(part_of(grad)))
    if isinstance(grad, LazyTensor):
        return (grad._geometry, grad._storage_.base, grad.requires_grad)
    size = grad.untyped_storage().nbytes() if has_memory(grad) else None
    place = (grad.stride(), grad.storage_offset()) if is_dense(grad) else grad.layout
    return (grad.shape, place, size, grad.dtype, grad.device, grad.requires_grad)


def _printable(facts: Any) -> Any:
    if isinstance(facts, tuple):
        return tuple("its memory" if isinstance(fact, LazyStorage) else fact for fact in facts)
    return facts


__all__ = ["MovingTensors", "memory_of", "moving_in"]

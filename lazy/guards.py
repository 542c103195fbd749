"""Guards: whether everything that a captured call read by name is as it was.

Invariant: `holds()` is one generated function over plain attributes and a handful of C-level passes over flat lists,
whatever the number of operators; only after one of them fails does Python look at single values, to say which one
changed or to find that it is equal after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter, is_
from typing import Any

import torch
from torchlazy.lazy.guard_walk import Place, Reached
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.tensor import LazyTensor, changed_lately, changes, writes_with_grad
from torchlazy.lazy.torch_private import any_requires_grad, without_torch_function

_VALUES = frozenset({int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.Size, tuple})
_lazy_facts = attrgetter("_storage_", "_geometry", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_plain_facts = attrgetter("shape", "dtype", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_base = attrgetter("_storage_.base")
_grad = attrgetter("grad")
_geometry, _storage, _base_of = attrgetter("_geometry"), attrgetter("_storage_"), attrgetter("base")
_stride, _address, _layout = torch.Tensor.stride, torch.Tensor.data_ptr, attrgetter("layout")
_NONE = frozenset({None})
_CHUNK = 50  # comparisons in one expression


class Guards:
    """What was read when the guards were made. `free` names values that the program takes as inputs instead."""

    def __init__(self, reached: Reached, free: frozenset[str] = frozenset()) -> None:
        self._keep = reached.keep
        self._free = free
        places = [place for place in reached.places if not free.issuperset(place.names)]
        live = [p for p in places if p.live is not None and free.isdisjoint(p.names)]
        self._live = _Live([p.live for p in live if p.live is not None], [n for p in live for n in p.names])
        self._tables = _Live(
            [table.values() for table, names in reached.views if names],
            [n for _, names in reached.views for n in names],
        )
        self._single = _Single([p for p in places if p.live is None or not free.isdisjoint(p.names)], free)
        self._empty = [*reached.empty_hooks, *(table for table, names in reached.views if not names)]
        sized = [*reached.sized, *((table, "the number of its entries") for table, names in reached.views if names)]
        self._sized = [container for container, _ in sized]
        self._sizes = list(map(len, self._sized))
        self._size_names = [name for _, name in sized]
        self._arrays = [(array, _array_facts(array), name) for array, name in reached.arrays]
        found = list(reached.tensors.values())
        lazy = [(t, name) for t, name in found if isinstance(t, LazyTensor)]
        # Host tensors of one number (step counts) are read anew at each call; their memory is theirs.
        plain = [(t, name) for t, name in found if not isinstance(t, LazyTensor) and (t.dim() or t.requires_grad)]
        strided = [(t, name) for t, name in plain if t.layout is torch.strided]
        others = [(t, name) for t, name in plain if t.layout is not torch.strided]
        self._lazy, self._plain = _Facts(lazy, (_lazy_facts, _base)), _Facts(strided, (_plain_facts, _address, _stride))
        self._others = _Facts(others, (_plain_facts, _layout))
        self._lazy_ids = frozenset(id(t) for t, _ in lazy)
        self._changes, self._writes = changes[0], writes_with_grad[0]
        self.memories = memories_of(reached)
        self._constants = [t for t, _ in lazy if not t.requires_grad]
        self._plain_constants = [t for t, _ in found if not isinstance(t, LazyTensor) and not t.requires_grad]
        # A frozen parameter may still have a gradient, or get one, which its optimizer reads.
        leaves = [(t, name) for t, name in found if t.is_leaf and (t.requires_grad or _may_have_gradient(t))]
        self._leaves = [t for t, _ in leaves]
        self._leaf_names = [name for _, name in leaves]
        self._grads: list[Any] | None = self._facts_of_grads()
        self._without_grad = [leaf for leaf in self._leaves if leaf.grad is None]
        self._with_grad = [leaf for leaf in self._leaves if leaf.grad is not None]
        # Lazy gradients, each on memory of its own, are compared in a few passes.
        self._lazy_grads = self._lazy_facts_of_grads()

    def ignore_gradients(self) -> None:
        """The call neither read nor set a gradient of what it reached."""
        self._grads = None

    def holds(self) -> bool:
        """Whether nothing changed."""
        return (
            self._single.holds()
            and not any(self._empty)
            and list(map(len, self._sized)) == self._sizes
            and self._live.holds()
            and self._tables.holds()
            and (not self._arrays or all(_array_facts(array) == facts for array, facts, _ in self._arrays))
            and self._tensors_hold()
        )

    def _tensors_hold(self) -> bool:
        with without_torch_function():  # what it would ask of each attribute of each tensor takes half of the time
            return (
                not any_requires_grad(self._plain_constants)
                and (writes_with_grad[0] == self._writes or self._constants_hold())
                and (changes[0] == self._changes or self._lazy_as_it_was())
                and self._plain.holds()
                and self._others.holds()
                and (self._grads is None or self._grads_hold())
            )

    def _constants_hold(self) -> bool:
        """Somebody wrote to lazy tensors while gradients were recorded: ours must not require a gradient since."""
        writes = writes_with_grad[0]
        if any_requires_grad(self._constants):
            return False
        self._writes = writes
        return True

    def _lazy_as_it_was(self) -> bool:
        now = changes[0]
        lately = set(islice(reversed(changed_lately), now - self._changes))
        known = now - self._changes <= len(changed_lately) and 0 not in lately
        if not (known and self._lazy_ids.isdisjoint(lately)) and not self._lazy.holds():
            return False
        self._changes = now
        return True

    def _grads_hold(self) -> bool:
        if not _NONE.issuperset(map(_grad, self._without_grad)):
            return False
        if not self._with_grad:
            return True
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
        """What a program depends on in each gradient, and which memory it is on: that of the state, or of another."""
        numbers = dict(self.memories)
        facts: list[Any] = []
        for grad in map(_grad, self._leaves):
            if grad is None:
                facts.append(None)
            else:
                facts.append((*_grad_facts(grad), numbers.setdefault(_memory(grad), len(numbers))))
        return facts

    def broken(self) -> list[tuple[str, Any, Any]]:
        """What does not hold: (name, value then, value now), the first few."""
        found = [*self._single.broken(), *self._live.broken(), *self._tables.broken()]
        sizes = map(len, self._sized)
        found += [(n, a, b) for n, a, b in zip(self._size_names, self._sizes, sizes, strict=True) if a != b]
        found += [(n, "other values", "these") for a, facts, n in self._arrays if _array_facts(a) != facts]
        if any(self._empty):
            found.append(("hooks or entries of a module", "none", "some"))
        found += [*self._lazy.broken(), *self._plain.broken(), *self._others.broken()]
        if any_requires_grad([*self._constants, *self._plain_constants]):
            found.append(("requires_grad of a tensor", False, True))
        now = self._facts_of_grads() if self._grads is not None else []
        for name, a, b in zip(self._leaf_names, self._grads or (), now, strict=False):
            if a != b:
                found.append((f"{name}.grad", a, b))
        return found[:32]

    def changed_numbers(self) -> list[str]:
        """Names of the guarded plain numbers whose values are others now."""
        return [
            name
            for name, then, now in self.broken()
            if type(then) in (int, float) and type(now) is type(then) and not name.startswith("the ")
        ]


def _may_have_gradient(tensor: torch.Tensor) -> bool:
    return tensor.grad is not None or isinstance(tensor, torch.nn.Parameter)


def memories_of(reached: Reached) -> dict[int, int]:
    """The memories of the tensors that were reached, by identity, numbered."""
    found: dict[int, int] = {}
    for tensor, _ in reached.tensors.values():
        found.setdefault(_memory(tensor), len(found))
    return found


def aliases_in(given: Sequence[Any], memories: dict[int, int]) -> tuple[int | None, ...]:
    """For each argument the number of the memory that it is on, None where it is on none of these."""
    return tuple([memories.get(_memory(x)) if isinstance(x, torch.Tensor) else None for x in given])


def _memory(tensor: torch.Tensor) -> int:
    if isinstance(tensor, LazyTensor):
        return id(tensor._storage_)
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


class _Live:
    """Containers that are looked at whole."""

    def __init__(self, live: Sequence[Iterable[Any]], names: list[str]) -> None:
        self._views = live
        self._names = names
        self._values = list(chain.from_iterable(live))
        self._lengths = [len(tuple(view)) for view in live]

    def holds(self) -> bool:
        """Whether the same values are there; the containers have been found to have their lengths."""
        return all(map(is_, chain.from_iterable(self._views), self._values)) or self._equal()

    def _equal(self) -> bool:
        """Other objects may be equal values: they are what is compared from now on."""
        values = list(chain.from_iterable(self._views))
        if not all(map(_same_or_equal, values, self._values)):
            return False
        self._values = values
        return True

    def broken(self) -> list[tuple[str, Any, Any]]:
        """Values of containers that have the length they had; which others went or came, their lengths tell."""
        found: list[tuple[str, Any, Any]] = []
        start = 0
        for view, length in zip(self._views, self._lengths, strict=True):
            values, end = tuple(view), start + length
            if len(values) == length:
                rows = zip(self._names[start:end], self._values[start:end], values, strict=True)
                found += [(n, a, b) for n, a, b in rows if a is not b and not _equal(b, a)]
            start = end
        return found


class _Single:
    """Values that are looked at one by one, by a generated function: attributes, cells, globals."""

    def __init__(self, places: Sequence[Place], free: frozenset[str]) -> None:
        self._rows: list[tuple[str, str]] = []  # name, expression
        self._space: dict[str, Any] = {}
        for number, place in enumerate(places):
            self._space[f"o{number}"] = place.of if place.sources else place.read
            sources = place.sources or tuple(f"of()[{i}]" for i in range(len(place.names)))
            for name, source in zip(place.names, sources, strict=True):
                if name not in free:
                    self._rows.append((name, f"o{number}{source.removeprefix('of')}"))
        lines = ["def holds():", "    try:", "        pass"]
        for start in range(0, len(self._rows), _CHUNK):
            rows = range(start, min(start + _CHUNK, len(self._rows)))
            tests = " and ".join(f"{self._rows[i][1]} is v{i}" for i in rows)
            lines.append(f"        if not ({tests}): return False")
        lines += ["    except (LookupError, AttributeError, ValueError, TypeError):", "        return False"]
        lines.append("    return True")
        everything = "".join(f"{source}, " for _, source in self._rows)
        lines += ["def read():", f"    return ({everything})"]
        exec(compile("\n".join(lines), "<torchlazy guards>", "exec"), self._space)
        self._holds: Callable[[], bool] = self._space["holds"]
        self._values = self._read()
        self._space.update((f"v{i}", value) for i, value in enumerate(self._values))

    def holds(self) -> bool:
        return self._holds() or self._equal()

    def _read(self) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._space["read"]()
        return found

    def _read_what_is_there(self) -> list[Any]:
        values = []
        for _, source in self._rows:
            try:
                values.append(eval(source, self._space))
            except (LookupError, AttributeError, ValueError, TypeError):
                values.append(_GONE)
        return values

    def _equal(self) -> bool:
        try:
            values = self._read()
        except (LookupError, AttributeError, ValueError, TypeError):
            return False
        if not all(map(_same_or_equal, values, self._values)):
            return False
        for position, (now, then) in enumerate(zip(values, self._values, strict=True)):
            if now is not then:
                self._space[f"v{position}"] = now
        self._values = values
        return True

    def broken(self) -> list[tuple[str, Any, Any]]:
        rows = zip(self._rows, self._values, self._read_what_is_there(), strict=True)
        return [(name, a, b) for (name, _), a, b in rows if a is not b and not _equal(b, a)]


class _Facts:
    """Facts of tensors that may change under their identity."""

    def __init__(self, found: Sequence[tuple[torch.Tensor, str]], readers: Sequence[Callable[[Any], Any]]) -> None:
        self._tensors = [t for t, _ in found]
        self._names = [name for _, name in found]
        self._readers = readers
        self._then = [list(map(read, self._tensors)) for read in readers]

    def holds(self) -> bool:
        if not self._tensors:
            return True
        try:
            now = [list(map(read, self._tensors)) for read in self._readers]
        except RuntimeError:  # one became sparse, and has no address
            return False
        return now == self._then

    def broken(self) -> list[tuple[str, Any, Any]]:
        found = []
        for read, facts in zip(self._readers, self._then, strict=True):
            for name, a, tensor in zip(self._names, facts, self._tensors, strict=True):
                try:
                    b = read(tensor)
                except RuntimeError as why:
                    b = why
                if a != b:
                    found.append((name, _plainly(a), _plainly(b)))
        return found


class _Gone:
    def __repr__(self) -> str:
        return "nothing (it was deleted)"


_GONE = _Gone()


def _equal(now: Any, before: Any) -> bool:
    kind = type(before)
    if type(now) is not kind or kind not in _VALUES:
        return False
    if kind is float:
        return bool(now.hex() == before.hex())
    if kind is complex:
        return repr(now) == repr(before)
    if kind is tuple:
        return len(now) == len(before) and all(map(_same_or_equal, now, before))
    return bool(now == before)


def _same_or_equal(now: Any, before: Any) -> bool:
    return now is before or _equal(now, before)


def _grad_facts(grad: torch.Tensor) -> tuple[Any, ...]:
    if isinstance(grad, LazyTensor):
        return (grad._geometry, grad._storage_.base, grad.requires_grad)
    size = grad.untyped_storage().nbytes() if grad.layout is torch.strided else None
    place = (grad.stride(), grad.storage_offset()) if grad.layout is torch.strided else grad.layout
    return (grad.shape, place, size, grad.dtype, grad.device, grad.requires_grad)


MAX_ARRAY_BYTES = 4096  # of a NumPy array that is compared at each call


def why_not_compared(array: Any) -> str:
    """Why guards do not look at the contents of a NumPy array; empty where they do."""
    if array.dtype.hasobject:
        return "an array of objects"
    return f"{array.nbytes} bytes" if array.nbytes > MAX_ARRAY_BYTES else ""


def _array_facts(array: Any) -> Any:
    contents = b"" if why_not_compared(array) else array.tobytes()
    return array.shape, array.dtype.str, contents


def _plainly(facts: Any) -> Any:
    if isinstance(facts, tuple):
        return tuple("its memory" if isinstance(fact, LazyStorage) else fact for fact in facts)
    return facts


def stored_in(places: Iterable[Place], name: str) -> tuple[Place, int] | None:
    """The place and position of a named value."""
    for place in places:
        if name in place.names:
            return place, place.names.index(name)
    return None

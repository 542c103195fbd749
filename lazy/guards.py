"""Guards: whether everything that a captured call read by name is as it was.

Invariant: `holds()` is a fixed handful of C-level passes over flat lists, whatever the number of operators; only after
one of them fails does Python look at single values, to say which one changed or to find that it is equal after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torchlazy.lazy.guard_walk import Place, Reached
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.tensor import LazyTensor

_VALUES = frozenset({int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.Size, tuple})
_lazy_facts = attrgetter("_storage_", "_geometry", "requires_grad")
_plain_facts = attrgetter("shape", "dtype", "device", "requires_grad")
_grad = attrgetter("grad")


def ambient() -> tuple[Any, ...]:
    """The process-wide state that chooses what operators do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("lazy"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("lazy"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


class Guards:
    """What was read when the guards were made. `free` names values that the program takes as inputs instead."""

    def __init__(self, reached: Reached, free: frozenset[str] = frozenset()) -> None:
        self._keep = reached.keep
        self._places = [place for place in reached.places if not free.issuperset(place.names)]
        self._free = free
        self._reads: list[Callable[[], Iterable[Any]]] = [place.read for place in self._places]
        self._values = list(chain.from_iterable(read() for read in self._reads))
        self._names = [name for place in self._places for name in place.names]
        free_at = [i for i, name in enumerate(self._names) if name in free]
        self._free_at = free_at
        self._views = [table.values() for table, _ in reached.views]
        self._table_values = list(chain.from_iterable(self._views))
        self._table_names = [name for _, names in reached.views for name in names]
        self._sized = [container for container, _ in reached.sized]
        self._sizes = list(map(len, self._sized))
        self._size_names = [name for _, name in reached.sized]
        self._empty = reached.empty_hooks
        found = list(reached.tensors.values())
        self._lazy = [t for t, _ in found if isinstance(t, LazyTensor)]
        self._lazy_names = [name for t, name in found if isinstance(t, LazyTensor)]
        self._plain = [t for t, _ in found if not isinstance(t, LazyTensor)]
        self._plain_names = [name for t, name in found if not isinstance(t, LazyTensor)]
        self._lazy_facts = list(map(_lazy_facts, self._lazy))
        self._plain_facts = list(map(_plain_facts, self._plain))
        self._addresses = list(map(_address, self._plain))
        self._leaves = [t for t in (*self._lazy, *self._plain) if t.is_leaf and t.requires_grad]
        self._leaf_names = [name for t, name in found if t.is_leaf and t.requires_grad]
        self._leaf_names = [
            *(n for t, n in found if isinstance(t, LazyTensor) and t.is_leaf and t.requires_grad),
            *(n for t, n in found if not isinstance(t, LazyTensor) and t.is_leaf and t.requires_grad),
        ]
        self._grads = [_grad_facts(g) for g in map(_grad, self._leaves)]
        self._no_grads = not any(g is not None for g in self._grads)
        self._ambient = ambient()

    def holds(self) -> bool:
        """Whether nothing changed."""
        values = list(chain.from_iterable([read() for read in self._reads]))
        return (
            len(values) == len(self._values)
            and (all(map(is_, values, self._values)) or self._values_equal(values))
            and all(map(is_, chain.from_iterable(self._views), self._table_values))
            and list(map(len, self._sized)) == self._sizes
            and not any(self._empty)
            and list(map(_lazy_facts, self._lazy)) == self._lazy_facts
            and list(map(_plain_facts, self._plain)) == self._plain_facts
            and list(map(_address, self._plain)) == self._addresses
            and self._grads_hold()
            and ambient() == self._ambient
        )

    def _grads_hold(self) -> bool:
        grads = list(map(_grad, self._leaves))
        if self._no_grads:
            return all(grad is None for grad in grads)
        return [_grad_facts(grad) for grad in grads] == self._grads

    def _values_equal(self, values: list[Any]) -> bool:
        """Other objects may be equal values: they are what is compared from now on."""
        for position, (now, before) in enumerate(zip(values, self._values, strict=True)):
            if now is not before and not (position in self._free_set or _equal(now, before)):
                return False
        self._values = values
        return True

    @property
    def _free_set(self) -> frozenset[int]:
        return frozenset(self._free_at)

    def broken(self) -> list[tuple[str, Any, Any]]:
        """What does not hold: (name, value then, value now), the first few."""
        found: list[tuple[str, Any, Any]] = []
        values = list(chain.from_iterable([read() for read in self._reads]))
        pairs = zip(self._names, self._values, values, strict=False)
        found += [(n, a, b) for n, a, b in pairs if a is not b and n not in self._free and not _equal(a, b)]
        tables = list(chain.from_iterable(self._views))
        found += [
            (n, a, b) for n, a, b in zip(self._table_names, self._table_values, tables, strict=False) if a is not b
        ]
        sizes = map(len, self._sized)
        found += [(n, a, b) for n, a, b in zip(self._size_names, self._sizes, sizes, strict=True) if a != b]
        if any(self._empty):
            found.append(("hooks", "none", "some"))
        for names, then, now in (
            (self._lazy_names, self._lazy_facts, list(map(_lazy_facts, self._lazy))),
            (self._plain_names, self._plain_facts, list(map(_plain_facts, self._plain))),
            (self._plain_names, self._addresses, list(map(_address, self._plain))),
        ):
            for name, a, b in zip(names, then, now, strict=True):
                if a != b:
                    found.append((name, _plainly(a), _plainly(b)))
        for name, a, leaf in zip(self._leaf_names, self._grads, self._leaves, strict=True):
            b = _grad_facts(leaf.grad)
            if a != b:
                found.append((f"{name}.grad", a, b))
        found += [
            (f"the state of torch ({label})", a, b)
            for label, a, b in zip(_AMBIENT_NAMES, self._ambient, ambient(), strict=True)
            if a != b
        ]
        return found[:8]

    def changed_numbers(self) -> list[str]:
        """Names of the guarded plain numbers whose values are others now."""
        return [
            name
            for name, then, now in self.broken()
            if type(then) in (int, float) and type(now) is type(then) and not name.startswith("the ")
        ]


_AMBIENT_NAMES = (
    "grad mode", "inference mode", "autocast cpu", "autocast cuda", "autocast lazy", "autocast dtype cpu",
    "autocast dtype cuda", "autocast dtype lazy", "deterministic algorithms", "default dtype", "dispatch modes",
    "function modes",
)  # fmt: skip


def _equal(now: Any, before: Any) -> bool:
    kind = type(before)
    if type(now) is not kind or kind not in _VALUES:
        return False
    if kind is float:
        return bool(now.hex() == before.hex())
    if kind is tuple:
        return len(now) == len(before) and all(map(_same_or_equal, now, before))
    return bool(now == before)


def _same_or_equal(now: Any, before: Any) -> bool:
    return now is before or _equal(now, before)


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _grad_facts(grad: torch.Tensor | None) -> Any:
    if grad is None:
        return None
    if isinstance(grad, LazyTensor):
        return (grad._geometry, grad.requires_grad)
    return (tuple(grad.shape), grad.stride(), grad.dtype, grad.device, grad.requires_grad)


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

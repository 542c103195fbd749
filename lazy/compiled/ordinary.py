"""Calls on ordinary tensors: whether a call is one, and its results as the ordinary tensors that callers expect.

Invariant: nothing here changes an argument; a tensor that replaces another holds the same numbers in the same order.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torchlazy.lazy.compiled.capture.autograd_facts import graph_leaves_in, graph_of
from torchlazy.lazy.compiled.capture.results import plain_result
from torchlazy.lazy.compiled.guards.discover import TooMuch, discover
from torchlazy.lazy.compiled.template.arguments import exchanged
from torchlazy.lazy.compiled.template.objects import flatten_open
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, note_change
from torchlazy.lazy.torch_private.dispatch import flatten_tree, unflatten_tree

_TENSOR = torch.Tensor


class OrdinaryCalls:
    """Whether calls of one callable are on ordinary tensors; these are recorded under `lazy_mode`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._found: weakref.ref[torch.Tensor] | None = None  # a tensor of the state, lazy if any is
        self._has_looked = False
        self._known = -1, False  # how many tensors on the lazy device had been made, and what `are_on_lazy` found then
        _let_swap(self)

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Drop weak references to these tensors."""
        found = None if self._found is None else self._found()
        if any(found is tensor for tensor in tensors):
            self._found, self._has_looked = None, False

    def holds(self, leaves: Sequence[Any], reached: Iterable[torch.Tensor] | None = None) -> bool:
        """Whether a call with these arguments is one: there are tensors, and none among its arguments or in what the
        callable reaches (its defaults, a trainer's model, a function that it calls) is on the lazy device. `reached`:
        what was just found that it reaches."""
        named = _firsts_of(self._function, leaves)
        if any(map(_is_on_device, named)):
            return False
        found = None if self._found is None else self._found()
        if reached is not None:
            found = self._note(reached)
        elif not self._has_looked or (self._found is not None and found is None):
            found = self._look()
        return bool(named) if found is None else not _is_on_device(found)

    def are_on_lazy(self, args: Any, kwargs: Any) -> bool:
        """Whether calls are on tensors of the lazy device that are of the ordinary class: so are their results then."""
        if not DEVICE.target:
            return False
        if DEVICE.is_in((args, kwargs)):
            return True
        if self._known[0] != DEVICE.count:  # others were made since
            found = self._look() if self._found is None else self._found()
            named = [*_firsts_of(self._function, (*args, *kwargs.values())), *([] if found is None else [found])]
            self._known = DEVICE.count, any(map(DEVICE.is_marked, named))
        return self._known[1]

    def _look(self) -> torch.Tensor | None:
        try:
            return self._note(tensor for tensor, _ in discover(self._function, []).tensors.values())
        except TooMuch:
            return self._note(())

    def _note(self, reached: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """A tensor of what the callable reaches, from now on: one on the lazy device if any is."""
        self._has_looked, tensors = True, list(reached)
        lazies = (tensor for tensor in tensors if _is_on_device(tensor) or DEVICE.is_marked(tensor))
        found = next(lazies, tensors[0] if tensors else None)
        self._found = None if found is None else weakref.ref(found)
        return found


_ALL: weakref.WeakSet[OrdinaryCalls] = weakref.WeakSet()
_swap = torch.utils.swap_tensors


def _let_swap(calls: OrdinaryCalls) -> None:
    """Let `torch.utils.swap_tensors` swap tensors that these calls refer to, and notify guards of it.

    torch swaps nothing that has a weak reference; a lazy tensor that was swapped (`Module.to_empty`) has other memory.
    """
    _ALL.add(calls)
    torch.utils.swap_tensors = _swap_forgotten


@functools.wraps(_swap)
def _swap_forgotten(t1: torch.Tensor, t2: torch.Tensor) -> None:
    for calls in _ALL:
        calls.forget((t1, t2))
    _swap(t1, t2)
    for tensor in (t1, t2):
        if isinstance(tensor, LazyTensor):
            note_change(tensor)


def _is_on_device(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, LazyTensor) and tensor._geometry.device == LAZY


def optimizer_to_begin(function: Callable[..., Any], leaves: Sequence[Any]) -> torch.optim.Optimizer | None:
    """An optimizer without any state yet among what the callable is given and names, and the attributes of that."""
    for value in (*leaves, *_named_by(function)):
        if type(value) in weakref.ProxyTypes:  # it may be dead
            continue
        for found in (value, *getattr(value, "__dict__", {}).values()):
            if isinstance(found, torch.optim.Optimizer) and not found.state and _keeps_state(found):
                return found
    return None


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    has_momentum = any(group.get("momentum", 0) for group in optimizer.param_groups)
    return has_momentum or type(optimizer) is not torch.optim.SGD


def _firsts_of(function: Callable[..., Any], leaves: Sequence[Any]) -> list[torch.Tensor]:
    """The arguments and the tensors that the callable names, the first parameter of each module for it."""
    named = [leaf for leaf in leaves if isinstance(leaf, (_TENSOR, torch.nn.Module))]
    found = (value for value in _named_by(function) if type(value) not in weakref.ProxyTypes)  # it may be dead
    named += [value for value in found if isinstance(value, (_TENSOR, torch.nn.Module))]
    tensors: list[torch.Tensor] = []
    for value in named:
        first = value if isinstance(value, _TENSOR) else next(value.parameters(), None)
        tensors += [] if first is None else [first]
    return tensors


def _named_by(function: Any) -> Iterable[Any]:
    """The callable itself, the object that it is bound to, and what its closure and its code's globals hold."""
    yield function
    yield getattr(function, "__self__", None)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # still empty
            continue
    code = getattr(function, "__code__", None)
    for name in code.co_names if code is not None else ():
        yield function.__globals__.get(name)


def _become(lazy: LazyTensor, plain: torch.Tensor) -> torch.Tensor:
    """The ordinary tensor as the very object that the lazy one was, since state may hold it too."""
    try:
        torch.utils.swap_tensors(lazy, plain)
    except RuntimeError:  # a weak reference to it, a graph that holds it
        return plain
    return lazy


def in_ordinary_tensors(recorder: Recorder, value: Any, given: Sequence[Any] = ()) -> Any:
    """What a call under `lazy_mode` returned, with ordinary tensors in place of its lazy ones. Objects keep their
    identity. `given`: the call's arguments."""
    plainly = _Plainly(recorder, given, graph_leaves_in(flatten_open(value)[0]))
    leaves, spec = flatten_tree(value)
    plain = [exchanged(leaf, plainly) for leaf in leaves]
    if all(now is then for now, then in zip(plain, leaves, strict=True)):
        return value
    return unflatten_tree(plain, spec)


class _Plainly:
    """A leaf of a result as an ordinary tensor. `begun`: leaves of graphs, which stay, by identity."""

    def __init__(self, recorder: Recorder, given: Sequence[Any], begun: Collection[int]) -> None:
        self._recorder, self._given, self._begun = recorder, given, begun
        self._made: dict[int, torch.Tensor] = {}  # by identity of the lazy ones, which the result keeps alive

    def __call__(self, leaf: Any) -> Any:
        if not isinstance(leaf, LazyTensor) or id(leaf) in self._begun:
            return leaf
        if leaf._geometry.device != LAZY and graph_of(leaf) is None:
            if id(leaf) not in self._made:
                real = self._recorder.real(leaf, "result of a compiled call")
                self._made[id(leaf)] = _become(leaf, plain_result(leaf, real, self, self._given))
            return self._made[id(leaf)]
        return leaf

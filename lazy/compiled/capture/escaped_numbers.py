"""Tracked numbers that outlive the captured call they were made in: plain numbers of the same value replace them.

A number that the call's Python saw may be kept by what lives on: an autograd Function's context, the closure of a hook,
a checkpointed region, a list of the program's. There it would meet ordinary tensors outside of the capture, and torch,
to which it is symbolic, would compute with NaN. The same NaN stands in the 0-dim tensors that autograd saves for the
number in `x * number`.

Invariant: only references to numbers of the call that ended are exchanged, each for the very value that it had.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torchlazy.lazy.numbers.questions import SizeQuestions, plain_size
from torchlazy.lazy.numbers.tracked import plain_number

_WORD = ctypes.sizeof(ctypes.c_size_t)
_DEPTH = 3  # tuples within tuples, and what holds the outermost
_WRAPPED = "_wrapped_number"  # where torch's argument parser leaves the number beside its stand-in


class EscapedNumbers:
    """The numbers of one captured call. `made` gets each of them; `settle` is called when the call has ended."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []
        self.sizes: SizeQuestions | None = None  # records reads of sizes: those that it gave are numbers too

    def made(self, number: Any) -> None:
        self._made.append(weakref.ref(number))

    def settle(self) -> None:
        """Plain numbers wherever one of the call's numbers is still held. Looks at nothing if none is."""
        alive = [number for number in (ref() for ref in self._made) if number is not None]
        self._made.clear()
        if self.sizes is not None:
            self.sizes.listens = False
            alive += self.sizes.still_held()
        if alive:
            _exchange({id(number): plain_size(plain_number(number)) for number in alive}, alive, _DEPTH)


def _exchange(plain: dict[int, Any], held: list[Any], depth: int) -> None:
    """Put `plain[id(x)]` where an `x` of `held` is held."""
    asked = tuple(held)  # Python 3.13 finds it, too
    ours = {id(plain), id(held), id(asked)}
    frozen: list[Any] = []
    stand_ins: list[Any] = []
    for holder in gc.get_referrers(*asked):
        if id(holder) in ours or isinstance(holder, types.FrameType):
            continue
        if type(holder) is tuple or isinstance(holder, torch.Size):
            frozen.append(holder)
        elif isinstance(holder, torch.Tensor):
            _fill(holder, getattr(holder, _WRAPPED, None))
        elif type(holder) is dict and id(holder.get(_WRAPPED)) in plain:
            stand_ins.append(holder)
        else:
            _put(holder, plain)
    for owner in gc.get_referrers(*stand_ins) if stand_ins else ():
        if isinstance(owner, torch.Tensor):
            _fill(owner, getattr(owner, _WRAPPED, None))
    if frozen and depth:
        fresh = {id(held): tuple([plain.get(id(item), item) for item in held]) for held in frozen}
        _exchange(fresh, frozen, depth - 1)


def _fill(stand_in: torch.Tensor, number: Any) -> None:
    """Let the stand-in be the number's own 0-dim tensor; unseen by autograd, which would take it for a change."""
    value = plain_number(number)
    if isinstance(value, (int, float)) and stand_in.dim() == 0 and type(stand_in) is torch.Tensor:
        stand_in.data.fill_(value)
        del stand_in.__dict__[_WRAPPED]


def _put(holder: Any, plain: dict[int, Any]) -> None:
    with contextlib.suppress(TypeError, AttributeError):  # what cannot be changed keeps them
        _put_into(holder, plain)


def _put_into(holder: Any, plain: dict[int, Any]) -> None:
    if isinstance(holder, types.CellType):
        holder.cell_contents = plain.get(id(holder.cell_contents), holder.cell_contents)
    elif isinstance(holder, types.FunctionType):
        holder.__defaults__ = plain.get(id(holder.__defaults__), holder.__defaults__)
    elif isinstance(holder, dict):
        _each(holder.items(), plain, holder.__setitem__)
        if any(id(key) in plain for key in holder):
            _refill(holder, [(plain.get(id(key), key), item) for key, item in holder.items()])
    elif isinstance(holder, set):
        _refill(holder, [plain.get(id(item), item) for item in holder])
    elif isinstance(holder, (list, collections.deque)):
        _each(enumerate(holder), plain, holder.__setitem__)
    elif isinstance(holder, partial):
        args = tuple([plain.get(id(item), item) for item in holder.args])
        words = {name: plain.get(id(item), item) for name, item in holder.keywords.items()}
        holder.__setstate__((holder.func, plain.get(id(holder.args), args), words, holder.__dict__))  # type: ignore[attr-defined]
    elif isinstance(holder, functools._lru_cache_wrapper):
        for table in gc.get_referents(holder):
            if type(table) is dict:
                for link in table.values():
                    if type(link).__name__ == "_lru_list_elem":  # of a cache with a limit; others have results there
                        _put_into_link(link, plain)
    else:
        own = getattr(holder, "__dict__", None)
        if type(own) is dict:  # of an object whose attributes lie in itself
            _each(own.items(), plain, own.__setitem__)
        slots = [
            n for kind in type(holder).__mro__ for n, m in vars(kind).items() if type(m) is types.MemberDescriptorType
        ]
        _each(((name, getattr(holder, name, None)) for name in slots), plain, lambda n, v: _set(holder, n, v))


def _put_into_link(link: Any, plain: dict[int, Any]) -> None:
    """Python gives no way to exchange a cached result: the word of the link that holds it is written."""
    words = (ctypes.c_size_t * (sys.getsizeof(link) // _WORD)).from_address(id(link))
    for place in range(2, len(words)):  # behind the count of references and the class
        if words[place] in plain:
            fresh, before = plain[words[place]], words[place]
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(fresh))
            words[place] = id(fresh)
            ctypes.pythonapi.Py_DecRef(ctypes.cast(before, ctypes.py_object))


def _refill(holder: Any, items: list[Any]) -> None:
    holder.clear()
    holder.update(items)


def _each(items: Iterable[tuple[Any, Any]], plain: dict[int, Any], store: Callable[[Any, Any], None]) -> None:
    for place, value in list(items):
        if id(value) in plain:
            store(place, plain[id(value)])


def _set(holder: Any, name: str, value: Any) -> None:
    object.__setattr__(holder, name, value)


__all__ = ["EscapedNumbers"]

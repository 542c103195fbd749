"""State that grows from call to call: lists that are only appended to, and caches that no template can serve.

Invariant: a list counts as appended to only where no code that the call names does anything else with its name. What
grows otherwise (a cache that each call makes longer) would be captured anew at each call; the callable then runs its
Python, recorded, until a call finds the size of the last one.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torchlazy.lazy.compiled.guards.bare_containers import base_of
from torchlazy.lazy.compiled.guards.reached import Reached, StateSlot, StateSlots
from torchlazy.lazy.torch_private.dispatch import flatten_tree

Size = tuple[int, ...]
_POINTS = 3  # sizes, each longer than the one before; one more for an argument, which may vary by itself
_LOADS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST")
_ATTRIBUTES = ("LOAD_METHOD", "LOAD_ATTR")
_STORES = ("STORE_DEREF", "STORE_GLOBAL", "STORE_NAME", "STORE_ATTR", "DELETE_ATTR")


class Appended:
    """Stores new items at the end of a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __call__(self, new: Iterable[Any]) -> None:
        self.items.extend(new)

    def settle(self, new: Sequence[Any]) -> None:
        """In place of the items that a captured call appended."""
        self.items[len(self.items) - len(new) :] = new


def is_only_appended_to(path: str, codes: Iterable[types.CodeType]) -> bool:
    """Whether codes do nothing else than `append` or `extend` with the list of this name."""
    name, kind = _last_name(path)
    return bool(name) and all(_only_appends(code, name, kind) for code in codes)


def _last_name(path: str) -> tuple[str, str]:
    """How code names the value: as a variable ("x (of f)", "x (global of m)") or as an attribute ("a.b.x")."""
    if path.endswith(")") and " (" in path:
        head = path.split(" (", 1)[0]
        tail = path.rsplit(")", 1)[1]
        name = tail.rpartition(".")[2] or head
        kind = "attribute" if tail.startswith(".") or "." in head else "variable"
        return (name, kind) if name.isidentifier() else ("", "")
    name = path.rpartition(".")[2]
    return (name, "attribute") if name.isidentifier() and "." in path else ("", "")


def _only_appends(code: types.CodeType, name: str, kind: str) -> bool:
    instructions = [found for found in dis.get_instructions(code) if found.opname not in ("CACHE", "EXTENDED_ARG")]
    for position, found in enumerate(instructions):
        opname, names = found.opname.replace("_BORROW", "").replace("_CHECK", ""), found.argval
        if name not in (names if type(names) is tuple else (names,)):
            continue
        if opname.startswith("LOAD_FAST") and (kind == "attribute" or name in (*code.co_freevars, *code.co_cellvars)):
            continue  # the cell, for a function within (LOAD_CLOSURE before Python 3.13), which is looked at below
        if type(names) is tuple:  # two locals by one instruction
            return False
        is_load = opname in (_ATTRIBUTES if kind == "attribute" else _LOADS)
        if is_load:
            after = instructions[position + 1]
            if after.opname not in _ATTRIBUTES or after.argval not in ("append", "extend"):
                return False
        elif opname in _STORES and code.co_name != "__init__":
            return False
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return all(_only_appends(constant, name, kind) for constant in inner)


class Growth:
    """Sizes of arguments, slots and containers at the last captures, and whether one of them grows at each."""

    def __init__(self) -> None:
        self._history: list[dict[str, Size]] = []
        self._readers: dict[str, Callable[[], Size]] = {}
        self._last: Size = ()
        self._known: set[str] = set()  # names that were found growing before
        self.name = ""  # of what grows

    def captured(self, reached: Reached, slots: StateSlots, sizes: dict[str, Size]) -> None:
        """What the last captured call could reach, and the sizes of the slots when it began."""
        if self._history:
            self._history[-1].update(sizes)
        self._readers = {path: _length_reader(container) for container, path in reached.containers}
        self._readers |= {slot.name: _size_reader(slot) for slot in slots.slots}

    def look(self, leaves: Sequence[Any], appended: Collection[str] = ()) -> str:
        """Before a capture: the name of what has grown at each of the last captures; empty where nothing did.

        `appended`: names of lists whose growth the next capture does not depend on.
        """
        now = {f"argument {i}": tuple(x.shape) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        now |= {name: read() for name, read in self._readers.items() if name not in appended}
        self._history = [*self._history[-3:], now]
        for name in now:
            sizes = [known[name] for known in self._history if name in known]
            enough = 2 if name in self._known else _POINTS + name.startswith("argument ")
            if len(sizes) >= enough and all(map(_is_longer, sizes[-enough:], sizes[1 - enough :])):
                self.name, self._last = name, now[name]
                self._known.add(name)
                return name
        return ""

    @property
    def is_argument(self) -> bool:
        """Whether what grows is an argument, whose size distinguishes kinds of calls."""
        return self.name.removeprefix("argument ").isdigit()

    @property
    def sizes_vary(self) -> bool:
        """Whether anything had other sizes at the last capture than at the one before it."""
        if len(self._history) < 2:
            return False
        before, now = self._history[-2:]
        return any(before.get(name, size) != size for name, size in now.items())

    def goes_on(self, leaves: Sequence[Any]) -> bool:
        """Whether what grows is longer than at the last call. If not, captures may be worth it again."""
        if self.is_argument:
            position = int(self.name.removeprefix("argument "))
            leaf = leaves[position] if position < len(leaves) else None
            size = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()
        else:
            size = self._readers[self.name]()
        last, self._last = self._last, size
        if _is_longer(last, size):
            return True
        self.name = ""
        self.forget()
        return False

    def forget(self) -> None:
        """What grew does not keep calls from being replayed, or grows no more."""
        self._history.clear()


def _is_longer(before: Size, now: Size) -> bool:
    return len(before) == len(now) and before != now and all(a <= b for a, b in zip(before, now, strict=True))


def _length_reader(container: Any) -> Callable[[], Size]:
    return lambda: (base_of(container).__len__(container),)


def _size_reader(slot: StateSlot) -> Callable[[], Size]:
    return lambda: size_of(slot)


def size_of(slot: StateSlot) -> Size:
    """How many values the slot holds, and how many elements their tensors have."""
    try:
        leaves, _ = flatten_tree(slot.read())
    except (LookupError, AttributeError, ValueError, TypeError, RuntimeError):
        return ()
    return len(leaves), sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))

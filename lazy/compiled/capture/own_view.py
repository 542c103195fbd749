"""Argument views: a captured call gets the view itself once it asks what no copy can answer.

Such questions are for its gradient, its hooks, its memory for others to hold, or that it be on other memory. Questions
for an argument's identity (`id`, `hash`) have another answer at each call: they are refused.

Invariant: from that question on the call has the view itself, with what it wrote so far; what it has seen of the copy
until then are views of that view. Such a call has no template, and later ones get their argument views from the start.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.compiled.guards.code import names_in
from torchlazy.lazy.compiled.template.views import ArgumentView
from torchlazy.lazy.ops.handlers import MOVES
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.shapes.infer import CannotInfer, infer
from torchlazy.lazy.trace.user_frames import LAZY_FOLDER

if TYPE_CHECKING:
    from torchlazy.lazy.compiled.capture.record import CaptureRecord

NOT_THE_PROGRAM = (LAZY_FOLDER, str(Path(torch.__file__).parent))
_T: Any = torch.Tensor
_MEMORY = "for its memory"  # so may views of it
_ASKS: dict[Any, str] = {
    _T.requires_grad_: "to need a gradient",
    _T.requires_grad.__set__: "to need a gradient",
    _T.grad.__get__: "for its gradient",
    _T.grad.__set__: "to take a gradient",
    _T.grad.__delete__: "to have no gradient",
    _T.retain_grad: "to keep its gradient",
    _T.register_hook: "to call a hook",
    _T.register_post_accumulate_grad_hook: "to call a hook",
    _T.data.__set__: MOVES,
    _T.set_: MOVES,
    _T.resize_: "to have another size",
    _T.resize_as_: "to have another size",
    _T.share_memory_: "to be on shared memory",
    _T.__setstate__: "to be another tensor",
    _T.numpy: _MEMORY,
    _T.__array__: _MEMORY,
    _T.__dlpack__: _MEMORY,
    _T.storage: _MEMORY,
    _T.untyped_storage: _MEMORY,
    _T._typed_storage: _MEMORY,
    _T.__reduce_ex__: _MEMORY,
    _T.__deepcopy__: _MEMORY,
    **dict.fromkeys(
        (torch.as_strided, _T.as_strided, _T.as_strided_, torch.as_strided_, torch.as_strided_copy), _MEMORY
    ),
}


class OwnViews:
    """The argument views of one call that it has themselves from now on, by their copies' identities."""

    def __init__(self, capture: CaptureRecord) -> None:
        self._capture = capture
        self._given: dict[int, torch.Tensor] = {}
        self._versions: list[tuple[ArgumentView, int]] = []  # of their copies, when they were taken

    def look(self, func: Callable[..., Any], args: Any) -> None:
        """Note a question that only the view itself can answer."""
        asks = _ASKS.get(func)
        if asks is not None and args and not sys._getframe(2).f_code.co_filename.startswith(LAZY_FOLDER):
            if asks is _MEMORY:
                self.lend(args[0])
            else:
                self.take(args[0], asks)
            if asks == MOVES:
                self.take_sources(args)

    def take_resized(self, op: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether `out=` gives another size to what was the copy of an argument view until now, or a view of it."""
        recorder = self._capture.recorder
        outs = {name: window for name, value in kwargs.items() if (window := self._behind(value)) is not None}
        if not outs:
            return False
        with recorder.apart():
            now = {name: recorder.geometry_arguments(value) for name, value in kwargs.items()}
            try:
                _, (_, after) = infer(op, recorder.geometry_arguments(args), now, *recorder.claimed(args, kwargs))
            except CannotInfer:  # eager raises its own error here
                return False
        grown = [name for name in outs if after[name].shape != now[name].shape]
        for name in grown:
            self.take(outs[name].copy, "to have another size")
        return bool(grown)

    def take_sources(self, args: Any) -> None:
        """Another tensor, the first, is to be on the memory of the second."""
        for source in args[1:2]:
            self.lend(source)

    def lend(self, tensor: Any) -> None:
        """Somebody gets the memory of the tensor, which may be a copy or a view of one."""
        if (window := self._behind(tensor)) is not None:
            self.take(window.copy, _MEMORY)

    def _behind(self, value: Any) -> ArgumentView | None:
        """The argument view that the value is the copy of, or a view of the copy."""
        recorder = self._capture.recorder
        for window in self._capture.windows:
            if value is window.copy:
                return window
            if type(value) is LazyTensor and value._storage_ is recorder.storage_of_plain(window.alias):
                return window
        return None

    def take(self, tensor: torch.Tensor, asks: str) -> torch.Tensor:
        """The tensor; where it is the copy of an argument view, that view from now on."""
        for window in self._capture.windows:
            if tensor is window.copy:
                self._capture.refuse(f"it asks an argument that is a view of larger memory {asks}")
                self._capture.asked_of_views = True
                self._take(window)
                return window.given
        return tensor

    def _take(self, window: ArgumentView) -> None:
        recorder = self._capture.recorder
        recorder.cut("compiled call")
        memory = recorder.storage_of_plain(window.alias)
        self._given[id(window.copy)] = window.given
        self._capture.quietly(partial(window.take_over_graph, window.copy))
        with recorder.apart(), torch.no_grad():
            views = [x for x in gc.get_objects() if type(x) is LazyTensor and x._storage_ is memory]
            seen = [window.seen(view) for view in views]
            window.take_over_writes(self._capture.windows)
        for view, now in zip(views, seen, strict=True):
            if now is not None:
                view._become(recorder.view_of_plain(now, recorder.storage_of_plain(now)))
        self._versions.append((window, window.copy._version))
        self._capture.windows.remove(window)
        self._capture.taken.append(window)

    def raise_versions(self) -> None:
        """Writes to views of copies, which are views of the arguments now, count as writes to these, too."""
        for window, before in self._versions:
            for _ in range(0 if window.given.is_inference() else window.copy._version - before):
                torch.autograd.graph.increment_version(window.given)

    def instead(self, value: Any) -> Any:
        """The value with argument views in place of their copies."""
        if isinstance(value, torch.Tensor):
            return self._given.get(id(value), value)
        kind = type(value)
        if kind is list or kind is tuple:
            found = [self.instead(item) for item in value]
            return kind(found) if any(a is not b for a, b in zip(found, value, strict=True)) else value
        if kind is dict:
            found_by = {key: self.instead(item) for key, item in value.items()}
            return found_by if any(found_by[key] is not item for key, item in value.items()) else value
        return value

    def __bool__(self) -> bool:
        return bool(self._given)


_ASKERS = {name: vars(builtins)[name] for name in ("id", "hash")}
_ANY_BUILTIN = frozenset({"builtins", "__builtins__", "eval", "exec"})  # how code gets at one that it does not name


def identities_asked_by(codes: Iterable[CodeType]) -> frozenset[str]:
    """The names by which the code may ask for objects' identities."""
    return frozenset(name for code in codes for name in (*_ASKERS, "__hash__") if name in names_in(code))


@contextlib.contextmanager
def watched_identities(
    asked: frozenset[str], functions: Iterable[FunctionType], given: Mapping[int, Any], refuse: Callable[[str], None]
) -> Iterator[None]:
    """Inside, questions of the program for the identity of what it was given are refused. They are answered as outside:
    `given` are the caller's objects, by the identities of those that the function has. `functions` are the program's:
    the builtins are replaced in their modules, for torch and the recorder ask too, some 30 times an operator; for all
    where code may get at them in another way."""
    if "__hash__" in asked:
        refuse("its code asks for `__hash__` by name")
    names = asked.intersection(_ASKERS)
    spaces = list({id(one.__globals__): one.__globals__ for one in functions}.values()) if names else []
    if any(not _ANY_BUILTIN.isdisjoint(names_in(one.__code__)) for one in functions if names):
        spaces = [vars(builtins)]
    replaced = [(space, name) for space in spaces for name in names if space is vars(builtins) or name not in space]
    watchers = {name: _watched(name, given, refuse) for name in names}
    for space, name in replaced:
        space[name] = watchers[name]
    try:
        yield
    finally:
        for space, name in replaced:
            if space is vars(builtins):
                space[name] = _ASKERS[name]
            elif space.get(name) is watchers[name]:  # the program may have made a global of this name
                del space[name]


def _watched(name: str, given: Mapping[int, Any], refuse: Callable[[str], None]) -> Callable[[Any], int]:
    answer, identity = _ASKERS[name], _ASKERS["id"]

    def ask(value: Any, /) -> int:
        within = value if type(value) in (tuple, frozenset) else (value,)
        is_given = any(identity(item) in given for item in within)
        if is_given and not sys._getframe(1).f_code.co_filename.startswith(NOT_THE_PROGRAM):
            refuse(f"it asks an argument for its identity ({name})")
            value = given.get(identity(value), value)
        return int(answer(value))

    return ask

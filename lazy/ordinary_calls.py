"""Calls about ordinary tensors: whether a call is one, its arguments as programs take them, its results as callers do.

Invariant: nothing here changes an argument; a tensor that stands for another holds the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torchlazy.lazy.plain_objects import closed, opened
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private import flatten_tree, unflatten_tree

_TENSOR = torch.Tensor


def is_about_ordinary(function: Callable[..., Any], leaves: Sequence[Any]) -> bool:
    """Whether the call is about ordinary tensors, which are recorded under `lazy_mode`: those among its arguments, and
    of the modules that it is bound to or names. False where there are none at all."""
    named = [leaf for leaf in leaves if isinstance(leaf, (_TENSOR, torch.nn.Module))]
    named += [value for value in _named_by(function) if isinstance(value, (_TENSOR, torch.nn.Module))]
    tensors: list[torch.Tensor] = []
    for value in named:
        first = value if isinstance(value, _TENSOR) else next(value.parameters(), None)
        tensors += [] if first is None else [first]
    return bool(tensors) and not any(isinstance(t, LazyTensor) and t._geometry.device == LAZY for t in tensors)


def _named_by(function: Any) -> Iterable[Any]:
    """The callable itself, the object that it is bound to, and what its closure and its code's globals hold."""
    yield function
    yield getattr(function, "__self__", None)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty as yet
            continue
    code = getattr(function, "__code__", None)
    for name in code.co_names if code is not None else ():
        yield function.__globals__.get(name)


def in_ordinary_tensors(recorder: Recorder, value: Any) -> Any:
    """What a call under `lazy_mode` gave, with the ordinary tensors that its lazy ones stand for."""
    leaves, spec = flatten_tree(opened(value))

    def plainly(leaf: Any) -> Any:
        if isinstance(leaf, LazyTensor) and leaf._geometry.device != LAZY and leaf.grad_fn is None:
            real = recorder.real(leaf, "result of a compiled call")
            return real.requires_grad_() if leaf.requires_grad else real
        return leaf

    plain = [plainly(leaf) for leaf in leaves]
    if all(now is then for now, then in zip(plain, leaves, strict=True)):
        return value
    return closed(unflatten_tree(plain, spec))

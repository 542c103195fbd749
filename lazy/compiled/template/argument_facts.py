"""What a captured call depends on in its arguments: their structure, geometry, aliasing, graphs and plain values.

Invariant: two calls with equal facts get arguments of one structure, geometry and aliasing.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torchlazy.lazy.record.tensor import OWN_ATTRIBUTES, LazyTensor, attributes_of
from torchlazy.lazy.trace.geometry import is_dense, kind_of
from torchlazy.lazy.trace.library_code import is_library

_TENSOR = torch.Tensor
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_BY_VALUE = frozenset(
    {int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
     torch.memory_format, range, type(...)}
)  # fmt: skip
_SPELLED = frozenset({int, float, bool, complex, str, bytes, type(None)})


def facts_of(leaves: Sequence[Any], free: set[str]) -> list[Any] | str:
    """What a template depends on in the arguments, in a form that hashes; a reason where it cannot be known.

    `free`: names of the arguments whose value does not matter, numbers that are inputs of the programs. A native check
    compares the same facts of most arguments (`ArgumentCheck`, runtime/native/recorder/replayed_call.h): a fact added
    here must be added there, too.
    """
    try:
        return _facts_of(leaves, free)
    except RuntimeError as error:
        return f"torch does not give the graph of an argument: {error}"


def _facts_of(leaves: Sequence[Any], free: set[str]) -> list[Any] | str:
    found: list[Any] = []
    storages: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        kind = type(leaf)
        if isinstance(leaf, _TENSOR) and _has_hooks(leaf):
            return f"argument {position} has hooks, whose Python a replay would not run"
        if isinstance(leaf, LazyTensor):
            storage = leaf._storage_
            first = storages.setdefault(id(storage), position)
            same = position if first == position else _first_like(leaf, leaves)
            found.append((leaf._geometry, storage.base, first, same, *_graph_facts(leaf)))
            if not OWN_ATTRIBUTES.issuperset(leaf.__dict__):
                found.append(_attribute_facts(leaf))
        elif isinstance(leaf, _TENSOR):
            if kind not in _PLAIN or not is_dense(leaf):
                return f"argument {position} is a {kind.__name__}, {kind_of(leaf)}"
            memory = leaf.untyped_storage()
            first = storages.setdefault(memory._cdata, position)
            same = position if first == position else _first_like(leaf, leaves)
            found.append(
                (kind, leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device,
                 memory.nbytes(), first, same, leaf.is_conj(), leaf.is_neg(), *_graph_facts(leaf))
            )  # fmt: skip
            if leaf.__dict__:
                found.append(_attribute_facts(leaf))
        elif (kind is float or kind is int) and f"argument {position}" in free:
            found.append(kind)
        elif kind is float:
            found.append((kind, leaf.hex()))
        elif kind is complex:
            found.append((kind, leaf.real.hex(), leaf.imag.hex()))
        elif kind in _BY_VALUE:
            found.append((kind, leaf))
        elif isinstance(leaf, numpy.generic):
            found.append((kind, leaf.tobytes()))
        elif kind is slice:
            found.append((kind, *((type(part), part) for part in (leaf.start, leaf.stop, leaf.step))))
        elif _is_watched(leaf):
            found.append((kind, id(leaf)))
        else:
            return f"argument {position} is a {kind.__module__}.{kind.__qualname__}, whose state guards do not see"
    return found


def _has_hooks(tensor: torch.Tensor) -> bool:
    """Whether Python of the caller's runs when a gradient reaches the tensor."""
    if not tensor.requires_grad:
        return False
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def _first_like(tensor: torch.Tensor, leaves: Sequence[Any]) -> int:
    """The position of the first argument that is this very object."""
    return next(position for position, leaf in enumerate(leaves) if leaf is tensor)


def _attribute_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Attributes that the user set on the object: plain values, and the identities of others."""
    values = [(name, tensor.__dict__[name]) for name in attributes_of(tensor)]
    return tuple([(name, type(v), repr(v) if type(v) in _SPELLED else id(v)) for name, v in values])


def _graph_facts(tensor: torch.Tensor) -> tuple[bool, ...]:
    if not tensor.requires_grad:
        return (False, tensor.is_inference(), tensor.grad is not None)
    is_leaf = tensor.is_leaf
    keeps = not is_leaf and tensor.retains_grad
    return (True, is_leaf, is_leaf and tensor.grad is not None, keeps, isinstance(tensor, torch.nn.Parameter))


def _is_watched(leaf: Any) -> bool:
    """Whether guards follow what the object holds, or there is nothing to follow."""
    if isinstance(leaf, (torch.nn.Module, torch.optim.Optimizer, torch.Generator, type, types.ModuleType)):
        return True
    if isinstance(leaf, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, set, frozenset)):
        return True
    return not is_library(type(leaf)) or hasattr(leaf, "__wrapped__")


__all__ = ["facts_of"]

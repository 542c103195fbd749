"""What a recording of a graph depends on: its tensors' properties, shared memory, numbers, dispatch context.

Most tensors of a call are those of the call before. Of such a tensor only what may change while it stays the same
object is checked again: its memory and geometry (`.data = ...`, `set_`) and whether it needs a gradient.

Invariant: two calls with equal keys may run the same recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.trace.geometry import is_dense

DEVICES = ("cpu", "cuda")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_versions = attrgetter("_version")
_Kept = tuple[Any, bool, int, torch.Size, tuple[int, ...], tuple[Any, ...], int]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether this kind of tensor can be recorded."""
    return (
        type(tensor) in _PLAIN
        and tensor.device.type in DEVICES
        and is_dense(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class CallKinds:
    """The kinds of calls of one graph, as keys; `refs`: the tensors of the last call, weakly."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    @property
    def refs(self) -> list[Any]:
        return [kept[0] for kept in self._kept]

    def key(self, args: Sequence[Any], tensors: Sequence[torch.Tensor], read: Sequence[Any]) -> Any:
        """The kind of this call; None where a tensor is of a kind that is not recorded. `read`: inputs whose values a
        recording depends on."""
        kept = self._kept
        if len(kept) != len(tensors):
            kept = self._kept = [_NOTHING] * len(tensors)
        for position, tensor in enumerate(tensors):
            ref, needs_gradient, address, shape, strides, _, _ = kept[position]
            if (
                ref() is tensor
                and tensor.requires_grad is needs_gradient
                and tensor.data_ptr() == address
                and tensor.shape == shape
                and tensor.stride() == strides
            ):
                continue
            found = _facts(tensor)
            if found is None:
                return None
            kept[position] = found
        memory = [k[6] for k in kept]
        sharing: tuple[int, ...] = ()
        if len(set(memory)) < len(memory):
            first: dict[int, int] = {}
            sharing = tuple(first.setdefault(held, position) for position, held in enumerate(memory))
        values = [a for a in args if not isinstance(a, torch.Tensor)]
        values += [v for t in read if isinstance(t, torch.Tensor) for v in t.detach().reshape(-1).tolist()]
        numbers = tuple([repr((type(a), a.hex() if isinstance(a, float) else a)) for a in values])
        return tuple([k[5] for k in kept]), sharing, numbers, dispatch_context_key()


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each was written to."""
    return list(map(_versions, tensors))


def _facts(tensor: torch.Tensor) -> _Kept | None:
    if type(tensor) not in _PLAIN or not is_dense(tensor):
        return None
    held = tensor.untyped_storage()
    shape, strides, needs_gradient = tensor.shape, tensor.stride(), tensor.requires_grad
    facts = (
        type(tensor), shape, strides, tensor.storage_offset(), tensor.dtype, tensor.device, needs_gradient,
        tensor.is_leaf, tensor.is_inference(), tensor.is_conj(), tensor.is_neg(), held.nbytes(),
    )  # fmt: skip
    return weakref.ref(tensor), needs_gradient, tensor.data_ptr(), shape, strides, facts, held._cdata


_NOTHING: _Kept = (lambda: None, False, 0, torch.Size(()), (), (), 0)


def dispatch_context_key() -> tuple[Any, ...]:
    """The dispatch context that a recording depends on, autocast first: for each of `DEVICES` its dtype, or None."""
    return (
        *[torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in DEVICES],
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), config.rng, config.precision, config.recompute, config.dynamic,
    )  # fmt: skip

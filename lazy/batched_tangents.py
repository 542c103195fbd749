"""Gradients of many tangents at once through a joint: `torch.autograd.grad(..., is_grads_batched=True)`, or in `vmap`.

A joint's backward is a program for one tangent: it runs once for each, and what it gives is put together again.

Invariant: what comes back is batched as what came in was, at the same level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Maybe = torch.Tensor | None
# Who holds a batch, and in which dimension: torch has no public name for it. Of its two implementations the older one
# serves `is_grads_batched`, the newer one `torch.func`.
_newer: Any = torch._C._functorch
_private: Any = torch._C
_OLDER_KEY: Any = torch._C._dispatch_key_parse("Batched")


def is_batched(tangents: Sequence[Maybe]) -> bool:
    """Whether there is a batch of some tangent."""
    plain = (g for g in tangents if type(g) is torch.Tensor)  # a batch of lazy tensors is no lazy tensor
    return any(_newer.is_batchedtensor(g) or _is_of_older(g) for g in plain)


def one_by_one(backward: Callable[[list[Maybe]], Sequence[Maybe]], tangents: Sequence[Maybe]) -> list[Maybe]:
    """What `backward` gives for the innermost batch: it is called for each of its elements."""
    levels = [_newer.maybe_get_level(g) for g in tangents if g is not None and _newer.is_batchedtensor(g)]
    if levels:
        level = max(levels)
        parts = [_of_newer(g, level) for g in tangents]
    else:
        level = _older_level()
        parts = [_of_older(g, level) for g in tangents]
    size = next(len(part) for part in parts if isinstance(part, tuple))
    found = []
    for number in range(size):
        found.append(list(backward([part[number] if isinstance(part, tuple) else part for part in parts])))
    together = _newer._add_batch_dim if levels else torch._add_batch_dim
    return [_together(values, level, together) for values in zip(*found, strict=True)]


def _of_newer(tangent: Maybe, level: int) -> tuple[torch.Tensor, ...] | Maybe:
    if tangent is None or not _newer.is_batchedtensor(tangent) or _newer.maybe_get_level(tangent) != level:
        return tangent
    parts: tuple[torch.Tensor, ...] = _newer.get_unwrapped(tangent).unbind(_newer.maybe_get_bdim(tangent))
    return parts


def _is_of_older(tensor: torch.Tensor) -> bool:
    return bool(_private._dispatch_keys(tensor).has(_OLDER_KEY))


def _older_level() -> int:
    level: int = _private._vmapmode_increment_nesting() - 1
    _private._vmapmode_decrement_nesting()
    return level


def _of_older(tangent: Maybe, level: int) -> tuple[torch.Tensor, ...] | Maybe:
    if tangent is None or not _is_of_older(tangent):
        return tangent
    parts: tuple[torch.Tensor, ...] = torch._remove_batch_dim(tangent, level, 1, 0).unbind()
    return parts


def _together(values: Sequence[Maybe], level: int, batch: Callable[..., torch.Tensor]) -> Maybe:
    there = [value for value in values if value is not None]
    if not there:
        return None
    filled = [torch.zeros_like(there[0]) if value is None else value for value in values]
    return batch(torch.stack(filled), 0, level)


__all__ = ["is_batched", "one_by_one"]

"""Results of a call that are views of what the caller has (an argument, state, another result); storing gradients.

Invariant: such a result is a view in autograd's eyes as well, with the version counter of its base, so that a write to
one of them, under autograd or not, is one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.autograd_layout import have_one_version
from torchlazy.lazy.torch_private.dispatch import memory_key
from torchlazy.lazy.torch_private.distributed import whole_of
from torchlazy.lazy.trace.geometry import Geometry, bits_of, is_dense, show_bits


def roots(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, and what it is a view of."""
    base = tensor._base if tensor._is_view() else None
    return [tensor] if base is None else [tensor, base]


def bases_in(leaves: Sequence[Any], state: Sequence[torch.Tensor]) -> dict[int, t.Result]:
    """What views may be views of, by identity, as a replay finds it: a tensor of the same memory serves as well."""
    found: dict[int, t.Result] = {}
    for position, leaf in enumerate(leaves):
        for root in roots(leaf) if isinstance(leaf, torch.Tensor) else ():
            found.setdefault(id(root), t.SameArgument(position))
    for tensor in state:
        for root in roots(tensor):
            found.setdefault(id(root), t.SameObject(tensor))
    return found


def seen_in(base: torch.Tensor, geom: Geometry, offset: int) -> torch.Tensor:
    """The view of `base`; one that was made without a graph where `base` needs gradients."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not base.requires_grad):
        bits = bits_of(base) ^ geom.bits
        return show_bits([base.as_strided(geom.shape, geom.strides, offset)], bits)[0]


def detached_from(tensor: LazyTensor, others: Iterable[Any], is_on: Callable[[torch.Tensor], bool]) -> Any:
    """The first of the others that the tensor is detached from (`x.detach()`): no view of it, but a write to one of
    them counts as one to the other. `is_on`: whether one has the tensor's memory. None where there is none."""
    if tensor._is_view() or not tensor.is_leaf or tensor.is_inference():
        return None
    for other in others:
        is_like = isinstance(other, torch.Tensor) and other is not tensor and other.dtype == tensor.dtype
        if is_like and not other.is_inference() and is_on(other) and have_one_version(tensor, other):
            return other
    return None


def plain_result(
    tensor: LazyTensor, real: torch.Tensor, plainly: Callable[[Any], Any], given: Iterable[Any] = ()
) -> torch.Tensor:
    """The memory of a result that needs no gradient from outside, as the caller gets it: a view of what the caller has
    where the result is one, a parameter where it is one. `plainly` gives its base; `given` is what it may be detached
    from."""
    base = tensor._base if tensor._is_view() and not tensor.requires_grad else None
    key = memory_key(real)
    origin = detached_from(
        tensor, given, lambda x: not isinstance(x, LazyTensor) and is_dense(x) and memory_key(x) == key
    )
    if origin is not None:
        return as_leaf(tensor, seen_in(origin, tensor._geometry, int(real.storage_offset())).detach(), plainly)
    if isinstance(base, LazyTensor):
        base = plainly(base)
    if (
        base is not None
        and not isinstance(base, LazyTensor)
        and base.dtype == tensor.dtype
        and base.untyped_storage()._cdata == real.untyped_storage()._cdata
    ):
        found = seen_in(base, tensor._geometry, int(real.storage_offset()))
        if found.data_ptr() == real.data_ptr():
            return found
    return as_leaf(tensor, real, plainly)


def as_inference(real: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory as `inference_mode` makes them: without a version, and autograd refuses it."""
    if real.is_inference():
        return real
    with torch.inference_mode():
        made = torch.empty(0, dtype=real.dtype, device=real.device)
        return made.set_(real.untyped_storage(), real.storage_offset(), real.shape, real.stride())  # type: ignore[call-overload, no-any-return]


def as_leaf(tensor: LazyTensor, found: torch.Tensor, plainly: Callable[[Any], Any]) -> torch.Tensor:
    """The memory of a result as a parameter where that is one, needing gradients where it does, with the gradient that
    it has."""
    if tensor.is_inference():
        return as_inference(found)
    if isinstance(tensor, torch.nn.Parameter):
        found = torch.nn.Parameter(found, tensor.requires_grad)
    elif tensor.requires_grad:
        found.requires_grad_()
    if tensor.requires_grad and tensor.grad is not None:
        found.grad = plainly(tensor.grad)
    return found


class SetGrad:
    """Stores a gradient."""

    def __init__(self, owner: torch.Tensor) -> None:
        self._owner = owner

    def __call__(self, value: Any) -> None:
        self._owner.grad = value


class SetDistributedGrad(SetGrad):
    """Stores a part of a gradient as the gradient that it is a part of."""

    def __init__(self, owner: torch.Tensor, like: Any) -> None:
        super().__init__(owner)
        self._whole = whole_of(like)

    def __call__(self, value: Any) -> None:
        super().__call__(self._whole(value))


__all__ = ["SetDistributedGrad", "SetGrad"]

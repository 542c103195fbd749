"""Argument views, which are parts of larger memory: the copies that replace them in programs, and the way back.

A batch cut out of a data set is at another offset at each call, and a program that depended on the offset would serve
one call only. Such a view is copied into memory of its own before the call.

Invariant: a copy has the view's values, and its dimensions nest exactly where the view's do: `view` works on the one
where it works on the other, and what must copy the one must copy the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.trace.geometry import bits_of, is_dense, show_bits

_TENSOR = torch.Tensor
_GAP = 16  # bytes between rows that are not adjacent: rows of a copy are aligned as rows without gaps would be


def copy_argument_views(leaves: list[Any]) -> list[Any]:
    """The arguments, with copies of ordinary tensors that are views of larger memory. Those that need gradients stay,
    and all do where two arguments share memory."""
    windows: list[int] = []
    memories: list[int] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, _TENSOR) and not isinstance(leaf, LazyTensor) and is_dense(leaf):
            memory = leaf.untyped_storage()
            memories.append(memory._cdata)
            is_window = memory.nbytes() != leaf.numel() * leaf.element_size()
            if type(leaf) is _TENSOR and not leaf.requires_grad and is_window:
                windows.append(position)
    if not windows or len(set(memories)) < len(memories):
        return leaves
    found = list(leaves)
    for position in windows:
        found[position] = _copied(leaves[position])
    return found


def _copied(window: torch.Tensor) -> torch.Tensor:
    """A copy on memory of its own; the view itself where elements of it share memory."""
    if window.is_contiguous() or not window.numel():
        return window.clone()
    strides = _close_strides(window)
    if strides is None:
        return window
    if strides == window.stride() and 0 not in strides:
        return window.clone(memory_format=torch.preserve_format)
    once = window
    for axis, stride in enumerate(strides):
        if not stride:  # one row that is seen many times
            once = once.narrow(axis, 0, 1)
    made = torch.empty_strided(once.shape, strides, dtype=window.dtype, device=window.device).copy_(once)
    return made.expand(window.shape).data  # of version 0, which shows what the call writes


def _close_strides(window: torch.Tensor) -> tuple[int, ...] | None:
    """Strides without the memory that lies between the view's rows; None where elements share memory."""
    gap = max(1, _GAP // window.element_size())
    made = [0] * window.dim()
    touching, touching_now = 1, 1  # the stride of a dimension adjacent to those so far; and in the copy
    axes = sorted((stride, axis) for axis, stride in enumerate(window.stride()) if stride and window.shape[axis] > 1)
    for stride, axis in axes:
        if stride < touching:
            return None
        made[axis] = touching_now if stride == touching else touching_now + gap
        touching, touching_now = stride * window.shape[axis], made[axis] * window.shape[axis]
    inner = 1
    for axis in reversed(range(window.dim())):  # strides of single elements do not matter: those of a contiguous tensor
        if window.shape[axis] == 1:
            made[axis] = inner
        inner = max(inner, made[axis] * window.shape[axis])
    return tuple(made)


@dataclass(frozen=True, eq=False)
class ArgumentView:
    """An argument `given`, the copy that replaces it, and an `alias` of the copy as it was made."""

    given: torch.Tensor
    copy: torch.Tensor
    alias: torch.Tensor

    def is_changed(self) -> bool:
        """Whether the copy has another shape or other strides by now (`t_`, `unsqueeze_`)."""
        return self.copy.shape != self.alias.shape or self.copy.stride() != self.alias.stride()

    def seen(self, view: torch.Tensor) -> torch.Tensor | None:
        """The view of the argument that `view` is of its copy; None where it is of another dtype."""
        return view_of_argument(self.given, self.alias, view)

    def take_over_gradient(self, plainly: Callable[[Any], Any]) -> None:
        """Apply what the call did to the copy's gradient to the argument's."""
        given = self.given
        if self.copy.requires_grad != given.requires_grad:
            given.requires_grad_(self.copy.requires_grad)
        if self.copy.grad is not None:
            given.grad = plainly(self.copy.grad)
        if self.copy.requires_grad:  # results of the call may lead a backward to the copy

            def move(copy: torch.Tensor) -> None:
                assert copy.grad is not None
                given.grad = copy.grad if given.grad is None else given.grad + copy.grad
                copy.grad = None

            self.copy.grad = None
            self.copy.register_post_accumulate_grad_hook(move)

    def take_over_writes(self, windows: Sequence[ArgumentView]) -> bool:
        """Apply what the call did to the copy to the argument, one of `windows`; whether it did anything. Writes by
        `.data` and NumPy did not raise the version."""
        raised = self.copy._version  # it was new when the call began
        if not raised and _memory(self.copy) == _memory(self.alias) and _have_equal_bytes(self.copy, self.given):
            return False
        given = self.given
        wanted = None if given.is_inference() else given._version + raised
        if _memory(self.copy) == _memory(given):  # it was set to the argument's memory
            if self.copy.shape != given.shape or self.copy.stride() != given.stride():
                given.as_strided_(self.copy.shape, self.copy.stride(), self.copy.storage_offset())
        elif _memory(self.copy) != _memory(self.alias) and (self.copy.numel() == self.alias.numel() or not raised):
            ArgumentView(given.data, self.alias, self.alias)._take_over()
            given.data = _seen_by_caller(self.copy, windows)
        else:
            self._take_over()
        while wanted is not None and given._version < wanted:
            torch.autograd.graph.increment_version(given)
        return True

    def _take_over(self) -> None:
        if self.copy.numel() != self.alias.numel():  # `out=` of another size
            self.given.resize_(self.copy.shape)
            self.given.data.copy_(self.copy)
            return
        seen = self.seen(self.copy) if self.is_changed() else None
        if seen is not None:
            self.given.as_strided_(seen.shape, seen.stride(), seen.storage_offset())
        fill(self.given.data, self.copy)


def fill(window: torch.Tensor, copy: torch.Tensor) -> None:
    """Write the copy's values into the view."""
    for axis in range(window.dim()):
        if window.shape[axis] > 1 and not window.stride(axis):  # one row that is seen many times
            window, copy = window.narrow(axis, 0, 1), copy.narrow(axis, 0, 1)
    window.copy_(copy)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _seen_by_caller(tensor: torch.Tensor, windows: Sequence[ArgumentView]) -> torch.Tensor:
    """The tensor, or the view of an argument that it is of the copy."""
    behind = [window for window in windows if _memory(window.alias) == _memory(tensor)]
    seen = behind[0].seen(tensor) if behind else None
    return tensor.data if seen is None else seen.data


def _have_equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or any(x.is_conj() or x.is_neg() for x in (a, b)):
        return False
    # A size of 1 keeps its stride when it is made contiguous.
    first, second = (x.detach().contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)


def view_of_argument(window: torch.Tensor, copy: torch.Tensor, view: torch.Tensor) -> torch.Tensor | None:
    """The view of the argument `window` that `view` is of its copy; None where it is of another dtype."""
    if view.dtype != window.dtype:
        return None
    axes = sorted((axis for axis in range(copy.dim()) if copy.shape[axis] > 1), key=copy.stride, reverse=True)

    def place(address: int) -> int:
        found = int(window.storage_offset())
        for axis in axes:
            if copy.stride(axis):
                index, address = divmod(address, copy.stride(axis))
                found += index * window.stride(axis)
        return found

    start = int(view.storage_offset())
    strides = [
        place(start + stride) - place(start) if size > 1 else stride
        for size, stride in zip(view.shape, view.stride(), strict=True)
    ]
    return show_bits([window.as_strided(view.shape, strides, place(start))], bits_of(view))[0]

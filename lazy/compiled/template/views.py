"""Argument views, which are parts of larger memory: the copies that replace them in programs, and the way back.

A batch cut out of a data set is at another offset at each call, and a program that depended on the offset would serve
one call only. Such a view is copied into memory of its own before the call.

Invariant: a copy has the view's values and strides: `view` works on the one where it works on the other, what must copy
the one must copy the other, and whatever asks for its layout gets the view's answer. Only its address is another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo
from torchlazy.lazy.trace.geometry import bits_of, is_dense, show_bits

_TENSOR = torch.Tensor
_MOST_GAPS = 8  # times the elements, that a copy may span: a column of a wide table stays where it is
_SMALL = 1 << 18  # elements: a copy may always span as many


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


def are_on(held: Sequence[Any], given: Sequence[Any], leaves: Sequence[Any]) -> bool:
    """Whether a copy among the leaves stands for an argument view on the memory of one of the tensors held."""
    if given is leaves:
        return False
    memories = {_memory(x) for x in held if isinstance(x, _TENSOR) and is_dense(x) and not isinstance(x, LazyTensor)}
    return any(a is not b and _memory(a) in memories for a, b in zip(given, leaves, strict=True))


def _copied(window: torch.Tensor) -> torch.Tensor:
    """A copy on memory of its own with the view's values and strides; the view itself where its elements share memory,
    or where the gaps between them would make the copy much larger."""
    if bits_of(window) or not _is_disjoint(window):
        return window
    once = window
    for axis, stride in enumerate(window.stride()):
        if not stride and window.shape[axis] > 1:  # one row that is seen many times
            once = once.narrow(axis, 0, 1)
    span = 1 + sum((size - 1) * stride for size, stride in zip(once.shape, once.stride(), strict=True))
    if span > max(_SMALL, _MOST_GAPS * once.numel()):
        return window
    made = torch.empty_strided(once.shape, once.stride(), dtype=window.dtype, device=window.device).copy_(once)
    if DEVICE.is_marked(window):
        DEVICE.mark(made)
    return made.expand(window.shape).data  # of version 0, which shows what the call writes


def _is_disjoint(window: torch.Tensor) -> bool:
    """Whether no two elements share memory, but for rows that are repeated."""
    covered = 1
    for stride, size in sorted(zip(window.stride(), window.shape, strict=True)):
        if stride and size > 1:
            if stride < covered:
                return False
            covered = stride * size
    return True


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

    def take_over_graph(self, values: torch.Tensor) -> None:
        """Let the argument have the graph that writes under autograd gave the copy, or what the call saw of the copy
        until it had the argument itself."""
        copy, given = self.copy, self.given
        if copy.grad_fn is None or given.requires_grad or copy.shape != given.shape:
            return
        with torch.enable_grad():
            given.copy_(_WithGraph.apply(copy, values.detach()))  # type: ignore[no-untyped-call]

    def take_over_writes(self, windows: Sequence[ArgumentView]) -> bool:
        """Apply what the call did to the copy to the argument, one of `windows`; whether it did anything. Writes by
        `.data` and NumPy did not raise the version."""
        raised = self.copy._version  # it was new when the call began
        if not raised and _memory(self.copy) == _memory(self.alias) and _have_equal_bytes(self.copy, self.given):
            return False
        given = self.given
        counted = given.grad_fn is not None  # the write that took over the graph
        wanted = None if given.is_inference() else given._version + raised - counted
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


class _WithGraph(torch.autograd.Function):
    """Values, with the graph of another tensor of their shape."""

    @staticmethod
    def forward(ctx: Any, of: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


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


exclude_from_dynamo(_WithGraph.forward, _WithGraph.backward)

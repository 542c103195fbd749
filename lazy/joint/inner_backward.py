"""Keeps graphs and `grad`s intact while a backward is only recorded, ahead of the call's own backward.

Python code in a backward (the user's functions, hooks) may run torch's engine itself: on a graph that it kept, which
eager's one backward frees, or through leaves, whose `grad` it adds to. And it may write to what the forward saved.

Invariant: afterwards graphs are intact, what they saved has the versions that it had, and leaves have the gradients
that they had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torchlazy.lazy.torch_private.autograd_layout import set_versions
from torchlazy.lazy.torch_private.dispatch import flatten_tree


@contextlib.contextmanager
def retain_graphs() -> Iterator[None]:
    """Inside, no run of torch's engine frees its graph. `torch.autograd.backward` and `grad` both call this function,
    and torch has no public hook before both."""
    module: Any = torch.autograd
    run = module._engine_run_backward

    def keeping(outputs: Any, gradients: Any, retain_graph: bool, *args: Any, **kwargs: Any) -> Any:
        return run(outputs, gradients, True, *args, **kwargs)

    module._engine_run_backward = keeping
    try:
        yield
    finally:
        module._engine_run_backward = run


@contextlib.contextmanager
def without_gradients(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, the leaves begin with no gradient; afterwards they have those that they had."""
    kept = gradients_of(leaves)
    try:
        _set(leaves, [None] * len(leaves))
        yield
    finally:
        _set(leaves, kept)


@contextlib.contextmanager
def keep_versions(outputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Afterwards what the graphs of these tensors saved has the versions that it had: torch refuses a backward whose
    saved tensors were written to, be it by a backward that was only recorded."""
    saved = {id(tensor): tensor for node in nodes_of([x.grad_fn for x in outputs]) for tensor in saved_by(node) or ()}
    before = [(tensor, tensor._version) for tensor in saved.values() if not tensor.is_inference()]
    try:
        yield
    finally:
        written = [(tensor, version) for tensor, version in before if tensor._version != version]
        set_versions([tensor for tensor, _ in written], [version for _, version in written])


def saved_by(node: Any) -> list[torch.Tensor] | None:
    """The tensors that a node of a graph holds for its backward; None where hooks pack them: they may hold anything."""
    found = [vars(node)] if hasattr(node, "__dict__") else []
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            raw = getattr(node, name)
            if any(saved.unpack_hook is not None for saved in (raw if isinstance(raw, tuple | list) else (raw,))):
                return None
            found.append(getattr(node, _unpacked_name(name)))
        except RuntimeError:  # freed, or written to: its backward will say so
            continue
    return [leaf for leaf in flatten_tree(found)[0] if isinstance(leaf, torch.Tensor)]


def holds_saved(node: Any) -> bool | None:
    """Whether a node still holds what it saved; None where it saves no tensor."""
    for raw_name in dir(node):
        if not raw_name.startswith("_raw_saved_"):
            continue
        try:
            raw = getattr(node, raw_name)
            several = raw if isinstance(raw, tuple | list) else (raw,)
            if any(saved.unpack_hook is not None for saved in several):
                return True
            value = getattr(node, _unpacked_name(raw_name))
        except RuntimeError as gone:
            if "freed" in str(gone):
                return False
            continue
        values = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(item, torch.Tensor) for item in values):
            return True
    return None


def _unpacked_name(raw_name: str) -> str:
    """The attribute of a node that unpacks what this one holds."""
    return raw_name.removeprefix("_raw" if raw_name != "_raw_saved_tensors" else "_raw_")


def gradients_of(leaves: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The leaves' `grad`, read without a mode seeing it as a read of the program."""
    with torch._C.DisableTorchFunction():
        return [None if leaf is None else leaf.grad for leaf in leaves]


def _set(leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    with torch._C.DisableTorchFunction():
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def nodes_of(nodes: Iterable[Any], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """These nodes of a graph, and all that their gradients flow to, each once, short of `ends`."""
    pending, seen = list(nodes), set(ends)
    while pending:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        yield current
        pending += [following for following, _ in current.next_functions]


def nodes_from(node: Any) -> set[Any]:
    """The nodes of a graph: this one, and all that its gradient flows to."""
    return set(nodes_of([node]))


__all__ = [
    "gradients_of",
    "holds_saved",
    "keep_versions",
    "nodes_from",
    "nodes_of",
    "retain_graphs",
    "saved_by",
    "without_gradients",
]

"""Tensors held for a backward as autograd's own nodes hold them; code whose saved tensors are no concern of hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_autograd: Any = torch._C._autograd


def saved(tensor: torch.Tensor) -> Any:
    """`unpack()` gives the tensor with its graph, by the hooks that packed it, and raises if it was written to since.

    Why private: `save_for_backward`, the public way, lets go after the first backward.
    """
    return _autograd._make_saved_tensor(tensor, False)


def graph_is_kept() -> bool:
    """Whether the backward that runs was called with `retain_graph`.

    Why private: torch tells nodes only by freeing what they saved.
    """
    return bool(_autograd._get_current_graph_task_keep_graph())


@contextlib.contextmanager
def unseen_by_hooks() -> Iterator[None]:
    """Inside, hooks of saved tensors that the program set (checkpoints set some, and count) are not there.

    Why private: only the innermost ones can be left in public, by who entered them.
    """
    taken = []
    while _autograd._saved_tensors_hooks_is_enabled() and (hooks := _autograd._top_saved_tensors_default_hooks(False)):
        taken.append(hooks)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            _autograd._push_saved_tensors_default_hooks(*hooks)


__all__ = ["graph_is_kept", "saved", "unseen_by_hooks"]

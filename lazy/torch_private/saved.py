"""Tensors held for a backward as autograd's own nodes hold them."""

from __future__ import annotations

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


__all__ = ["graph_is_kept", "saved"]

"""Views of which torch refuses to tell the graph: one of several that an operator gave (`chunk`, `unbind`), when the
memory was written to without autograd.

Invariant: eager gives such a view to whoever asks, and raises at the first operator on it that needs its graph; so do
compiled calls, which have no template for it.
"""

from __future__ import annotations

from typing import Any

import torch

UNTOLD = object()


def graph_of(tensor: torch.Tensor) -> Any:
    """The node that made the tensor, None for a leaf; `UNTOLD` where torch raises."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return UNTOLD


__all__ = ["UNTOLD", "graph_of"]

"""What the values of ordinary tensors come from, in a captured call: equal histories are equal values.

Invariant: two tensors have one history only where the same operators gave their values, from values of one history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchlazy.lazy.traced_numbers import node_of


def histories_before(args: Any, history: Callable[[torch.Tensor], Any]) -> Callable[[int, int], tuple[Any, ...]]:
    """A function from (element, number of elements) to the histories that a written element's new value comes from."""
    before = [
        [history(item) for item in value]
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value)
        else history(value) if isinstance(value, torch.Tensor) else ("constant", _mapped_text(value))
        for value in args
    ]  # fmt: skip

    def of(position: int, count: int) -> tuple[Any, ...]:
        return tuple(
            value[position] if isinstance(value, list) and len(value) == count else _frozen(value) for value in before
        )

    return of


def _mapped_text(value: Any) -> Any:
    """A constant in a form that compares. Numbers of one expression each are one; lists of equal numbers are one."""
    items = [_mapped_text(item) for item in value] if isinstance(value, (list, tuple)) else None
    if items is not None:
        return items[0] if items and all(item == items[0] for item in items) else tuple(items)
    node = node_of(value)
    return node.expression if node is not None else repr(value)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

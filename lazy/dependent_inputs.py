"""Gradients by several tensors of which one was computed from another: each is a variable of its own.

A function of `x` and `y` has a gradient by each, whatever `y` is made of. torch's engine sees one graph: asked for both
at once, what reaches `y` flows on to `x`, and is there twice once the function's own gradients are sent back.

Invariant: inside `kept_apart`, nothing flows from one of the tensors into what it was computed from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torchlazy.lazy.joint_form import CannotRecordJoint


@contextlib.contextmanager
def kept_apart(wanted: Sequence[Any]) -> Iterator[None]:
    """`wanted`: tensors or gradient edges. CannotRecordJoint where Python code stands between two of them: it would run
    for nothing."""
    edges = [torch.autograd.graph.get_gradient_edge(w) if isinstance(w, torch.Tensor) else w for w in wanted]
    dependent = _dependent(edges)
    hooks = [edge.node.register_prehook(_without(edge.output_nr)) for edge in dependent]
    try:
        yield
    except CannotRecordJoint:
        raise
    except Exception as error:  # a hook between the two got no gradient where it always gets one
        if dependent:
            raise CannotRecordJoint(f"one input is computed from another, with code between them: {error}") from error
        raise
    finally:
        for hook in hooks:
            hook.remove()


def _without(number: int) -> Any:
    """A hook that stops the gradient of one output of a node."""
    return lambda gradients: tuple(None if i == number else g for i, g in enumerate(gradients))


def _is_of_a_user(node: Any) -> bool:
    """Whether the node runs code that is not ours: the backward of an earlier compiled call runs nothing where no
    gradient reaches it."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    made_by = getattr(type(node), "_forward_cls", None)
    return made_by is None or not made_by.__module__.startswith("torchlazy.")


def _dependent(edges: Sequence[Any]) -> list[Any]:
    """The edges from which others are reached."""
    inner = [edge for edge in edges if edge.node.next_functions]
    if not inner or len(edges) < 2:
        return []
    nodes = {edge.node for edge in edges}
    found = []
    for edge in inner:
        seen: set[Any] = set()
        stack = [following for following, _ in edge.node.next_functions]
        reaches = False
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            reaches = reaches or node in nodes
            stack.extend(following for following, _ in node.next_functions)
        if not reaches:
            continue
        if any(map(_is_of_a_user, (*seen, edge.node))):
            raise CannotRecordJoint("one input is computed from another by an autograd.Function")
        found.append(edge)
    return found

"""Up to which order calls of a compiled callable are captured with gradients, and what happens where more are needed.

Invariant: gradients of an order that a call was not captured with come from the call itself, run once more, or are an
error; later calls are captured with that order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torchlazy.lazy.compiled.capture.call import Captured
from torchlazy.lazy.compiled.replay.again import CalledAgain, called_again
from torchlazy.lazy.compiled.template.objects import flatten_open
from torchlazy.lazy.compiled.template.template import JointRun

_MAX_NODES = 20_000
_TENSOR = torch.Tensor


class GradientOrders:
    """`orders`: 1 where no call needed gradients of gradients. `more` receives the reason for capturing calls again."""

    def __init__(self, function: Callable[..., Any], label: str, more: Callable[[str], None]) -> None:
        self.orders = 1
        self._function, self._label, self._more = function, label, more

    def watch(self, captured: Captured) -> None:
        """Where the captured call's backward runs with `create_graph`, later captures record a double backward, and one
        order more where the double backward does too."""
        assert captured.template is not None
        if not captured.template.steps or not isinstance(captured.template.steps[-1], JointRun):
            return

        def watch(nodes: Iterable[Any], order: int) -> None:
            def seen(found: Sequence[Any], _: Any) -> None:
                if torch.is_grad_enabled():
                    self._wants(order + 1)
                    watch([t.grad_fn for t in found if isinstance(t, _TENSOR) and t.grad_fn is not None], order + 1)

            for node in nodes:
                node.register_hook(seen)

        results = [t for t in flatten_open(captured.value)[0] if isinstance(t, _TENSOR)]
        # A gradient of a gradient may bypass the results' own operators: the last layer of a tower is linear.
        watch(_nodes_behind([t.grad_fn for t in results if t.grad_fn is not None]), 1)

    def _wants(self, orders: int) -> None:
        """From now on calls are captured with gradients up to this order."""
        if self.orders < orders:
            self.orders = orders
            self._more(f"captured again: gradients of order {orders - 1} were asked for with create_graph=True")

    def deeper(
        self,
        template: Any,
        structure: Any,
        given: Sequence[Any],
        wanted: Sequence[Any],
        versions: tuple[int, ...] | None = None,
    ) -> Any:
        """What computes gradients of an order that a replay of the template was not captured with."""
        again = (
            None if structure is None else called_again(self._function, template, structure, given, wanted, versions)
        )
        return functools.partial(self._no_double, again)

    def _no_double(self, again: CalledAgain | None, tangents: Sequence[Any]) -> Any:
        """Gradients of an order that the call was not captured with, of one replay: it runs once more where that is
        certain to give the same; later calls are captured with that order."""
        self._wants(len(tangents) + 1)
        found = again.gradients(tangents[0]) if again is not None and len(tangents) == 1 else None
        if found is not None:
            return found
        raise RuntimeError(
            f"torchlazy.compile: {self._label} was captured without gradients of its gradients of order "
            f"{len(tangents)}, which a backward with create_graph=True now needs / call it again: from now on it is "
            "captured with them"
        )


def _nodes_behind(nodes: Sequence[Any]) -> list[Any]:
    """The nodes of autograd's graph from these down to its leaves, at most `_MAX_NODES`."""
    found = {node: None for node in nodes}
    waiting = list(found)
    while waiting and len(found) < _MAX_NODES:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in found and not hasattr(following, "variable"):
                found[following] = None
                waiting.append(following)
    return list(found)

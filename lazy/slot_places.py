"""Where the slots of a trace lie in its loop graph: which buffer holds which value of the trace, as the trace has it.

Invariant: a buffer that is told to hold a slot holds its value with its shape and dtype; most slots have no buffer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx
from torchlazy.inductor.lowerings.value import Value
from torchlazy.lazy.trace import CutTrace
from torchlazy.prims.meta import TensorMeta

_SLOT = "slot"
"""The key of `node.meta`; passes copy it to what takes a node's place, which is the same value."""


class SlotPlaces:
    """Follows slots through the stages: each is handed the tables that stages fill."""

    def __init__(self, trace: CutTrace) -> None:
        self.trace = trace
        self.aten: dict[int, fx.Node] = {}  # by slot
        self.prims: dict[fx.Node, Any] = {}  # by node of the ATen graph
        self.lowered: dict[fx.Node, Any] = {}  # by node of the final graph

    def mark(self) -> None:
        """After decomposition: the primitives' nodes are told which slots they are."""
        for number in sorted(self.aten):
            node = self.prims.get(self.aten[number])
            if isinstance(node, fx.Node):
                node.meta.setdefault(_SLOT, number)

    def by_buffer(self) -> dict[str, int]:
        """After lowering: the slot that each buffer holds."""
        found: dict[str, int] = {}
        bearers = Counter(node.meta.get(_SLOT) for node in self.lowered if "copy_of" not in node.meta)
        for node, value in self.lowered.items():
            number = node.meta.get(_SLOT)
            if number is None or not isinstance(value, Value) or value.window is None:
                continue
            if bearers[number] > 1:
                continue  # a pass made several nodes of one, of which only the last is the value
            meta, own = node.meta["val"], self.trace.geometries[number].meta
            if not isinstance(meta, TensorMeta) or (meta.shape, meta.dtype, meta.device) != (
                own.shape, own.dtype, own.device
            ):  # fmt: skip
                continue
            if value.window.is_whole and value.is_stored_as_told:
                name = value.window.root.name
                found[name] = min(number, found.get(name, number))
        return found

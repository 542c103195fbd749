"""What a lowering rule may do beside compute: emit loop nodes, put values into memory, hand them to extern calls.

Invariant: nodes are emitted in an order that respects dependencies; every buffer is written by one node; a value is put
into memory at most once for each layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torchlazy.inductor import choices
from torchlazy.inductor.index import ZERO, Index
from torchlazy.inductor.ir import Buffer, BufferRef, ExternNode, LoopNode, Node, ViewNode
from torchlazy.inductor.lowerings.value import (
    LoweredValue,
    MemoryView,
    Scope,
    buffer_value,
    count,
    is_overlapping,
    window_value,
)
from torchlazy.inductor.ops_handler import OpsHandler
from torchlazy.prims.errors import place_of
from torchlazy.prims.meta import Dim, TensorMeta, contiguous_strides
from torchlazy.prims.promotion import COMPUTED
from torchlazy.prims.size_int import surely_equal

Result: TypeAlias = "LoweredValue | tuple[LoweredValue | None, ...]"
Rule: TypeAlias = "Callable[[Context, fx.Node, tuple[LoweredValue, ...]], Result]"


class LoweringError(Exception):
    """A graph cannot be lowered.

    Cause: it is not a legal graph of primitives, or a donation names what is no input. Fix: what the message ends
    with; run `prims.verify` on the graph first.
    """

    @staticmethod
    def at(node: fx.Node, what: str, remedy: str) -> LoweringError:
        """The error for one graph node."""
        return LoweringError(f"lower: {what}\n  {place_of(node)}\n  {remedy}")


@dataclass
class Context:
    """The growing loop graph. `device` is where loops run; inputs elsewhere are moved there before loops read them."""

    device: str
    names: set[str]
    order: dict[str, int]  # graph node name -> position, for the origins of a node
    origin_text: dict[str, str]
    nodes: list[Node] = field(default_factory=list)
    _stored: dict[tuple[LoweredValue, tuple[Dim, ...]], LoweredValue] = field(default_factory=dict)
    _views: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _moved: dict[tuple[str, str], Buffer] = field(default_factory=dict)
    _counter: int = 0

    def new_name(self) -> str:
        """A buffer name that no input has."""
        while True:
            name = f"buf{self._counter}"
            self._counter += 1
            if name not in self.names:
                self.names.add(name)
                return name

    def new_buffer(self, meta: TensorMeta, strides: tuple[Dim, ...] | None = None, device: str | None = None) -> Buffer:
        """A buffer for values of `meta`; on the loops' device unless told another."""
        device = self.device if device is None else device
        return Buffer(self.new_name(), meta.dtype, meta.shape, meta.strides if strides is None else strides, device)

    def origins(self, chain: frozenset[str]) -> tuple[str, ...]:
        """The graph nodes of a chain in graph order, as comments."""
        return tuple(self.origin_text[name] for name in sorted(chain, key=self.order.__getitem__))

    # --- emitting ---

    def mark_late(self, first: int) -> None:
        """The loops emitted from position `first` on compute values again."""
        for position, node in enumerate(self.nodes[first:], first):
            if isinstance(node, LoopNode):
                self.nodes[position] = replace(node, is_late=True)

    def emit_pointwise(self, value: LoweredValue, strides: tuple[Dim, ...]) -> LoweredValue:
        """Compute `value` into a new buffer of that layout."""
        buffer = self.new_buffer(value.meta, strides)
        if count(buffer.shape) == 0:
            self.emit_empty(buffer)
        elif value.meta.dtype not in COMPUTED:
            self._emit_copy(value, buffer)
        else:

            def body(ops: OpsHandler[Any], index: Index, reduce_index: Index) -> Any:
                return Scope(ops).load(value, index)

            self.nodes.append(LoopNode((buffer,), buffer.shape, body, origins=self.origins(value.chain)))
        return buffer_value(buffer)

    def _emit_copy(self, value: LoweredValue, buffer: Buffer) -> None:
        """A window copied by ATen: loops have no complex numbers, nor those of eight bits."""
        if value.window is None:
            raise LoweringError(
                f"{buffer.name}: {value.meta.dtype} values are not computed in loops; leave the operator extern"
            )
        template = self.new_buffer(value.meta, buffer.strides)
        self.emit_empty(template)
        source = BufferRef(self.emit_view(value.window))
        self.emit_extern(torch.ops.aten.copy.default, (BufferRef(template.name), source), {}, (buffer,))

    def emit_empty(self, buffer: Buffer) -> None:
        """A buffer whose elements nobody computed: no kernel."""
        kwargs = {"dtype": buffer.dtype, "device": torch.device(buffer.device)}
        op = torch.ops.aten.empty_strided.default
        self.nodes.append(ExternNode(op, (buffer.shape, buffer.strides), kwargs, (buffer,)))

    def emit_extern(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
        outputs: tuple[Buffer | None, ...], origin: str | None = None,
    ) -> None:  # fmt: skip
        """One ATen call; operands are `BufferRef`s already."""
        self.nodes.append(ExternNode(op, args, kwargs, outputs, () if origin is None else (self.origin_text[origin],)))

    # --- putting values into memory ---

    def store(self, value: LoweredValue, strides: tuple[Dim, ...] | None = None) -> LoweredValue:
        """`value` in a buffer of its own with that layout (by default the one its metadata names)."""
        strides = value.meta.strides if strides is None else strides
        key = (value, strides)
        if key not in self._stored:
            window = self.emit_pointwise(self.loadable(value), strides).window
            assert window is not None
            self._stored[key] = window_value(value.meta, window)  # the metadata's device, wherever loops run
        return self._stored[key]

    def in_memory(self, value: LoweredValue) -> LoweredValue:
        """`value` as a window on memory with the layout of its metadata: as it lies if it does, else stored."""
        window = value.window
        if window is not None and value.is_stored_as_described:
            return value
        if not is_overlapping(value.shape, value.meta.strides):
            return self.store(value)
        return self._stored_once(value) or self.store(value, contiguous_strides(value.shape))

    def _stored_once(self, value: LoweredValue) -> LoweredValue | None:
        """A value that is told to repeat itself (stride 0, an expanded mask): what it repeats in the strides told, seen
        through a window that repeats it. None where its memory overlaps in another way."""
        shape, strides = value.shape, value.meta.strides
        repeats = tuple(surely_equal(stride, 0) and not surely_equal(size, 1) for size, stride in zip(shape, strides))
        once = tuple(1 if repeated else size for size, repeated in zip(shape, repeats))
        if is_overlapping(once, strides):
            return None
        key = (value, strides)
        if key not in self._stored:

            def loader(scope: Scope, index: Index) -> Any:
                return scope.load(value, tuple(ZERO if repeated else i for i, repeated in zip(index, repeats)))

            own = tuple(1 if repeated else stride for stride, repeated in zip(strides, repeats))
            first = LoweredValue(replace(value.meta, shape=once, strides=own), loader, None, value.chain, value.reads)
            window = self.emit_pointwise(self.loadable(first), own).window
            assert window is not None
            self._stored[key] = window_value(value.meta, replace(window, shape=shape, strides=strides))
        return self._stored[key]

    def free_layout(self, value: LoweredValue) -> tuple[Dim, ...]:
        """Strides for a value whose layout nobody outside asks for: those of what it is computed from."""
        return value.meta.strides if value.layout is None else value.layout

    def operand_ref(self, value: LoweredValue) -> BufferRef:
        """A reference to `value` for an extern call, in the layout and on the device that its metadata names."""
        value = self.in_memory(value)
        window = value.window
        assert window is not None
        if window.root.device != value.meta.device:
            window = self.moved_window(window, value.meta.device)
        # Of an axis of size 1 any stride reads the same elements, but kernels of attention check them all.
        told = zip(window.shape, window.strides, value.meta.strides, strict=True)
        strides = tuple(stride if surely_equal(size, 1) else own for size, own, stride in told)
        if window.is_whole and strides == window.root.strides:
            return BufferRef(window.root.name)
        return BufferRef(self.emit_view(replace(window, strides=strides)))

    def emit_view(self, window: MemoryView) -> str:
        """The name of a buffer that shows `window`; one for equal windows."""
        root = window.root
        key = (root.name, window.shape, window.strides, window.offset)
        if key not in self._views:
            buffer = Buffer(self.new_name(), root.dtype, window.shape, window.strides, root.device, window.offset)
            self.nodes.append(ViewNode(buffer, root.name))
            self._views[key] = buffer.name
        return self._views[key]

    # --- devices ---

    def moved(self, buffer: Buffer, device: str) -> Buffer:
        """A copy of `buffer` on another device: loops read one device's memory only."""
        key = (buffer.name, device)
        if key not in self._moved:
            copy = Buffer(self.new_name(), buffer.dtype, buffer.shape, buffer.strides, device)
            kwargs = {"device": torch.device(device)}
            self.emit_extern(torch.ops.aten._to_copy.default, (BufferRef(buffer.name),), kwargs, (copy,))
            self._moved[key] = copy
        return self._moved[key]

    def moved_window(self, window: MemoryView, device: str) -> MemoryView:
        """The same window on a copy of its buffer on another device."""
        root = self.moved(window.root, device)
        return MemoryView(root, window.shape, window.strides, window.offset - window.root.offset)

    def loadable(self, value: LoweredValue) -> LoweredValue:
        """`value` as loops may read it: a 0-dim CPU tensor among CUDA ones is moved to theirs."""
        if value.window is None or value.window.root.device == self.device:
            return value
        return window_value(value.meta, self.moved_window(value.window, self.device))

    # --- limits ---

    def bounded(self, operands: tuple[LoweredValue, ...]) -> tuple[LoweredValue, ...]:
        """The operands of one more op, the longest of them stored while the inlined chain would be too long."""
        operands = tuple(self.loadable(operand) for operand in operands)
        while _too_long(operands):
            longest = max(operands, key=lambda o: (len(o.chain), len(o.reads)))
            if not longest.chain:
                break
            stored = self.store(longest, self.free_layout(longest))
            operands = tuple(stored if operand is longest else operand for operand in operands)
        return operands


def _too_long(operands: tuple[LoweredValue, ...]) -> bool:
    if sum(len(o.chain) for o in operands) < choices.MAX_CHAIN_OPS and sum(len(o.reads) for o in operands) <= (
        choices.MAX_CHAIN_READS
    ):
        return False
    ops = frozenset().union(*(o.chain for o in operands))
    reads = frozenset().union(*(o.reads for o in operands))
    return len(ops) >= choices.MAX_CHAIN_OPS or len(reads) > choices.MAX_CHAIN_READS

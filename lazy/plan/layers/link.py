"""Links the loops of units (plan/layers/units.py) to the loops of the whole trace: buffers and inputs are renamed.

Invariant: the linked loops compute what the trace does: each unit computes its part, in the order of the entries, and
what one reads of another is the very buffer that the other makes. What fuses, in which order and in whose memory is
decided afterwards, for the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torchlazy.autograd.halves import HELD, RESULT
from torchlazy.inductor.ir import Body, Buffer, BufferRef, LoopGraph, LoopNode, Node, ViewNode
from torchlazy.inductor.lowering import LINE
from torchlazy.lazy.plan.join_traces import BUFFER, INPUT, SCALAR
from torchlazy.lazy.plan.layers.units import Split, Unit
from torchlazy.lazy.trace.split import SLOT
from torchlazy.lazy.trace.trace import CutTrace, Half, compute_device
from torchlazy.prims.fallback import Fallback


class Unlinkable(Exception):
    """What crosses between two units is no buffer of its own."""


def interface(trace: CutTrace, *, in_memory: bool) -> LoopGraph:
    """The inputs and scalars of a trace, as lowering names them, without any loops; `in_memory`: scalars as inputs."""
    metas = [geometry.meta for _, geometry in trace.inputs]
    inputs = tuple(Buffer(f"{INPUT}{n}", m.dtype, m.shape, m.strides, m.device) for n, m in enumerate(metas))
    scalars = tuple((f"{SCALAR}{n}", kind) for n, kind in enumerate(trace.scalar_kinds))
    if in_memory:
        device = compute_device(trace)
        dtypes = [torch.float64 if kind is float else torch.int64 for _, kind in scalars]
        inputs += tuple(Buffer(name, t, (), (), device) for (name, _), t in zip(scalars, dtypes, strict=True))
        scalars = ()
    return LoopGraph(inputs, scalars, (), ())


def link(
    trace: CutTrace, found: Split, planned: Sequence[tuple[Unit, Sequence[LoopGraph]]], given: LoopGraph
) -> tuple[LoopGraph, ...]:
    """The loops of the trace, or of both its halves. `planned`: for each unit an equal one and its loops, of one
    range or of two; `given`: the trace's `interface`."""
    linker = _Linker(trace, given)
    ranges = sorted((at, number, late) for number, unit in enumerate(found.units) for late, at in enumerate(unit.at))
    cut = len(ranges) if found.cut is None else sum(at < found.cut for at, _, _ in ranges)
    for _, number, late in ranges[:cut]:
        linker.add(number, found.units[number], *planned[number], late)
    early = len(linker.nodes)
    linker.read.clear()
    for _, number, late in ranges[cut:]:
        linker.add(number, found.units[number], *planned[number], late)
    outputs = tuple(name for _, name in sorted(linker.outputs.items()))
    if trace.half is None:
        return (replace(given, nodes=tuple(linker.nodes), outputs=outputs, donations=linker.donations),)
    return linker.halves(given, early, outputs, trace.half)


def fallbacks_at(unit: Unit, like: Unit, found: Sequence[Fallback]) -> Iterator[Fallback]:
    """What stays a library call in a unit, from what does in an equal one: at its own lines of the user's program."""
    places = iter(enumerate(like.trace.frames))
    for one in found:
        at = next((at for at, frame in places if frame == one.frame and str(like.trace.entries[at].op) == one.op), None)
        yield one if at is None else replace(one, frame=unit.trace.frames[at])


class _Linker:
    """`read`: the names that the loops so far read, those of their own units apart."""

    def __init__(self, trace: CutTrace, given: LoopGraph) -> None:
        self._trace = trace
        self.nodes: list[Node] = []
        self.outputs: dict[int, str] = {}
        self.donations: dict[str, str] = {}
        self.read: dict[str, None] = {}
        self._values: dict[int, str] = {}  # by slot that crosses
        self._names: dict[int, dict[str, str]] = {}  # by unit
        self._buffers = {buffer.name: buffer for buffer in given.inputs}
        self._next = 0

    def add(self, number: int, unit: Unit, like: Unit, graphs: Sequence[LoopGraph], late: int) -> None:
        """The loops of one range of a unit."""
        graph, half = graphs[late], unit.trace.half
        names = {f"{SCALAR}{place}": f"{SCALAR}{scalar}" for place, scalar in enumerate(unit.scalars)}
        for place, (kind, source) in enumerate(unit.sources):
            if kind == SLOT and source not in self._values:
                continue  # made between the two ranges
            names[f"{INPUT}{place}"] = self._values[source] if kind == SLOT else f"{INPUT}{source}"
        before = self._names.get(number, {})
        if late:
            assert half is not None
            first = graphs[0].outputs
            names |= {f"{RESULT}{place}": before[name] for place, name in enumerate(first[: half.outputs])}
            names |= {f"{HELD}{place}": before[name] for place, name in enumerate(first[half.outputs :])}
        for buffer in graph.inputs:
            self._check(names[buffer.name], buffer)
        self.read |= dict.fromkeys(names[buffer.name] for buffer in graph.inputs)
        self.read |= dict.fromkeys(names[name] for name, _ in graph.scalars)
        start = self._next
        for node in graph.nodes:
            for buffer in outputs_of(node):
                at = start + int(buffer.name.removeprefix(BUFFER))
                names[buffer.name] = f"{BUFFER}{at}"
                self._next = max(self._next, at + 1)
        lines = {old: new for old, new in zip(like.trace.frames, unit.trace.frames, strict=True) if old != new}
        for node in graph.nodes:
            renamed = rename(node, names, lines)
            self.nodes.append(renamed)
            self._buffers.update((buffer.name, buffer) for buffer in outputs_of(renamed))
        self.donations |= {names[name]: names[target] for name, target in graph.donations.items()}
        self._names[number] = before | names
        split_at = len(unit.outputs) if half is None else half.outputs
        places = unit.outputs[split_at:] if late else unit.outputs[:split_at]
        for (kind, place), name in zip(places, graph.outputs, strict=False):  # then what is held for the second range
            if kind == SLOT:
                self._values[place] = names[name]
            else:
                self.outputs[place] = names[name]
                self._values.setdefault(self._trace.outputs[place][0].number, names[name])

    def _check(self, name: str, read: Buffer) -> None:
        made = self._buffers[name]
        if made.offset or made.meta != read.meta:
            raise Unlinkable(f"{name} is {made.meta} at {made.offset}, read as {read.meta}")

    def halves(self, given: LoopGraph, early: int, outputs: tuple[str, ...], half: Half) -> tuple[LoopGraph, ...]:
        """The loops before the cut, which give what crosses after their results, and those after it."""
        first, second = tuple(self.nodes[:early]), tuple(self.nodes[early:])
        made = {buffer.name for node in first for buffer in outputs_of(node)}
        shown, later = outputs[: half.outputs], outputs[half.outputs :]
        donated = {name: target for name, target in self.donations.items() if name not in made}
        read = {*self.read, *later, *donated.values()}
        crossing = sorted(made & read, key=lambda name: int(name.removeprefix(BUFFER)))
        buffers = [self._buffers[name] for name in crossing]
        for buffer in buffers:
            self._check(buffer.name, replace(buffer, offset=0))
        inputs = (*buffers, *(buffer for buffer in given.inputs if buffer.name in read))
        scalars = tuple((name, kind) for name, kind in given.scalars if name in read)
        overwritten = {name: target for name, target in self.donations.items() if name in made}
        if not set(overwritten.values()).isdisjoint(read):
            raise Unlinkable("an input is read after the cut that is overwritten before it")
        held = tuple(name for name in crossing if name not in shown)
        there = {*(f"{INPUT}{n}" for n in range(half.inputs)), *(f"{SCALAR}{n}" for n in range(half.scalars))}
        own = tuple(buffer for buffer in given.inputs if buffer.name in there)
        numbers = tuple((name, kind) for name, kind in given.scalars if name in there)
        return (
            LoopGraph(own, numbers, first, (*shown, *held), overwritten),
            LoopGraph(inputs, scalars, second, later, donated),
        )


def outputs_of(node: Node) -> tuple[Buffer, ...]:
    """The buffers that a node makes."""
    if isinstance(node, ViewNode):
        return (node.output,)
    return node.outputs if isinstance(node, LoopNode) else tuple(b for b in node.outputs if b is not None)


def rename(node: Node, names: Mapping[str, str], lines: Mapping[str, str]) -> Node:
    """The node under other names of what it reads and makes, and of other lines of the user's program."""
    origins = tuple(_elsewhere(origin, lines) for origin in node.origins) if lines else node.origins
    if isinstance(node, LoopNode):
        outputs = tuple(_renamed(buffer, names) for buffer in node.outputs)
        return replace(node, outputs=outputs, body=_body(node.body, names), origins=origins, like=(node, names))
    if isinstance(node, ViewNode):
        return ViewNode(_renamed(node.output, names), names[node.source], origins)
    made = tuple(None if buffer is None else _renamed(buffer, names) for buffer in node.outputs)
    args, kwargs = _replaced(node.args, names), _replaced(node.kwargs, names)
    return replace(node, args=args, kwargs=kwargs, outputs=made, origins=origins)


def _elsewhere(origin: str, lines: Mapping[str, str]) -> str:
    name, _, line = origin.partition(LINE)
    return f"{name}{LINE}{lines[line]}" if line in lines else origin


def _renamed(buffer: Buffer, names: Mapping[str, str]) -> Buffer:
    return Buffer(names[buffer.name], buffer.dtype, buffer.shape, buffer.strides, buffer.device, buffer.offset)


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, BufferRef):
        return BufferRef(names[value.name], value.scalar)
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(item, names) for item in value)
    if isinstance(value, dict):
        return {name: _replaced(item, names) for name, item in value.items()}
    return value


def _body(body: Body, names: Mapping[str, str]) -> Body:
    return lambda ops, index, reduce_index: body(_Renaming(ops, names), index, reduce_index)


class _Renaming:
    """A handler to which a body says its own names, and which hears the others."""

    def __init__(self, ops: Any, names: Mapping[str, str]) -> None:
        self._ops, self._names = ops, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def load(self, name: str, index: sympy.Expr) -> Any:
        return self._ops.load(self._names[name], index)

    def scalar(self, name: str, dtype: torch.dtype) -> Any:
        return self._ops.scalar(self._names[name], dtype)

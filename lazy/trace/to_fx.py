"""Converts a trace to an FX graph in the ATen dialect.

Invariant: placeholders are the trace's inputs in order, then its scalars; the outputs are in the trace's order, and
each has exactly the metadata recorded at the cut. Entries that no output needs are left out.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torchlazy.lazy.trace.trace import Complex, CutTrace, Float, ScalarSlot, Slot, slots_in
from torchlazy.prims.meta import ScalarMeta
from torchlazy.prims.plan_graph import PlanGraph

_copy = torch.ops.aten.copy.default
_ones_like = torch.ops.aten.ones_like.default
_empty_strided = torch.ops.aten.empty_strided.default


def trace_to_graph(
    trace: CutTrace, *, backward: int | None = None, nodes: dict[int, fx.Node] | None = None
) -> fx.Graph:
    """The ATen graph of `trace`: placeholders `in0..`, `scalar0..`, functional overloads, a tuple of outputs.

    `backward` is the position of the entry with which the backward begins (None: it is searched); `nodes` is filled
    with the node of each slot.
    """
    graph = PlanGraph()
    env: dict[int, fx.Node] = {} if nodes is None else nodes
    for position, (number, geom) in enumerate(trace.inputs):
        node = graph.placeholder(f"in{position}")
        node.meta["val"] = geom.meta
        env[number.number] = node
    scalars = []
    for position, kind in enumerate(trace.scalar_kinds):
        node = graph.placeholder(f"scalar{position}")
        node.meta["val"] = ScalarMeta(kind)
        scalars.append(node)
    needed = needed_entries(trace)
    backward = backward_begins(trace) if backward is None else backward

    def argument(value: Any) -> Any:
        kind = type(value)
        if kind is Slot:
            return env[value.number]
        if kind is ScalarSlot:
            return scalars[value.number]
        if kind is Float:
            return value.value
        if kind is Complex:
            return complex(value)
        if kind is tuple:
            return [argument(item) for item in value]
        return value

    def bind(outputs: Any, node: fx.Node, frame: str) -> None:
        if type(outputs) is Slot:
            env[outputs.number] = node
            return
        for position, item in enumerate(outputs or ()):
            if not slots_in(item):
                continue
            part = graph.call_function(operator.getitem, (node, position))
            part.meta["val"] = node.meta["val"][position]
            part.meta["frame"] = frame
            if "stage" in node.meta:
                part.meta["stage"] = node.meta["stage"]
            bind(item, part, frame)

    def metas(outputs: Any) -> Any:
        if type(outputs) is Slot:
            return trace.geometries[outputs.number].meta
        return None if outputs is None else tuple(metas(item) for item in outputs)

    for position, entry in enumerate(trace.entries):
        if position not in needed:
            continue
        frame = trace.frames[position] if position < len(trace.frames) else ""
        args = tuple(argument(a) for a in entry.args)
        kwargs = {name: argument(value) for name, value in entry.kwargs}
        node = graph.call_function(entry.op, args, kwargs)
        node.meta["val"] = metas(entry.outputs)
        node.meta["frame"] = frame
        if backward is not None:
            node.meta["stage"] = "backward" if position >= backward else "forward"
        bind(entry.outputs, node, frame)
    graph.output(tuple(_with_recorded_layout(graph, env[number.number], geom) for number, geom in trace.outputs))
    return graph


def _with_recorded_layout(graph: fx.Graph, node: fx.Node, geom: Any) -> fx.Node:
    """The output in the layout recorded at the cut, by a copy where the value has another one."""
    if node.meta["val"] == geom.meta:
        return node
    template = graph.call_function(
        _empty_strided,
        (list(geom.shape), list(geom.strides)),
        {"dtype": geom.dtype, "device": torch.device(geom.compute)},
    )
    template.meta["val"] = geom.meta
    template.meta["frame"] = ""
    copied = graph.call_function(_copy, (template, node))
    copied.meta["val"] = geom.meta
    copied.meta["frame"] = node.meta.get("frame", "")
    return copied


def backward_begins(trace: CutTrace) -> int | None:
    """The position of the first operator that autograd's engine recorded, or None where there is no backward.

    The engine starts with ones in the shape of the loss and soon calls an operator whose name says backward; being off
    by a few operators costs a worse choice of what to keep, never a wrong value.
    """
    named = (i for i, entry in enumerate(trace.entries) if "backward" in entry.op.name())
    first = next(named, None)
    if first is None:
        return None
    seeds = [i for i in range(first) if trace.entries[i].op is _ones_like]
    return seeds[-1] if seeds else first


def needed_entries(trace: CutTrace) -> frozenset[int]:
    """Positions of the entries that some output depends on."""
    return trace.needed

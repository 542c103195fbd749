"""From a graph of primitives to a loop graph.

Each value of the graph is either a window on memory or a recipe that its consumers inline (`lowerings/value.py`). A
plan says which recipes to put into memory (`lowerings/plan.py`), one rule a primitive says how its elements are
computed (`lowerings/*.py`), and the outputs come last (`lowerings/outputs.py`).

Invariant: the loop graph computes what the graph of primitives does (`interpret.run` against `prims.eager.run`); nodes
stand in an order that respects dependencies; loops read and write memory of one device only.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx
from torchlazy.inductor.ir import Buffer, LoopGraph
from torchlazy.inductor.lowerings import assemble, indexing, pointwise, reduction, view
from torchlazy.inductor.lowerings.context import Context, LoweringError, Result, Rule
from torchlazy.inductor.lowerings.extern import lower_extern
from torchlazy.inductor.lowerings.outputs import lower_outputs
from torchlazy.inductor.lowerings.plan import LoweringPlan, is_extern, memory_dtype_of, plan_realization
from torchlazy.inductor.lowerings.value import LoweredValue, buffer_value
from torchlazy.prims.meta import ScalarMeta, TensorMeta
from torchlazy.prims.ops import Prim

LINE = "  # "
"""Between the name and the user's line of a node's origin."""
COPY_OF = "copy_of"
"""The key of `node.meta` of a value that is computed again, so that it is not held meanwhile."""

RULES: dict[str, Rule] = {
    **pointwise.RULES,
    **view.RULES,
    **assemble.RULES,
    **indexing.RULES,
    **reduction.RULES,
}


def lower(graph: fx.Graph, *, donations: Mapping[int, str] | None = None) -> LoopGraph:
    """The loop graph of a graph of primitives.

    `donations` maps an output's position to the placeholder whose memory it shall be written into.
    """
    inputs, scalars = _collect_inputs(graph)
    context = _make_context(graph)
    plan = plan_realization(graph)
    values: dict[fx.Node, Any] = {}
    results: tuple[fx.Node, ...] = ()
    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(node.meta["val"], TensorMeta):
                values[node] = buffer_value(inputs[node.name])
        elif node.op == "call_function":
            first = len(context.nodes)
            values[node] = _lower_node(context, plan, node, values)
            if COPY_OF in node.meta:
                context.mark_late(first)
        elif node.op == "output":
            results = tuple(node.args[0])
        else:
            raise LoweringError.at(
                node, f"a node of kind {node.op!r}", "a graph of primitives has none; lift it to an input"
            )
    outputs, donated = lower_outputs(context, results, values, donations or {})
    return LoopGraph(tuple(inputs.values()), scalars, tuple(context.nodes), outputs, donated)


def _collect_inputs(graph: fx.Graph) -> tuple[dict[str, Buffer], tuple[tuple[str, type], ...]]:
    buffers: dict[str, Buffer] = {}
    scalars: list[tuple[str, type]] = []
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        meta = node.meta["val"]
        if isinstance(meta, ScalarMeta):
            scalars.append((node.name, meta.kind))
        else:
            buffers[node.name] = Buffer(node.name, meta.dtype, meta.shape, meta.strides, meta.device)
    return buffers, tuple(scalars)


def _make_context(graph: fx.Graph) -> Context:
    order = {node.name: position for position, node in enumerate(graph.nodes)}
    names = {node.name for node in graph.nodes if node.op == "placeholder"}
    texts = {node.name: _origin(node) for node in graph.nodes if node.op == "call_function"}
    return Context(_loop_device(graph), names, order, texts)


def _origin(node: fx.Node) -> str:
    frame = node.meta.get("frame")
    name = getattr(node.target, "__name__", str(node.target))
    return f"{name}{LINE}{frame}" if frame else name


def _loop_device(graph: fx.Graph) -> str:
    """Where loops run: the first device that is no CPU, since a 0-dim CPU tensor may stand among tensors elsewhere."""
    for node in graph.nodes:
        metas = node.meta.get("val")
        for meta in metas if isinstance(metas, tuple) else (metas,):
            if isinstance(meta, TensorMeta) and meta.device != "cpu":
                return meta.device
    return "cpu"


def _lower_node(context: Context, plan: LoweringPlan, node: fx.Node, values: dict[fx.Node, Any]) -> Result:
    if node.target is operator.getitem:
        value = values[node.args[0]][node.args[1]]  # type: ignore[index]
    elif not isinstance(node.target, Prim):
        raise LoweringError.at(node, f"target {node.target} is no primitive", "decompose the graph first")
    elif is_extern(node):
        return lower_extern(context, node, values)
    else:
        rule = RULES.get(node.target.name)
        if rule is None:
            raise LoweringError.at(node, f"no rule for {node.target.name}", "add one to inductor/lowerings")
        value = rule(context, node, _operands(context, node, values))
    if isinstance(value, LoweredValue) and value.window is None and node.name in plan.stored:
        fixed = node.name in plan.fixed
        rounded = memory_dtype_of(node)
        if not fixed and rounded != value.meta.dtype:
            return pointwise.stored_rounded(context, value, rounded)
        return context.in_memory(value) if fixed else context.store(value, context.free_layout(value))
    return value


def _operands(context: Context, node: fx.Node, values: dict[fx.Node, Any]) -> tuple[LoweredValue, ...]:
    """The operands of a rule; those that became too long are stored, for later consumers too."""
    nodes = [arg for arg in node.args if isinstance(arg, fx.Node)]
    operands = context.bounded(tuple(values[arg] for arg in nodes))
    for arg, operand in zip(nodes, operands, strict=True):
        if values[arg].window is None:
            values[arg] = operand
    return operands

"""A joint graph: one function's forward and its backward in one graph, and how it is split in two.

The graph is ATen's: placeholders are the inputs (primals), the gradients of the outputs (tangents) and runtime scalars;
the results are the forward's, then the backward's. The split names the forward values that are saved; the backward
computes again what it reads of the rest.

An input may have changed by the time the backward runs, and an output may be gone or written to. The backward counts on
one of them only where it reads it itself, as eager's autograd does, which raises in that case.

Invariant: a split is closed: each value that the backward half reads is a tangent, an input that it may count on,
saved, or computed in it; and nothing is computed twice that must not be.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx
from torchlazy.autograd.cost import Recompute, is_alias, recompute_kind, storage_of
from torchlazy.autograd.partition import cut_values, plan_within
from torchlazy.autograd.plan import RecomputePlan
from torchlazy.autograd.step import BACKWARD, FORWARD, STAGE, TrainingStep, analyse, ancestors
from torchlazy.prims.decompose import decompose
from torchlazy.prims.errors import GraphError
from torchlazy.prims.meta import ScalarMeta


@dataclass(frozen=True)
class JointGraph:
    """An ATen graph whose calls are marked "forward" or "backward" in `meta["stage"]`.

    `results`: how many outputs are the forward's. `tangents`: the placeholders that only the backward has. `changed`:
    the inputs that the forward overwrites.
    """

    graph: fx.Graph
    results: int
    tangents: tuple[fx.Node, ...] = ()
    changed: tuple[fx.Node, ...] = ()

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The results of both halves, in order."""
        found = self.graph.output_node().args[0]
        assert isinstance(found, tuple)
        return tuple(node for node in found if isinstance(node, fx.Node))


@dataclass(frozen=True)
class JointSplit:
    """What crosses. `saved`: forward values that the backward half takes as inputs; `given`: placeholders that it
    reads; `repeated`: forward calls that it runs again; all in the graph's order. `reasons`: why each value is saved.
    """

    saved: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]
    repeated: tuple[fx.Node, ...]
    saved_bytes: int
    reasons: dict[fx.Node, str]


def split_joint(joint: JointGraph, budget: float | int | None = None) -> JointSplit:
    """Choose what to save: the least bytes that cost the backward no pass over memory, or what fits `budget`.

    budget: a share of the bytes between the least that can be held (0.0) and all that eager would hold (1.0), or an int
    of bytes; below what is free, passes and library products are bought back, the cheapest for its bytes first.
    """
    view = _View.of(joint)
    plan = _plan(view, budget)
    chosen = {view.holdable[node]: plan.reasons.get(node, "") for node in plan.saved if node in view.holdable}
    return _close(joint, view, chosen, plan.saved_bytes)


def split_graphs(joint: JointGraph, split: JointSplit) -> tuple[fx.Graph, fx.Graph]:
    """The two halves as graphs of their own. Forward: all placeholders but the tangents, results and saved values.
    Backward: the saved values as placeholders `saved0..`, then `given`; the backward's results."""
    forward, backward = fx.Graph(), fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder" and node not in joint.tangents:
            env[node] = forward.node_copy(node)
        elif node.op == "call_function" and node.meta.get(STAGE) == FORWARD:
            env[node] = forward.node_copy(node, env.__getitem__)
    forward.output(tuple(env[node] for node in (*joint.outputs[: joint.results], *split.saved)))
    env = {}
    for position, node in enumerate(split.saved):
        env[node] = backward.placeholder(f"saved{position}")
        env[node].meta.update(node.meta)
    for node in split.given:
        env[node] = backward.node_copy(node)
    again = dict.fromkeys(split.repeated)
    for node in joint.graph.nodes:
        if node.op == "call_function" and node not in env and (node in again or node.meta.get(STAGE) == BACKWARD):
            env[node] = backward.node_copy(node, env.__getitem__)
    backward.output(tuple(env[node] for node in joint.outputs[joint.results :]))
    for graph in (forward, backward):
        _erase_dead(graph)
    return forward, backward


# --- the joint graph in primitives, seen through the values that ATen operators return ---


@dataclass(frozen=True)
class _View:
    """`holdable`: which primitives stand for values that can be saved, and for which. `parts`: the primitives that
    stand for a node's results."""

    step: TrainingStep
    holdable: dict[fx.Node, fx.Node]
    parts: dict[fx.Node, tuple[fx.Node, ...]]

    @staticmethod
    def of(joint: JointGraph) -> _View:
        values: dict[fx.Node, Any] = {}
        prims = decompose(joint.graph, values=values)
        _erase_dead(prims)
        alive = dict.fromkeys(prims.nodes)
        parts = {node: tuple(p for p in _flat(value) if p in alive) for node, value in values.items()}
        step = analyse(prims, lambda node: node.meta.get(STAGE) or FORWARD)
        holdable = _holdable(parts)
        read = _read_by_backward(joint, parts)
        changed = {part for node in joint.changed for part in parts[node]}
        results = {storage_of(part) for node in joint.outputs[: joint.results] for part in parts[node]}
        tensors = {
            part: node
            for node, found in parts.items()
            if node.op == "placeholder" and not isinstance(node.meta["val"], ScalarMeta)
            for part in found
        }
        lost = {part: None for part in (*tensors, *results) if part in changed or part not in read}
        holdable.update({part: node for part, node in tensors.items() if part in lost})
        whole = {part for part, node in holdable.items() if _has_pass(node, parts)}
        step = TrainingStep(
            step.order, step.sides, step.crossing, step.outputs, step.memory_readers, step.chains, step.too_long,
            frozenset(lost), frozenset(whole),
        )  # fmt: skip
        return _View(step, holdable, parts)


def _flat(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _holdable(parts: dict[fx.Node, tuple[fx.Node, ...]]) -> dict[fx.Node, fx.Node]:
    """From primitives to the single values of forward operators that they stand for; views are held as their base."""
    found: dict[fx.Node, fx.Node] = {}
    single = [
        (node, held[0])
        for node, held in parts.items()
        if node.op == "call_function" and node.meta.get(STAGE, FORWARD) == FORWARD and len(held) == 1
        and not isinstance(node.meta["val"], tuple)
    ]  # fmt: skip
    for node, part in single:
        if not is_alias(part) and part.op == "call_function":
            found.setdefault(part, node)
    for node, part in single:
        base = storage_of(part)
        if base is not part and base.op == "call_function" and not _is_view(node):
            found.setdefault(base, node)
    return found


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    return bool(getattr(node.target, "is_view", False))


def _read_by_backward(joint: JointGraph, parts: dict[fx.Node, tuple[fx.Node, ...]]) -> dict[fx.Node, None]:
    """The storages that backward operators are called with, themselves or through views of them."""
    return {
        storage_of(part): None
        for node in joint.graph.nodes
        if node.meta.get(STAGE) == BACKWARD
        for operand in node.all_input_nodes
        for part in parts.get(operand, ())
    }


def _inside(node: fx.Node, parts: dict[fx.Node, tuple[fx.Node, ...]]) -> Iterator[fx.Node]:
    """The primitives that the ATen call became."""
    if node.target is operator.getitem:
        yield from _inside(node.all_input_nodes[0], parts)
        return
    edge = {part for operand in node.all_input_nodes for part in parts.get(operand, ())}
    stack = [*parts.get(node, ())]
    stack += [part for user in node.users if user.target is operator.getitem for part in parts.get(user, ())]
    seen: dict[fx.Node, None] = {}
    while stack:
        part = stack.pop()
        if part in seen or part in edge or part.op != "call_function":
            continue
        seen[part] = None
        yield part
        stack.extend(part.all_input_nodes)


def _has_pass(node: fx.Node, parts: dict[fx.Node, tuple[fx.Node, ...]]) -> bool:
    if node.op != "call_function":
        return False
    dear = (Recompute.PASS, Recompute.PRODUCT, Recompute.NEVER)
    return any(recompute_kind(part) in dear for part in _inside(node, parts))


def _is_repeatable(node: fx.Node, parts: dict[fx.Node, tuple[fx.Node, ...]]) -> bool:
    return all(recompute_kind(part) is not Recompute.NEVER for part in _inside(node, parts))


# --- choosing ---


def _plan(view: _View, budget: float | int | None) -> RecomputePlan:
    return plan_within(view.step, budget, _what_eager_holds(view), cut_values(view.step, view.holdable))


def _what_eager_holds(view: _View) -> dict[fx.Node, None]:
    """Every value that backward reads, and what stands before those that are no values of operators."""
    found: dict[fx.Node, None] = {}
    seen: dict[fx.Node, None] = {}
    stack = list(view.step.crossing)
    while stack:
        base = storage_of(stack.pop())
        if base in seen or view.step.is_available(base):
            continue
        seen[base] = None
        if base in view.holdable:
            found[base] = None
        else:
            stack.extend(base.all_input_nodes)
    return found


# --- closing ---


def _close(joint: JointGraph, view: _View, chosen: dict[fx.Node, str], saved_bytes: int) -> JointSplit:
    """The split that saves `chosen`, as far as it is read, and what cannot be had otherwise."""
    alive = ancestors(joint.outputs[joint.results :])
    tangents = dict.fromkeys(joint.tangents)
    lost = view.step.lost
    saved: dict[fx.Node, None] = {}
    given: dict[fx.Node, None] = {}
    repeated: dict[fx.Node, None] = {}
    reasons: dict[fx.Node, str] = {}
    backward = [node for node in alive if node.op == "call_function" and node.meta.get(STAGE) == BACKWARD]
    stack = [operand for node in backward for operand in node.all_input_nodes]
    stack += [node for node in joint.outputs[joint.results :]]
    seen: dict[fx.Node, None] = {}
    while stack:
        node = stack.pop()
        if node in seen or (node.op == "call_function" and node.meta.get(STAGE) == BACKWARD):
            continue
        seen[node] = None
        if node.op == "placeholder" and (node in tangents or not any(part in lost for part in view.parts[node])):
            given[node] = None
        elif node in chosen or node.op == "placeholder":
            saved[node] = None
            reasons[node] = chosen.get(node) or "an input that may change before backward runs"
        elif not isinstance(node.meta["val"], tuple) and any(
            part in view.step.outputs and part not in lost for part in view.parts[node]
        ):
            saved[node] = None
            reasons[node] = "a result, which backward reads"
        elif isinstance(node.meta["val"], tuple) or _is_view(node) or _is_repeatable(node, view.parts):
            repeated[node] = None
            stack.extend(node.all_input_nodes)
        else:
            saved[node] = None
            reasons[node] = "a library call that is not repeated"
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    arrange = lambda nodes: tuple(sorted(nodes, key=order.__getitem__))  # noqa: E731
    return JointSplit(arrange(saved), arrange(given), arrange(repeated), saved_bytes, reasons)


def _erase_dead(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


__all__ = ["GraphError", "JointGraph", "JointSplit", "split_graphs", "split_joint"]

"""A captured call whose results need gradients: its forward and backward as a joint trace.

Invariant: the call itself continues as it was: its results are pending, with the graph that autograd made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.compiled.capture.autograd_facts import UNKNOWN_GRAPH, graph_leaves_in, graph_of
from torchlazy.lazy.compiled.capture.session import Capture
from torchlazy.lazy.compiled.guards.reached import Reached
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.objects import flatten_open
from torchlazy.lazy.joint.inner_backward import holds_saved, nodes_of, saved_by, without_gradients
from torchlazy.lazy.joint.record import record_joint
from torchlazy.lazy.plan.joint import CannotRecordJoint, RecordedJoint
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import flatten_tree
from torchlazy.lazy.trace.op_schema import is_random
from torchlazy.lazy.trace.storage import LazyStorage

if TYPE_CHECKING:
    from torchlazy.lazy.compiled.capture.call import CallToCapture


@dataclass(frozen=True, eq=False)
class JointCall:
    """The step of the template, and the number of the joint's output for each result of the call, by identity."""

    step: t.JointRun
    numbers: dict[int, int]
    held: frozenset[int] | None  # storages that autograd's graph holds, by identity; None where hooks hide them


def gradient_edges(leaves: Sequence[Any]) -> dict[int, Any]:
    """Where gradients of the arguments arrive: taken before the call, which may change them in place. A tensor that is
    passed twice has one gradient. None for a leaf of a graph, which cannot be changed so: its node, and what the call
    hangs on it, lives only as long as a graph needs it."""
    first: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            first.setdefault(id(leaf), position)
    return {position: None if leaves[position].is_leaf else _edge(leaves[position]) for position in first.values()}


_edge = torch.autograd.graph.get_gradient_edge


def graphs_of(reached: Reached) -> list[tuple[torch.Tensor, Any]]:
    """The tensors of the state that are results of operators, with the node that made each."""
    return [(x, x.grad_fn) for x, _ in reached.tensors.values() if not x.is_leaf]


def refuse_changed_under_autograd(
    capture: Capture, call: CallToCapture, edges: dict[int, Any], graphs: Sequence[tuple[torch.Tensor, Any]]
) -> None:
    """A tensor from outside that the call changed in place under autograd has a graph through the call afterwards,
    which a replay would not make."""
    given = [(call.leaves[position], edge and edge.node) for position, edge in edges.items()]
    for tensor, node in (*given, *graphs):
        if not tensor.is_leaf and tensor.grad_fn is not node:
            capture.refuse("it changes a tensor that is not its own in place under autograd")
            return
    for leaf in call.leaves:
        if (
            isinstance(leaf, torch.Tensor)
            and leaf.grad_fn is not None
            and all(leaf is not t for t, _ in (*given, *graphs))
        ):
            capture.refuse("it changes an argument in place, by values that need gradients")
            return


def joint_run(
    recorder: Recorder, call: CallToCapture, reached: Reached, capture: Capture, value: Any, edges: dict[int, Any]
) -> JointCall | None:
    """The joint of what is recorded where a result needs a gradient from outside; None if refused or not needed."""
    flat, _ = flatten_open(value)
    given = {id(leaf) for leaf in call.leaves} | set(reached.tensors)
    outputs = {id(leaf): leaf for leaf in flat if isinstance(leaf, LazyTensor) and id(leaf) not in given}
    graphs = [(leaf, graph_of(leaf)) for leaf in outputs.values()]
    needing = [leaf for leaf, node in graphs if node is UNKNOWN_GRAPH or (node is not None and not is_freed(node))]
    capture.begun = graph_leaves_in(outputs.values()) if needing else frozenset()
    if any(node is UNKNOWN_GRAPH for _, node in graphs):
        capture.refuse("a result is one of several views, and their memory was written to without autograd")
    if not needing or capture.refused:
        return None
    if capture.begun:
        capture.refuse("a result needs a gradient by a leaf that the call makes, and leaves behind too")
        return None
    if any(tensor is not None and tensor.retains_grad for tensor in (ref() for ref in capture.retaining)):
        capture.refuse("a result needs a gradient, and the gradient of a tensor within is kept for it (retain_grad)")
        return None
    passed = {id(call.leaves[position]) for position in edges}
    state = [x for x, _ in reached.tensors.values() if x.is_leaf and x.requires_grad and id(x) not in passed]
    steps, scalars = len(capture.steps), len(recorder.scalars)
    try:
        into = [edge or _edge(call.leaves[position]) for position, edge in edges.items()]
        # A tensor that keeps its gradient although it is no leaf keeps what arrives at its edge here, too.
        keeping = [x for x in call.leaves if isinstance(x, torch.Tensor) and not x.is_leaf and x.retains_grad]
        with capture.random_again(), without_gradients(keeping):
            recorded = _record(recorder, call, list(outputs.values()), [*state, *into], capture.storages_made(), given)
    except CannotRecordJoint as why:
        capture.refuse(f"a result needs a gradient, and {why}")
        return None
    except Exception as error:  # what its backward raises is for who runs it
        capture.refuse(f"a result needs a gradient, and its backward raises {type(error).__name__}: {error}")
        return None
    numbers = [capture.expression_of(n, v) for n, v in zip(recorded.given, recorded.given_scalars, strict=True)]
    capture.fix_scalars_from(scalars, but=recorded.given)
    if any(not _serves_backward(step) for step in capture.steps[steps:]):
        capture.refuse("a result needs a gradient, and its backward works on ordinary tensors too")
        return None
    inputs = tuple(_input(capture, storage) for storage in recorded.inputs)
    step = t.JointRun(recorded.joint, inputs, (*state, *edges), (*capture.expressions(recorded.scalars), *numbers))
    held: frozenset[int] | None = frozenset()
    if capture.outputs:
        held = capture.quietly(lambda: saved_by_graph([leaf.grad_fn for leaf in needing]))
    return JointCall(step, {key: number for number, key in enumerate(outputs)}, held)


def _serves_backward(step: t.Step) -> bool:
    """Whether a backward may get the step's value from the call: that of an ordinary tensor that was saved, or computed
    from one that the call makes."""
    if isinstance(step, t.ToLazy):
        return step.op is None or _is_of_call(step.source)
    if not isinstance(step, t.HostCall) or step.written or is_random(step.op):
        return False
    return all(_is_of_call(leaf) for leaf in flatten_tree((step.args, dict(step.kwargs)))[0] if _is_host(leaf))


def _is_host(value: Any) -> bool:
    return isinstance(value, t.HostKept | t.HostMade | t.HostArgument)


def _is_of_call(host: t.Host) -> bool:
    return isinstance(host, t.HostMade) or (isinstance(host, t.HostKept) and host.constant)


def _record(
    recorder: Recorder,
    call: CallToCapture,
    outputs: list[LazyTensor],
    wanted: list[Any],
    made: Collection[int],
    known: Collection[int],
) -> RecordedJoint:
    of_call: dict[str, Any] = {"arguments": call.leaves_lazy(), "made": made, "known": known}
    if call.orders > 1:
        try:
            return record_joint(recorder, outputs, wanted, **of_call, orders=call.orders)
        except CannotRecordJoint:  # its gradients alone may still be
            pass
    return record_joint(recorder, outputs, wanted, **of_call)


def _input(capture: Capture, storage: LazyStorage) -> tuple[t.Memory, torch.Tensor | None]:
    memory = capture.memory_of(storage)
    if memory is None:
        capture.refuse("it reads a tensor that neither its arguments nor the names in its code lead to")
        return t.FromStep(0), None
    if not isinstance(memory, t.FromState | t.FromData):
        return memory, None
    return memory, capture.holders[id(storage)]


def held_by_graph(node: Any) -> list[LazyTensor]:
    """The leaves of a graph and their gradients: they live as long as the graph, but cannot be reached through it."""
    found: list[LazyTensor] = []
    for current in nodes_of([node]):
        leaf = getattr(current, "variable", None)
        found += [x for x in (leaf, getattr(leaf, "grad", None)) if isinstance(x, LazyTensor)]
    return found


def saved_by_graph(nodes: Sequence[Any]) -> frozenset[int] | None:
    """The storages that the nodes, and all behind them, hold for their backward, by identity; None where hooks pack
    what is saved: they may hold anything. Nodes that a backward has used up hold nothing."""
    found: set[int] = set()
    for current in nodes_of(nodes):
        saved = saved_by(current)
        if saved is None:
            return None
        found |= {id(leaf._storage_) for leaf in saved if isinstance(leaf, LazyTensor)}
    return frozenset(found)


def is_freed(node: Any) -> bool:
    """Whether a backward has used the graph up: a saved tensor of some node is gone. Hooks of saved tensors do not run
    for the answer: a checkpoint's would compute its region again, with all that the region writes."""
    held = next((held for held in map(holds_saved, nodes_of([node])) if held is not None), True)
    return not held

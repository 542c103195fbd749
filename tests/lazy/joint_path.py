"""Calls a function through its joint graph: recorded once, forward and backward run as two programs.

Invariant: what `JointCall` returns and what flows back through it is what the function itself would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchlazy
from torch.utils import _pytree as pytree
from torchlazy.lazy.api import recorder
from torchlazy.lazy.joint.function import new_seeds, run_joint
from torchlazy.lazy.joint.record import RecordedJoint, record_joint
from torchlazy.lazy.plan.joint import CannotRecordJoint
from torchlazy.lazy.record.tensor import LazyTensor, wrap

_TENSOR = object()


class JointCall:
    """`function` of lazy tensors, recorded at the first call. `parameters`: tensors that it reaches by itself."""

    def __init__(self, function: Callable[..., Any], parameters: Sequence[torch.Tensor] = (), **options: Any) -> None:
        self.function, self.parameters, self.options = function, list(parameters), options
        self.recorded: RecordedJoint | None = None
        self._structure: Any = None

    def tensors(self, args: Sequence[Any]) -> list[LazyTensor]:
        """Every lazy tensor that the call can reach."""
        return [t for t in (*pytree.tree_leaves(args), *self.parameters) if isinstance(t, LazyTensor)]

    def record(self, args: Sequence[Any]) -> RecordedJoint:
        """Run the function under the recorder and record its joint; nothing is computed."""
        recorder.cut("before the joint")
        tensors = self.tensors(args)
        self._differentiable = [i for i, t in enumerate(tensors) if t.requires_grad]
        edges = [torch.autograd.graph.get_gradient_edge(tensors[i]) for i in self._differentiable]
        versions = [t._version for t in tensors]
        epoch = recorder.epoch
        reads = torchlazy.metrics()["reads_apart"]
        with torch.enable_grad():
            result = self.function(*args)
        if torchlazy.metrics()["reads_apart"] != reads:
            raise CannotRecordJoint("the forward reads a value")
        leaves, self._spec = pytree.tree_flatten(result)
        given = {id(t): i for i, t in enumerate(tensors)}
        self._returned = [given.get(id(x)) if isinstance(x, LazyTensor) else None for x in leaves]
        self._leaves = [x if not isinstance(x, LazyTensor) else _TENSOR for x in leaves]
        if any(isinstance(x, torch.Tensor) and x.requires_grad and not isinstance(x, LazyTensor) for x in leaves):
            raise CannotRecordJoint("a result is no lazy tensor")
        outputs = [x for x in leaves if isinstance(x, LazyTensor)]
        self._count = len(outputs)
        changed = [t for t, v in zip(tensors, versions, strict=True) if t._version != v]
        extra = [t for t in changed if all(t is not o for o in outputs)]
        self.recorded = record_joint(recorder, [*outputs, *extra], edges, epoch=epoch, **self.options)
        at = {}
        for i, t in enumerate(tensors):
            at.setdefault(id(t._storage_), i)
        self._inputs = [at.get(id(s), wrap(s, s.base, None, -1)) for s in self.recorded.inputs]
        return self.recorded

    def __call__(self, *args: Any) -> Any:
        if self.recorded is None:
            copies = pytree.tree_map_only(LazyTensor, _twin, args)
            kept = [p.detach().clone() for p in self.parameters]
            self.record(copies)
            recorder.cut("after the joint")
            with torch.no_grad():  # the recorded call ran as well: take back what it wrote
                for p, k in zip(self.parameters, kept, strict=True):
                    p.copy_(k)
            del copies
            return self(*args)
        tensors = self.tensors(args)
        inputs = [tensors[i] if isinstance(i, int) else i for i in self._inputs]
        wanted = [tensors[i] for i in self._differentiable]
        joint = self.recorded.joint
        outputs = run_joint(recorder, joint, inputs, wanted, new_seeds(joint, self.recorded.scalars))
        found = iter(outputs[: self._count])
        leaves = []
        for value, position in zip(self._leaves, self._returned, strict=True):
            made = next(found) if value is _TENSOR else value
            leaves.append(made if position is None else tensors[position])  # an argument is returned as itself
        return pytree.tree_unflatten(leaves, self._spec)


def _twin(tensor: LazyTensor) -> torch.Tensor:
    """A copy that is no leaf, so that the function may write to it."""
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy.clone() if tensor.requires_grad and not tensor.is_leaf else copy

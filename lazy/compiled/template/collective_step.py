"""Collectives in captured calls, as steps of the template.

Invariant: a step names the group, the reduction and the memory of its collective; what can be compared of two steps is
in their facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torchlazy.lazy.compiled.template.template import Collective, Memory, TensorOperand
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.trace.storage import LazyStorage

# In others (messages, barriers) one process may wait for what another one starts later.
_REPLAYED = frozenset(
    f"c10d::{name}"
    for name in (
        "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_", "alltoall_", "alltoall_base_",
    )
)  # fmt: skip


def collective_step(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    memory_of: Callable[[LazyStorage], Memory],
) -> Collective | None:
    """The step of a collective on lazy tensors; None where a replay cannot run it."""
    if op.name() not in _REPLAYED and op.name().rpartition(".")[0] not in _REPLAYED:
        return None
    windows: list[TensorOperand] = []
    facts: list[Any] = []

    def taken(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            windows.append(TensorOperand(memory_of(value._storage_), value._geometry))
            facts.append(value._geometry.meta)
            return windows[-1]
        if isinstance(value, torch.Tensor):
            raise _NotLazyError
        if isinstance(value, (list, tuple)):
            return tuple(map(taken, value))
        facts.append(_fact(value))
        return value

    try:
        given = tuple(map(taken, args))
        named = tuple((name, taken(value)) for name, value in kwargs.items())
    except _NotLazyError:
        return None
    return Collective(op, given, named, tuple(windows), tuple(facts))


class _NotLazyError(Exception):
    pass


def _fact(value: Any) -> Any:
    """The argument in a form that compares: a group by its name. torch does not expose which reduction an object is."""
    if not isinstance(value, torch.ScriptObject):
        return value
    kind = value._type().name()  # type: ignore[attr-defined]
    if kind != "ProcessGroup":
        return kind
    return torch.distributed.ProcessGroup.unbox(value).group_name  # type: ignore[attr-defined]


__all__ = ["collective_step"]

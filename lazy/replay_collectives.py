"""Collectives in captured calls: written down as steps on memory, run again by replays in the order of the call.

Every process of a group must run the same collectives in the same order, whether or not it looks at their results: so
they stand between programs, and none is ever left out. A replay waits for each where it is started; on a GPU that is a
wait of its stream.

Invariant: a captured call's replays run the collectives that the call ran, each once, on the memory that stands for the
call's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torchlazy.lazy.call_template import Collective, FromStep, Memory, Window
from torchlazy.lazy.communicated import COMMUNICATED, Communicated, copies_of
from torchlazy.lazy.plain_objects import tensors_in
from torchlazy.lazy.replay_state import ReplayState, copied, window
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.tensor import LazyTensor

# Of others (messages, barriers) one process may wait for what the other starts later.
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
    """The step of a collective on lazy tensors; None where it is none that a replay can run."""
    if op.name() not in _REPLAYED and op.name().rpartition(".")[0] not in _REPLAYED:
        return None
    windows: list[Window] = []
    facts: list[Any] = []

    def taken(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            windows.append(Window(memory_of(value._storage_), value._geometry))
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
    """What compares: a group by its name. torch does not say which reduction one of its objects is."""
    if not isinstance(value, torch.ScriptObject):
        return value
    kind = value._type().name()  # type: ignore[attr-defined]
    if kind != "ProcessGroup":
        return kind
    return torch.distributed.ProcessGroup.unbox(value).group_name  # type: ignore[attr-defined]


def run_collective(step: Collective, state: ReplayState) -> None:
    """Run it on this replay's memory, and wait for it.

    While the replay may still be given up, what is written is held back, and a copy of it kept: it runs no second time.
    """
    outputs = _windows_in(step.args[0])
    if state.is_open:
        for one in outputs:
            if type(one.memory) is not FromStep and id(state.storage(one.memory)) not in state.held:
                state.hold(one.memory, copied(state.memory(one.memory)))
    written = [window(state.memory(one.memory), one.geometry) for one in outputs]
    if not COMMUNICATED.take(step.op, written):
        run_and_wait(step.op, list(map(state.operand, step.args)), {n: state.operand(v) for n, v in step.kwargs})
    if state.is_open:
        state.communicated.append(Communicated(step.op, copies_of(written)))
        return
    for one in step.windows:
        if type(one.memory) is not FromStep:
            state.storage(one.memory).version += 1


def run_and_wait(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A collective, to its end; on a GPU, until it is in the stream. Its errors name it: no line of the user's runs."""
    try:
        result = op(*args, **kwargs)
        for found in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(found, torch.ScriptObject):
                work = torch.distributed.Work.unbox(found)  # type: ignore[attr-defined]
                if work is not None:  # NCCL gives none for what runs on the current stream
                    work.wait()
    except RuntimeError as error:
        shapes = [tuple(one.shape) for one in tensors_in((args, tuple(kwargs.values())))]
        raise RuntimeError(
            f"{op.name()} of tensors of {shapes}, in a replay of a compiled call: {error}. Is a process of the group "
            "gone, or are its tensors of other shapes?"
        ) from error


def _windows_in(value: Any) -> list[Window]:
    """What a collective writes to is its first argument, a tensor or lists of tensors."""
    if isinstance(value, Window):
        return [value]
    return [found for item in value for found in _windows_in(item)] if isinstance(value, tuple) else []


__all__ = ["collective_step", "run_collective"]

"""Collectives in captured calls: replays run them again in the order of the call.

Every process of a group must run the same collectives in the same order, whether or not it reads their results: so they
stand between programs, and none is ever left out. A replay waits for each where it is started; on a GPU its stream
waits.

Invariant: a captured call's replays run the collectives that the call ran, each once, on the memory that stands for the
call's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torchlazy.lazy.compiled.replay.state import ReplayState, copied, view_over
from torchlazy.lazy.compiled.template.objects import tensors_in
from torchlazy.lazy.compiled.template.template import Collective, FromStep, TensorOperand
from torchlazy.lazy.ops.collective_log import COLLECTIVE_LOG, FinishedCollective, copies_of


def run_collective(step: Collective, state: ReplayState) -> None:
    """Run it on this replay's memory, and wait for it.

    While the replay may still be undone, what is written is held back, and a copy of it kept: it runs no second time.
    """
    outputs = _windows_in(step.args[0])
    if state.is_open:
        for one in outputs:
            if type(one.memory) is not FromStep and id(state.storage(one.memory)) not in state.held:
                state.hold(one.memory, copied(state.memory(one.memory)))
    written = [view_over(state.memory(one.memory), one.geometry) for one in outputs]
    if not COLLECTIVE_LOG.take(step.op, written):
        run_and_wait(step.op, list(map(state.operand, step.args)), {n: state.operand(v) for n, v in step.kwargs})
    if state.is_open:
        state.communicated.append(FinishedCollective(step.op, copies_of(written)))
        return
    for one in step.windows:
        if type(one.memory) is not FromStep:
            state.storage(one.memory).version += 1


def run_and_wait(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A collective, to its end; on a GPU, until it is in the stream. Errors name it, as no line of the user's runs."""
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


def _windows_in(value: Any) -> list[TensorOperand]:
    """What a collective writes to is its first argument, a tensor or lists of tensors."""
    if isinstance(value, TensorOperand):
        return [value]
    return [found for item in value for found in _windows_in(item)] if isinstance(value, tuple) else []


__all__ = ["run_collective"]

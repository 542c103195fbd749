"""Which tensors a captured call changed in autograd's eyes: their version counters moved, and do so in each replay.

Invariant: a replay raises the versions that the call raised, no others: a batch norm changes its running mean behind
autograd's back, and a backward that holds it must not fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torchlazy.lazy.call_template import (
    FromArgument,
    FromData,
    FromState,
    HostArgument,
    HostCall,
    HostKept,
    JointRun,
    LazyCall,
    Segment,
    Step,
)
from torchlazy.lazy.geometry import is_dense
from torchlazy.lazy.guard_reached import Reached
from torchlazy.lazy.own_operators import memory_written
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.tensor import LazyTensor


class Versions:
    """The versions of all that a call can reach, when it begins."""

    def __init__(self, recorder: Recorder, reached: Reached, leaves: Sequence[Any]) -> None:
        state: list[tuple[torch.Tensor, torch.Tensor | int]] = [(t, t) for t, _ in reached.tensors.values()]
        passed = [(leaf, i) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._before = [
            (tensor, name, tensor._version, _storage(recorder, tensor))
            for tensor, name in (*state, *passed)
            if not tensor.is_inference()
        ]
        self._of_leaves = {name: storage for _, name, _, storage in self._before if isinstance(name, int)}
        self._of_state = {id(name): storage for _, name, _, storage in self._before if not isinstance(name, int)}
        self._moved: list[tuple[torch.Tensor | int, LazyStorage | None]] = []
        self._memories: set[LazyStorage | None] = set()  # that raised tensors are on

    def raised(self) -> tuple[torch.Tensor | int, ...]:
        """The tensors of the state whose version moved, and arguments by number, as often as it did."""
        self._moved = moved = [
            (name, storage) for tensor, name, version, storage in self._before for _ in range(tensor._version - version)
        ]
        self._memories = {storage for _, storage in moved}
        return tuple(name for name, _ in moved)

    def raised_by(self, steps: Sequence[Step]) -> tuple[torch.Tensor | int, ...]:
        """Those of the raised ones that the programs of these steps write to. Ask `raised` before."""
        written: set[LazyStorage | None] = set()
        for step in steps:
            targets = memory_written(step) if isinstance(step, LazyCall) else ()
            for target in step.targets if isinstance(step, Segment) else targets:
                if isinstance(target, FromState):
                    written.add(target.storage)
                elif isinstance(target, FromData):
                    written.add(self._of_state.get(id(target.owner)))
                elif isinstance(target, FromArgument):
                    written.add(self._of_leaves.get(target.leaf))
        return tuple(name for name, storage in self._moved if storage in written)

    def told_to(self, step: JointRun) -> JointRun:
        """The step that knows which of its inputs are written without raising a version. Ask `raised` before."""
        found = set()
        for write in step.joint.writes:
            memory, _ = step.inputs[write.input]
            storage: LazyStorage | None = None
            if isinstance(memory, FromState):
                storage = memory.storage
            elif isinstance(memory, FromData):
                storage = self._of_state.get(id(memory.owner))
            elif isinstance(memory, FromArgument):
                storage = self._of_leaves.get(memory.leaf)
            if storage is not None and storage not in self._memories:
                found.add(write.input)
        return replace(step, unraised=frozenset(found))


def but_by_hosts(raised: Sequence[torch.Tensor | int], steps: Sequence[Step]) -> tuple[torch.Tensor | int, ...]:
    """Without what the steps on ordinary tensors raise by themselves."""
    written = Counter(
        id(host.tensor) if isinstance(host, HostKept) else host.leaf
        for step in steps
        if isinstance(step, HostCall)
        for host in step.written
        if isinstance(host, (HostKept, HostArgument))
    )
    left = []
    for one in raised:
        key = one if isinstance(one, int) else id(one)
        if written[key]:
            written[key] -= 1
        else:
            left.append(one)
    return tuple(left)


def _storage(recorder: Recorder, tensor: torch.Tensor) -> LazyStorage | None:
    if isinstance(tensor, LazyTensor):
        return tensor._storage_
    return recorder.storage_of_plain(tensor) if is_dense(tensor) else None

"""A joint's forward and backward as two CUDA graphs, for a callable compiled with `mode="reduce-overhead"`.

What the forward keeps for the backward lies in the graphs' memory (runtime/native/recorder/graphed_joint.h), which all
graphs of a callable share: while the backward of one call is still to come, other calls run their programs.

Invariant: results and gradients are those of the two programs. Where there can be no graphs, `metrics.fallbacks` has
the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.plan.joint import Joint
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.report import metrics
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.trace import CutTrace, compute_device
from torchlazy.runtime.cuda.graph import CannotCapture, address_of
from torchlazy.runtime.cuda.graph_memory import GraphMemory, memory_of_its_own
from torchlazy.runtime.cuda.graphed_pair import GraphedPair, Wire
from torchlazy.runtime.executor import Executable
from torchlazy.runtime.native.recorder_library import LIBRARY

StateOf: TypeAlias = Callable[[int], torch.Tensor | None]
MAX_CAPTURES = 4  # of one joint anew, since state moved
_TURNS_OF_WAITING = 4


class GraphRooms:
    """The memory that the graphs of one callable work in, by device."""

    def __init__(self) -> None:
        self._rooms: dict[str, tuple[GraphMemory, Any]] = {}

    def of(self, device: str) -> tuple[GraphMemory, Any]:
        """The memory, and the native library's `GraphRoom` of it."""
        if device not in self._rooms:
            self._rooms[device] = memory_of_its_own(torch.device(device)), LIBRARY.module.GraphRoom()
        return self._rooms[device]

    def graphs_of(self, joint: Joint, state: StateOf) -> JointGraphs | None:
        """What captures the joint's graphs; None on the CPU. `state`: see `JointGraphs`."""
        return JointGraphs(self, state) if compute_device(joint.forward).startswith("cuda") else None


@dataclass(eq=False)
class Lease:
    """The memory of the graphs that ran a forward, until they run the backward or nobody holds what they kept."""

    graphs: Any
    of_memory: Any  # of the native library

    def is_kept(self) -> bool:
        """Whether what was kept is read again after the backward that is running."""
        return bool(LIBRARY.module.keeps_graph())

    def backward(self, tangents: Sequence[torch.Tensor | None], scalars: Sequence[Any]) -> list[torch.Tensor]:
        """The outputs of the backward's program; what the forward kept is gone then."""
        metrics.hits += 1
        return self.graphs.backward(list(tangents), list(scalars))  # type: ignore[no-any-return]


class JointGraphs:
    """The graphs of one joint. `state`: from the number of an input of the joint to its memory, if that is state, which
    stays where it is; None for an argument, which is copied to memory of the graphs."""

    def __init__(self, rooms: GraphRooms, state: StateOf) -> None:
        self.current: Any = None  # the native library's `GraphedJoint`, once it is captured
        self.is_given_up = False
        self._rooms, self._state = rooms, state
        self._captures = self._asked = 0

    @property
    def are_to_come(self) -> bool:
        """Whether replays in Python are to capture them yet."""
        return self.current is None and not self.is_given_up and config.cuda_graphs != "off"

    def forward(
        self, recorder: Recorder, joint: Joint, handles: Any, memory: list[torch.Tensor], scalars: Sequence[Any]
    ) -> tuple[list[torch.Tensor], Lease] | None:
        """The outputs of the forward's program, and a lease; None, and nothing was run, where there are no graphs, or a
        call before this one has their memory."""
        backward = joint.backward if self.are_to_come else None
        if backward is not None and self._is_time(recorder, handles):
            self._look(recorder, joint, backward, memory, scalars)
        graphs = None if config.cuda_graphs == "off" else self.current
        found = None if graphs is None else graphs.forward(memory, list(scalars))
        if found is None:
            return None
        metrics.hits += 1
        return found[0], Lease(graphs, found[1])

    def _is_time(self, recorder: Recorder, handles: Any) -> bool:
        driver: Any = recorder.driver
        if driver.listeners or driver.shadow is not None or LIBRARY.module is None:
            return False
        halves = handles.forward.compiled, handles.backward.compiled
        if any(half is None or type(half.run) is not Executable for half in halves):  # programs for all sizes stay
            return False
        self._asked += 1
        return self._asked % _TURNS_OF_WAITING == 1

    def _look(
        self,
        recorder: Recorder,
        joint: Joint,
        backward: CutTrace,
        memory: Sequence[torch.Tensor],
        scalars: Sequence[Any],
    ) -> None:
        driver: Any = recorder.driver
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        if self._captures >= MAX_CAPTURES:
            return self._give_up("memory that was assumed to stay in place has moved again and again")
        found = [driver.program_for_replay(trace, "") for trace in (joint.forward, backward)]
        for compiled, reason in found:
            if compiled is None:
                return self._give_up(reason) if reason else None
        self._captures += 1
        try:
            with below_autograd():  # and below the caller's autocast
                self._capture(joint, [compiled.run for compiled, _ in found], memory, scalars)
        except Exception as error:  # a library call that a capture refuses: the programs run as they are
            self._give_up(f"{type(error).__name__}: {error}")

    def _capture(
        self, joint: Joint, runs: Sequence[Any], memory: Sequence[torch.Tensor], scalars: Sequence[Any]
    ) -> None:
        shared, room = self._rooms.of(compute_device(joint.forward))
        wires, late = _wires(joint)
        later = [self._state(number) for number in late]
        if any(memory is None for memory in later):
            raise CannotCapture("its backward reads an argument that the forward does not")
        held = {wire.number for wire in wires if wire.kind == "held"}
        shown = [number for number in range(len(joint.forward.outputs)) if number not in held]
        first, second = map(prepared, runs)
        pair = GraphedPair(first, second, wires, shown, shared)
        count = sum(result.tangent is not None for result in joint.results)
        stays = [self._state(number) is not None for number in joint.forward_inputs]
        pair.capture(memory, stays, scalars, [*[None] * count, *later])
        addresses = [(number, address_of(value)) for number, value in zip(late, later, strict=True)]
        self.current = pair.lent(LIBRARY.module, room, partial(self._begins, addresses), self._forget)

    def _begins(self, late: Sequence[tuple[int, int]], is_first: bool) -> bool:
        """Whether a half may be replayed now. `late`: what only the backward reads, and where it is; autograd holds it
        from the forward on."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        if is_first and any(address_of(self._state(number)) != address for number, address in late):
            self._forget()
            return False
        metrics.graph_replays += 1
        return True

    def _forget(self) -> None:
        self.current, self._asked = None, 0

    def _give_up(self, reason: str) -> None:
        self.is_given_up = True
        metrics.fallbacks[f"no CUDA graph: {reason.splitlines()[0][:200]}"] += 1


def prepared(run: Any) -> Any:
    """The program that a graph is made of."""
    return run


def _wires(joint: Joint) -> tuple[list[Wire], list[int]]:
    """Where the inputs of the backward's program come from, in their order; and the joint's inputs that it alone reads,
    which stand behind the tangents among its own memory."""
    assert joint.backward is not None
    if joint.double is not None or joint.updates or joint.backward_writes or any(r.freed for r in joint.results):
        raise CannotCapture("its backward writes, is differentiated, or is freed in parts")
    results = {result.position for result in joint.results} | {write.position for write in joint.writes}
    of_tangent = {result.tangent: result.position for result in joint.results if result.tangent is not None}
    wires: list[Wire] = []
    late: list[int] = []
    for source, (_, geom) in zip(joint.backward_inputs, joint.backward.inputs, strict=True):
        if source.kind == "tangent":
            wires.append(Wire("own", -1, source.index, of_tangent[source.index]))
            continue
        if source.kind == "input" and source.index not in joint.forward_inputs:
            wires.append(Wire("own", -1, len(of_tangent) + len(late)))
            late.append(source.index)
            continue
        if source.kind == "input":
            number = joint.forward_inputs.index(source.index)
            given = joint.forward.inputs[number][1]
        else:
            number = joint.saved[source.index] if source.kind == "saved" else joint.results[source.index].position
            given = joint.forward.outputs[number][1]
        if (given.shape, given.strides, given.dtype) != (geom.shape, geom.strides, geom.dtype):
            raise CannotCapture("its backward reads what crosses in another layout")
        wires.append(Wire("given" if source.kind == "input" else "result" if number in results else "held", number))
    wires += [Wire("number", number) for number in range(len(joint.backward_scalars))]
    return wires, late

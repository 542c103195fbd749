"""Two programs that are halves of one plan, as two CUDA graphs: what crosses between them stays where the first put it.

Both are captured before either is run. What the first holds for the second is memory of the graphs' pool that nobody
else sees: the second's capture lets go of it value by value, as its program does, so that its own values may take that
memory over. No value is copied on its way from one half to the other.

Invariant: results are those of the two programs, run one after the other. No other graph that works in the same memory
is replayed between the halves of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.cuda.graph import (
    CannotCapture,
    GraphNumbers,
    address_of,
    copies_of,
    copy_all,
    room_like,
    run_and_take_back,
    why_not,
)
from torchlazy.runtime.cuda.graph_memory import GraphMemory, graph_memory, memory_of_its_own
from torchlazy.runtime.executor import Executable
from torchlazy.runtime.program.memory_plan import peak_bytes
from torchlazy.runtime.program.steps import span_bytes


@dataclass(frozen=True)
class Wire:
    """Where an input of the second program comes from.

    `kind`: "held" and "result" are output `number` of the first program (held: for the second alone), "given" is its
    input, "own" is memory that only the second reads, "number" a number of the two. `place`: where the value stands
    among the memory that `run_second` is given, if it does. `over`: the first program's result in whose memory an "own"
    one may lie, if that is laid out alike and the second does not read it: it is copied out before.
    """

    kind: Literal["held", "result", "given", "own", "number"]
    number: int
    place: int | None = None
    over: int | None = None


class GraphedPair:
    """Captured halves. `is_nested`: other graphs may be replayed between the two, so that what crosses lies in memory
    of its own. `memory`: that, or the device's, unless given."""

    def __init__(
        self,
        first: Executable,
        second: Executable,
        wires: Sequence[Wire],
        shown: Sequence[int],
        memory: GraphMemory | None = None,
        *,
        is_nested: bool = False,
    ) -> None:
        """`shown`: these outputs of the first program are results, the others are held."""
        self._first, self._second = first, second
        self._wires = tuple(wires)
        self._shown = tuple(shown)
        of_device = memory_of_its_own if is_nested else graph_memory
        self._memory = memory or of_device(torch.device(f"cuda:{first.device}"))
        self._stays: tuple[tuple[bool, ...], tuple[bool, ...]] = ((), ())
        self._addresses: tuple[list[int], list[int]] = ([], [])
        self._graphs: tuple[Any, Any] = (None, None)
        self._given: list[torch.Tensor] = []  # what the first graph reads, and the numbers of both
        self._own: list[torch.Tensor | None] = []  # what the second graph alone reads, by place
        self._numbers: tuple[GraphNumbers, GraphNumbers]
        self._results: tuple[list[Any], list[Any]] = ([], [])
        self._places: list[_Place] = []  # of all outputs of the first
        self._ran_at = -1  # how many graphs the device had replayed after the first half
        self._returned = {
            output: wires[given] for output, given in second.program.donations
        }  # outputs of the second in memory that it is given

    def capture(
        self,
        memory: Sequence[torch.Tensor],
        stays: Sequence[bool],
        scalars: Sequence[float],
        later: Sequence[torch.Tensor | None],
    ) -> None:
        """Capture both; nothing is run, or left of what was. Raises CannotCapture or what the device says.

        `memory`, `scalars`: as for `run_first`; `stays[i]`: input i is the same memory at each run. `later`: for each
        input of `run_second` its memory where that stays, None where it moves.
        """
        self._refuse(memory, stays, scalars)
        device = self._memory.device
        self._stays = tuple(stays), tuple(value is not None for value in later)
        self._addresses = [_address(value) for value in memory], [_address(value) for value in later]
        self._given = [value if stay else room_like(value) for value, stay in zip(memory, stays, strict=True)]
        self._own = list(later)
        for wire, (_, meta) in zip(self._wires, self._second.program.inputs, strict=True):
            if wire.kind == "own" and wire.place is not None and wire.over is None and self._own[wire.place] is None:
                self._own[wire.place] = self._room_for(meta)
        metas = [meta.dtype for _, meta in self._first.program.inputs[len(memory) :]]
        later_metas = [
            meta.dtype for wire, (_, meta) in zip(self._wires, self._second.program.inputs, strict=True)
            if wire.kind == "number"
        ]  # fmt: skip
        self._numbers = GraphNumbers(metas, device), GraphNumbers(later_metas, device)
        try:
            self._capture()
        except RuntimeError:
            self._load_first(memory, scalars)
            run_and_take_back(self._memory, self._run_both, self._written())
            self._capture()

    def run_first(
        self, memory: Sequence[torch.Tensor], scalars: Sequence[float], later: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """The first program's results. ValueError, before anything is run, if memory that stays has moved; `later` is
        what the second half will be given, as far as it stays."""
        if any(self.moved(memory, later)):
            raise ValueError("GraphedPair.run_first: an input that stays has moved; capture the halves again")
        self._load_first(memory, scalars)
        self._memory.replay(self._graphs[0])
        self._ran_at = self._memory.replays
        donated = dict(self._first.program.donations)
        back = [given for given in donated.values() if not self._stays[0][given]]
        copy_all([memory[given] for given in back], [self._given[given] for given in back])
        shown = list(zip(self._shown, self._results[0], strict=True))
        fresh = iter(copies_of([output for number, output in shown if number not in donated]))
        return [memory[donated[number]] if number in donated else next(fresh) for number, _ in shown]

    def moved(
        self, memory: Sequence[torch.Tensor], later: Sequence[torch.Tensor | None]
    ) -> tuple[list[int], list[int]]:
        """Which inputs of each half that stay are elsewhere now."""
        early, late = (
            [
                number
                for number, (stay, value, address) in enumerate(zip(stays, values, known, strict=True))
                if stay and (value is None or address_of(value) != address)
            ]
            for stays, values, known in zip(self._stays, (memory, later), self._addresses, strict=True)
        )
        return early, late

    def run_second(self, memory: Sequence[torch.Tensor], scalars: Sequence[float]) -> list[torch.Tensor]:
        """The second program's outputs: those in memory that it was given in place, the others in new memory.
        `scalars`: of both halves."""
        if self._memory.replays != self._ran_at:
            raise RuntimeError("another CUDA graph ran between the halves of a step: what crosses is lost")
        for stay, value, address in zip(self._stays[1], memory, self._addresses[1], strict=True):
            if stay and address_of(value) != address:
                raise RuntimeError("memory that stays has moved between the halves of a step")
        self._memory.wait_for_last()
        rooms = {
            wire.place: room
            for wire in self._wires
            if wire.kind == "own" and wire.place is not None and (room := self._own[wire.place]) is not None
        }
        moving = [place for place in rooms if not self._stays[1][place]]
        copy_all([rooms[place] for place in moving], [memory[place] for place in moving])
        self._numbers[1].load([scalars[wire.number] for wire in self._wires if wire.kind == "number"])
        self._memory.replay(self._graphs[1])
        results = self._results[1]
        in_place = {number: wire.place for number, wire in self._returned.items() if wire.place is not None}
        moved = [number for number, place in in_place.items() if not self._stays_there(self._returned[number], place)]
        copy_all([memory[in_place[number]] for number in moved], [results[number] for number in moved])
        fresh = iter(copies_of([result for number, result in enumerate(results) if number not in in_place]))
        return [memory[in_place[at]] if at in in_place else next(fresh) for at in range(len(results))]

    def _stays_there(self, wire: Wire, place: int) -> bool:
        return self._stays[0][wire.number] if wire.kind == "given" else self._stays[1][place]

    def lent(self, library: Any, room: Any, begins: Callable[[bool], bool], moved: Callable[[], None]) -> Any:
        """The captured halves as C++ runs them, one call at a time, lending what crosses to autograd: the native
        library's `GraphedJoint`. What moves of the second's own memory are tangents, which come first in it.

        `room`: the library's `GraphRoom` of the memory. `begins` is called before each replay (of the first half?) and
        says whether there may be one, `moved` where an input that stays is elsewhere. Raises CannotCapture where memory
        that moves is overwritten.
        """
        numbers, graphs = self._numbers, self._graphs
        donated = dict(self._first.program.donations)
        if self._returned or not all(self._stays[0][given] for given in donated.values()):
            raise CannotCapture("it overwrites memory that moves")
        shown = dict(zip(self._shown, self._results[0], strict=True))
        given = {at: number for number, value in enumerate(self._given) if (at := address_of(value))}  # 0: it is empty
        outputs: list[Any] = []
        for number, place in enumerate(self._places):
            is_given = donated.get(number, given.get(place.address))
            held = (place.address, place.nbytes, place.layout)
            outputs.append(is_given if is_given is not None else shown.get(number, held))

        def enter(is_first: bool) -> bool:
            if not begins(is_first):
                return False
            self._memory.wait_for_last()
            return True

        def half(number: int, scalars: Sequence[float]) -> None:
            numbers[number].load(scalars)
            self._memory.replay(graphs[number])

        given_each = zip(self._stays[0], self._given, strict=True)
        return library.GraphedJoint({
            "room": room, "device": self._memory.device, "begins": enter, "moved": moved,
            "first": partial(half, 0), "second": partial(half, 1),
            "inputs": [(address_of(value), None) if stays else (0, value) for stays, value in given_each],
            "outputs": outputs, "gradients": self._results[1],
            "tangents": [room for room, stays in zip(self._own, self._stays[1], strict=True) if not stays],
        })  # fmt: skip

    # ---------------------------------------------------------------- capturing

    def _refuse(self, memory: Sequence[Any], stays: Sequence[bool], scalars: Sequence[Any]) -> None:
        numbers = sum(wire.kind == "number" for wire in self._wires)
        reason = why_not(self._first, len(memory), len(scalars))
        reason = reason or why_not(self._second, len(self._wires) - numbers, numbers)
        for wire in self._returned.values():
            if wire.place is None:
                reason = reason or "the second half overwrites what the first was given"
        if reason:
            raise CannotCapture(reason)

    def _capture(self) -> None:
        first, second = self._first, self._second
        first.prepare_capture()
        second.prepare_capture()
        before, made = self._memory.captured(self._launch_first, self._room())
        # From here on only the list of inputs holds what crosses, and the second program empties that.
        self._lay_over(made)
        inputs = self._inputs_of_second(made)
        shown = [made[number] for number in self._shown]
        places = [_Place.of(value) for value in made]
        made.clear()
        after, results = self._memory.captured(lambda: second.run(inputs, ()))
        first.fill_tables()
        second.fill_tables()
        self._graphs, self._results, self._places = (before, after), (shown, results), places

    def _lay_over(self, made: Sequence[torch.Tensor]) -> None:
        read = {wire.number for wire in self._wires if wire.kind in ("held", "result")}
        for wire, (_, meta) in zip(self._wires, self._second.program.inputs, strict=True):
            if wire.over is None or wire.place is None:
                continue
            result = made[wire.over]
            is_alike = (tuple(result.shape), result.stride(), result.dtype) == (meta.shape, meta.strides, meta.dtype)
            self._own[wire.place] = result if is_alike and wire.over not in read else self._room_for(meta)

    def _room_for(self, meta: TensorMeta) -> torch.Tensor:
        """Memory for an input of the second; zeros: it may hold positions, and is run before it is loaded."""
        room = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=self._memory.device)  # type: ignore[arg-type]
        return room.zero_()

    def _room(self) -> int:
        """Bytes that the two hold at most, what crosses included."""
        inputs = zip(self._wires, self._second.program.inputs, strict=True)
        held = {name: span_bytes(meta) for wire, (name, meta) in inputs if wire.kind == "held"}
        return max(peak_bytes(self._first.program.steps), peak_bytes(self._second.program.steps, held))

    def _launch_first(self) -> list[torch.Tensor]:
        return self._first.run([*self._given, *self._numbers[0].tensors], ())

    def _inputs_of_second(self, made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        numbers = iter(self._numbers[1].tensors)
        inputs: list[torch.Tensor] = []
        for wire in self._wires:
            if wire.kind == "number":
                inputs.append(next(numbers))
            elif wire.kind == "own":
                assert wire.place is not None
                own = self._own[wire.place]
                assert own is not None
                inputs.append(own)
            else:
                inputs.append(self._given[wire.number] if wire.kind == "given" else made[wire.number])
        return inputs

    def _run_both(self) -> None:
        made = self._launch_first()
        self._lay_over(made)
        self._second.run(self._inputs_of_second(made), ())

    def _written(self) -> list[torch.Tensor]:
        places = {wire.place for wire in self._returned.values() if wire.place is not None and wire.kind == "own"}
        given = {wire.number for wire in self._returned.values() if wire.kind == "given"}
        first = {given for _, given in self._first.program.donations}
        found = [self._given[number] for number in first | given] + [self._own[place] for place in places]
        return [value for value in found if value is not None]

    def _load_first(self, memory: Sequence[torch.Tensor], scalars: Sequence[float]) -> None:
        self._memory.wait_for_last()
        moving = [number for number, stays in enumerate(self._stays[0]) if not stays]
        copy_all([self._given[number] for number in moving], [memory[number] for number in moving])
        self._numbers[0].load(scalars)


@dataclass(frozen=True)
class _Place:
    """Where an output lies, which nothing keeps there but the graphs."""

    address: int
    nbytes: int
    layout: tuple[list[int], list[int], torch.dtype]  # as the native library has it

    @staticmethod
    def of(value: torch.Tensor) -> _Place:
        layout = list(value.shape), list(value.stride()), value.dtype
        return _Place(address_of(value), value.untyped_storage().nbytes(), layout)


def _address(value: torch.Tensor | None) -> int:
    return 0 if value is None else address_of(value)

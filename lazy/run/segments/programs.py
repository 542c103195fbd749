"""The two programs of a joined trace: requested together, run one after the other, values that cross handed over.

Invariant: both were planned from the same joined trace; what one holds is what the other takes, value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.runtime.cuda.graphed_pair import Wire
from torchlazy.runtime.program.output_recipes import Recipe, output_recipes

if TYPE_CHECKING:
    from torchlazy.lazy.plan.join_traces import Joined, SecondInputs

_joining = DeferredModule("torchlazy.lazy.plan.join_traces")  # a first step loads no compiler


class HalfFailed(Exception):
    """The first half raised; `values`: the values of the first trace as it was cut, errors among them."""

    def __init__(self, values: list[Any], error: Exception) -> None:
        super().__init__()
        self.values = values
        self.error = error


class HalfPrograms:
    """The programs of a joined trace, once both are there."""

    def __init__(self, driver: Any, joined: Joined, first: CutTrace, frame: str, *, scalars: str = "arguments") -> None:
        """`first`: the first trace as it was cut; `frame`: the user's line to report for the second. `scalars`: how
        the programs get their scalars; from "memory" they are for CUDA graphs (compiled/replay/pairs.py)."""
        self.joined = joined
        self.is_given_up = False
        self._driver = driver
        self._first = first
        self._frame = frame
        self._scalars = scalars
        self._programs: tuple[Any, Any] | None = None
        self._takes: SecondInputs | None = None
        self._known: list[Any] = []
        self._gather: Callable[[list[Any]], Sequence[Any]] = tuple
        # Inputs of the first trace that the second program reads and the second trace does not have; and the first
        # program's visible results that the second one reads, by their numbers among these.
        self.inputs_kept: tuple[int, ...] = ()
        self.results_kept: tuple[int, ...] = ()
        # By number, what the first program holds that depends on its inputs alone, once both are there.
        self.recipes: dict[int, Recipe] = {}
        self.number_of: dict[tuple[Hashable, tuple[int | None, ...]], int] = {}
        # Of a joined trace's input its place among those of the second trace.
        self._place_of = {place: i for i, place in enumerate(joined.second_inputs) if place is not None}

    @property
    def are_there(self) -> bool:
        """Whether both programs are there, and belong together."""
        return self._takes is not None

    def find(self) -> bool:
        """Request them, or check for them; returns whether both are there."""
        if self._takes is not None or self.is_given_up:
            return self._takes is not None
        if any(known.is_awaited for known in self._known):
            return False
        joined = self.joined
        traces = joined.first, joined.second
        self._known = [self._driver.program_of_half(trace, self._frame, self._scalars) for trace in traces]
        if any(known.failure for known in self._known):
            self.is_given_up = True
        elif all(known.compiled is not None for known in self._known):
            first, second = (known.compiled for known in self._known)
            self._programs = first, second
            found = self._takes = _joining.match_programs(joined, first.program, second.program)
            self.is_given_up = found is None
            if found is not None:
                inputs = (number for kind, number in found.inputs if kind == _joining.INPUT)
                self.inputs_kept = tuple(number for number in inputs if number not in self._place_of)
                self.results_kept = tuple(number for kind, number in found.inputs if kind == _joining.RESULT)
                shown, recipes = len(joined.visible), output_recipes(first.program)
                self.recipes = {place: recipe for place, recipe in recipes.items() if place >= shown}
                self.number_of = {(made.key, made.inputs): place for place, made in self.recipes.items()}
                if self._scalars != "memory":
                    self._gather = self._gathering(first.program, found)
        return self._takes is not None

    @property
    def executables(self) -> tuple[Any, Any]:
        """Both programs as they are run, once they are there."""
        assert self._programs is not None
        return self._programs[0].run, self._programs[1].run

    @property
    def wires(self) -> tuple[Wire, ...]:
        """Where the second program's inputs come from, once it is there; numbers are those of the joined trace."""
        assert self._takes is not None
        shown, given = len(self.joined.visible), len(self._first.inputs)
        found = []
        for kind, number in self._takes.inputs:
            if kind == _joining.HELD:
                found.append(Wire("held", shown + number))
            elif kind == _joining.RESULT:
                found.append(Wire("result", number))
            elif kind == _joining.SCALAR:
                found.append(Wire("number", number))
            else:
                found.append(Wire("given" if number < given else "own", number, self._place_of.get(number)))
        return tuple(found)

    @property
    def first_program(self) -> Any:
        """The first program as data, once it is there."""
        return None if self._programs is None else self._programs[0].program

    def run_first(self, memory: list[torch.Tensor], scalars: Sequence[Any]) -> list[Any]:
        """The visible results, then what is held for the second; or HalfFailed. Empties `memory`."""
        assert self._programs is not None
        made: list[Any] = self._driver.run_half(self._programs[0], self._first, memory, scalars)
        return made

    def _gathering(self, first: Any, found: SecondInputs) -> Callable[[list[Any]], Sequence[Any]]:
        """How the second program's inputs are found in what the first gave, its inputs, and the second trace's."""
        shown, made, given = len(self.joined.visible), len(first.outputs), len(self._first.inputs)
        places = []
        for kind, number in found.inputs:
            if kind == _joining.HELD:
                places.append(shown + number)
            elif kind == _joining.RESULT:
                places.append(number)
            else:
                place = self._place_of.get(number)
                places.append(made + number if place is None else made + given + place)
        if len(places) < 2:  # an itemgetter of one place returns the item itself
            return lambda everything: [everything[place] for place in places]
        return itemgetter(*places)

    def visible(self, made: Sequence[Any]) -> list[Any]:
        """The first trace's outputs from what `run_first` gave; None for those that are hidden."""
        values: list[Any] = [None] * len(self._first.outputs)
        for output, value in zip(self.joined.visible, made, strict=False):
            values[output] = value
        return values

    def run_second(
        self, made: list[Any], kept: list[Any], memory: list[Any], scalars: Sequence[Any]
    ) -> list[torch.Tensor]:
        """The second trace's outputs. `made`: what the first gave, `kept`: its inputs, where they are needed; `scalars`
        of both. Empties the lists: only the program holds what it reads."""
        assert self._programs is not None and self._takes is not None
        everything = [*made, *kept, *memory]
        inputs = list(self._gather(everything))
        everything.clear()
        made.clear()
        kept.clear()
        memory.clear()
        wanted = [scalars[number] for number in self._takes.scalars]
        values: list[torch.Tensor] = self._driver.run_half(self._programs[1], None, inputs, wanted)
        return values

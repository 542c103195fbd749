"""Where a program can be launched in stages: each reads only some of the inputs, so it can run before the others are
there.

Invariant: no stage but the last writes into an input. Whoever has launched some may run the whole program after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchlazy.prims.drawn_dropout import takes_random_numbers
from torchlazy.runtime.program.program import ExternCall, ForeachLaunch, Launch, Program, Reinterpret, Step
from torchlazy.runtime.program.steps import may_alias, names_made, names_read, resolve_overload

MOST_STAGES = 8
LEAST_WORK = 12  # launches and library calls of a stage: each is a CUDA graph, which costs a launch


@dataclass(frozen=True)
class Stage:
    """The steps up to `stop` that no stage before has. `inputs`: positions of the inputs that it is the first to read;
    `draws`: how many operators have taken random numbers when it is done."""

    stop: int
    inputs: tuple[int, ...]
    draws: int


class Border:
    """What a program in stages calls between two of them; it does nothing unless `then` is set."""

    def __init__(self) -> None:
        self.then: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.then is not None:
            self.then()


def find_stages(program: Program, steps: Sequence[Step]) -> tuple[Stage, ...]:
    """Stages of about as much work each up to the first write into an input, and what is left; few where the program is
    short or writes early. `steps` are the program's as they run."""
    if program.symbols or program.sizes:
        return ()
    end = first_write(program, steps)
    work = [i for i, step in enumerate(steps[:end]) if isinstance(step, Launch | ForeachLaunch | ExternCall)]
    most = min(MOST_STAGES, len(work) // LEAST_WORK)
    if not most:
        return ()
    stops = [work[n * len(work) // most] for n in range(1, most)]
    stops += [end, len(steps)] if end < len(steps) else [end]
    place_of = {name: position for position, (name, _) in enumerate(program.inputs)}
    stages: list[Stage] = []
    begin = draws = 0
    for stop in stops:
        inputs: dict[int, None] = {}
        for step in steps[begin:stop]:
            inputs |= {place_of.pop(name): None for name in names_read(step) if name in place_of}
            draws += _draws(step)
        stages.append(Stage(stop, tuple(inputs), draws))
        begin = stop
    return tuple(stages)


def first_write(program: Program, steps: Sequence[Step]) -> int:
    """How many steps come before the first that may write into an input."""
    inputs = {name for name, _ in program.inputs}
    donated = {program.outputs[output]: program.inputs[position][0] for output, position in program.donations}
    in_place = set(donated)  # outputs: where one is a window on its input, it is written behind the window's step
    of_inputs = set(inputs)  # names that may be memory of an input
    for position, step in enumerate(steps):
        read = names_read(step)
        if any(name in inputs and name in in_place for name in read):
            return position
        if isinstance(step, Reinterpret) and step.source in of_inputs:
            of_inputs.add(step.name)
            if step.name in in_place:
                return position
        elif isinstance(step, ExternCall) and any(name in of_inputs for name in read):
            if resolve_overload(step.op)._schema.is_mutable:
                return position
            if may_alias(step.op):
                of_inputs.update(names_made(step))
    return len(steps)


def _draws(step: Step) -> bool:
    if not isinstance(step, ExternCall):
        return False
    return takes_random_numbers(resolve_overload(step.op), step.args, dict(step.kwargs))

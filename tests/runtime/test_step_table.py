"""Steps as a table: each kind once, and back to the very same steps."""

from __future__ import annotations

import random

import pytest
import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Free,
    Launch,
    Reinterpret,
    Step,
    ValueRef,
)
from torchlazy.runtime.program.step_table import steps_of, table_of
from torchlazy.runtime.program.text import from_json, to_json

from .test_program_text import sample

VECTOR, SQUARE = TensorMeta((8,), torch.float32, (1,)), TensorMeta((2, 4), torch.float32, (4, 1))
CONSTANTS = (0, 0.0, -0.0, False, 1, True, 1.0, None, "mean", torch.float32, float("inf"), [1, 2], (1, 2), 0j, -0j)


def random_steps(seed: int, count: int) -> tuple[Step, ...]:
    """Steps of a few kinds; they need not make sense."""
    choose = random.Random(seed)
    name = lambda: f"v{choose.randrange(20)}"  # noqa: E731
    steps: list[Step] = []
    for _ in range(count):
        meta = choose.choice((VECTOR, SQUARE))
        match choose.randrange(6):
            case 0:
                steps.append(Allocate(name(), meta, choose.choice((None, name()))))
            case 1:
                steps.append(Reinterpret(name(), name(), meta, choose.randrange(2)))
            case 2:
                scalars = tuple(f"s{choose.randrange(3)}" for _ in range(choose.randrange(2)))
                steps.append(Launch(choose.randrange(2), (name(), name()), scalars, (choose.choice((4, 8)),)))
            case 3:
                rows = tuple(((name(), name()), (choose.randrange(9),), ("s0",)) for _ in range(choose.randrange(1, 4)))
                steps.append(ForeachLaunch(1, rows, ("s1",)))
            case 4:
                refs = [ValueRef(name()), ValueRef("s2", scalar=True), choose.choice(CONSTANTS)]
                args = (ValueRef(name()), choose.choice((tuple, list))(refs))
                kwargs = (("alpha", choose.choice(CONSTANTS)),)
                steps.append(ExternCall("aten.add.Tensor", args, kwargs, (name(), None), (meta, None)))
            case _:
                steps.append(Free(tuple(name() for _ in range(choose.randrange(3)))))
    return tuple(steps)


@pytest.mark.parametrize("seed", range(20))
def test_steps_come_back_as_they_were(seed: int) -> None:
    """To the type and the sign of each constant: `repr` tells these apart, equality does not."""
    steps = random_steps(seed, 200)
    kinds, numbers, names = table_of(steps)
    assert len(kinds) < len(steps) and len(set(names)) == len(names)
    assert repr(steps_of(kinds, numbers, names)) == repr(steps)
    assert steps_of(kinds, numbers, names) == steps


def test_equal_steps_of_other_names_are_one_kind() -> None:
    steps = tuple(Launch(0, (f"a{n}", f"b{n}"), (), (4,)) for n in range(100))
    kinds, numbers, names = table_of(steps)
    assert len(kinds) == 1 and len(numbers) == 300 and len(names) == 200
    assert "a0" not in repr(kinds)


def test_a_program_of_many_equal_steps_is_short() -> None:
    program = sample()
    text = to_json(program)
    more = tuple(Launch(0, ("x", f"out{n}"), ("lr",), (64,)) for n in range(500))
    longer = type(program)(**{**vars(program), "steps": program.steps + more})
    assert from_json(to_json(longer)) == longer
    assert len(to_json(longer)) - len(text) < 500 * 32


@pytest.mark.parametrize("numbers", [[0], [0, 0], [0, 0, 7], [5, 0, 0]])
def test_a_table_that_is_none_is_refused(numbers: list[int]) -> None:
    with pytest.raises((ValueError, IndexError)):
        steps_of([Reinterpret("", "", VECTOR, 0)], numbers, ["a", "b"])

"""Programs for all sizes as data: names for sizes, guards as functions, JSON and back."""

from __future__ import annotations

import json

import pytest
import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.size_expr import Symbol
from torchlazy.prims.size_int import SizeSpace
from torchlazy.runtime import executor
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.program import text as program_text
from torchlazy.runtime.program.program import Allocate, ExternCall, Program, Reinterpret, ValueRef
from torchlazy.runtime.program.symbolic import FloatName, SizeName, finish, guard_function


def planned(value: int) -> tuple[Program, SizeSpace]:
    """in0[a, 4] -> its mean over the sizes, and a window on the second half of it."""
    space = SizeSpace([Symbol("a", value, 12, 2)])
    a = space.symbol("a")
    meta = TensorMeta((a, 4), torch.float32, (4, 1))
    half = TensorMeta((a // 2, 4), torch.float32, (4, 1))
    steps = (
        ExternCall("aten.mul.Scalar", (ValueRef("in0"), 1 / a), (), ("scaled",), (meta,)),
        Reinterpret("half", "scaled", half, (a - a // 2) * 4),
        ExternCall("aten.clone.default", (ValueRef("half"),), (), ("out",), (half,)),
    )
    assert a > 3  # what some code generator asked
    return Program((("in0", meta),), (), (), steps, ("out",), (half,)), space


def test_two_plannings_give_one_program() -> None:
    assert finish(*planned(12)) == finish(*planned(9))


def test_a_finished_program_runs_at_every_size() -> None:
    program = finish(*planned(12))
    run = executor.load(program, [])
    for a in (4, 5, 12, 31):
        x = torch.randn(a, 4)
        (out,) = run([x], [a])
        torch.testing.assert_close(out, (x / a)[a - a // 2 :])


def test_guards_tell_which_sizes() -> None:
    holds = guard_function(finish(*planned(12)))
    assert holds(4) and holds(100) and not holds(3)


def test_json_and_back() -> None:
    program = finish(*planned(12))
    again = program_text.from_json(program_text.to_json(program))
    assert again == program
    (out,) = executor.load(again, [])([torch.ones(6, 4)], [6])
    assert out.shape == (3, 4)
    assert "n1" in program_text.format_program(again)


@pytest.mark.parametrize("text", ["__import__('os')", "n1.real", "n1; n2", "open", ""])
def test_json_names_are_checked(text: str) -> None:
    data = json.loads(program_text.to_json(finish(*planned(12))))
    for step in data["program"]["Program"]["steps"]:
        for value in step.get("ExternCall", {}).get("args", ()):
            if "FloatName" in value:
                value["FloatName"][0] = text
    with pytest.raises(ProgramError):
        program_text.from_json(json.dumps(data))


def test_names_compare_by_name() -> None:
    assert SizeName.of("n1", 4) == SizeName.of("n1", 9) != SizeName.of("n2", 4)
    assert SizeName.of("n1", 4) != 4 and FloatName.of("1 / n1", 0.5) != 0.5
    assert Allocate("x", TensorMeta((SizeName.of("n1", 4),), torch.float32, (1,))) != Allocate(
        "x", TensorMeta((4,), torch.float32, (1,))
    )

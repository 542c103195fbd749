"""Outputs that kernels make of a program's inputs alone are known by how, and by which inputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torchlazy.prims.meta import TensorMeta, contiguous_strides
from torchlazy.runtime.program.output_recipes import output_recipes
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    KernelSource,
    Launch,
    Program,
    Reinterpret,
    Step,
    ValueRef,
)

META = TensorMeta((4,), torch.float32, contiguous_strides((4,)))
KERNELS = tuple(KernelSource("cpp", "kernel", text, 2) for text in ("first", "second"))


def program(*steps: Step, outputs: tuple[str, ...], inputs: tuple[str, ...] = ("a", "b", "c")) -> Program:
    return Program(
        inputs=tuple((name, META) for name in inputs), scalars=(("s", float),), kernels=KERNELS, steps=steps,
        outputs=outputs, output_metas=(META,) * len(outputs),
    )  # fmt: skip


def copy(source: str, name: str, kernel: int = 0, scalars: tuple[str, ...] = ()) -> tuple[Step, ...]:
    return Allocate(name, META), Launch(kernel, (source, name), scalars, (4,))


def test_equal_kernels_on_inputs_have_equal_recipes() -> None:
    found = output_recipes(program(*copy("a", "x"), *copy("c", "y"), *copy("a", "z", 1), outputs=("x", "y", "z")))
    assert found[0].key == found[1].key != found[2].key
    assert [found[i].inputs for i in range(3)] == [(0,), (2,), (0,)]
    rows = ((("a", "x"), (4,), ()), (("b", "y"), (4,), ()))
    several = program(Allocate("x", META), Allocate("y", META), ForeachLaunch(1, rows, ()), outputs=("x", "y"))
    assert [recipe.inputs for recipe in output_recipes(several).values()] == [(0,), (1,)]


def test_operands_are_told_by_their_places() -> None:
    def sum_of(one: str, other: str) -> Program:
        return program(Allocate("x", META), Launch(0, (one, other, "x"), (), (4,)), outputs=("x",))

    a_b, b_a, a_a = (output_recipes(sum_of(*pair))[0] for pair in (("a", "b"), ("b", "a"), ("a", "a")))
    assert a_b.key == b_a.key and (a_b.inputs, b_a.inputs) == ((0, 1), (1, 0))
    assert a_a.key != a_b.key


def test_windows_and_chains() -> None:
    window = Reinterpret("w", "a", META, 2)
    found = output_recipes(program(window, *copy("w", "x"), *copy("a", "y"), *copy("x", "z"), outputs=("x", "y", "z")))
    assert len({recipe.key for recipe in found.values()}) == 3
    assert all(recipe.inputs == (0,) for recipe in found.values())
    long = [step for i in range(6) for step in copy("a" if i == 0 else f"x{i - 1}", f"x{i}")]
    assert not output_recipes(program(*long, outputs=("x5",)))


def test_numbers_library_calls_and_overwritten_inputs_have_none() -> None:
    assert not output_recipes(program(*copy("a", "x", 0, ("s",)), outputs=("x",)))
    call = ExternCall("aten.rand_like.default", (ValueRef("a"),), (), ("m",), (META,))
    assert not output_recipes(program(call, *copy("m", "x"), outputs=("x", "m")))
    overwritten = replace(program(*copy("a", "x"), *copy("b", "y"), outputs=("x", "y")), donations=((1, 0),))
    assert list(output_recipes(overwritten)) == [1]
    assert not output_recipes(program(outputs=("a",)))
    assert not output_recipes(replace(program(*copy("a", "x"), outputs=("x",)), symbols=("n",)))

"""Programs with fewer windows: which go, when memory is freed then, and that they compute the same."""

from __future__ import annotations

import pytest
import torch
from torchlazy.prims.meta import TensorMeta, contiguous_strides
from torchlazy.runtime.executor import load
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Free,
    Launch,
    Program,
    Reinterpret,
    Step,
    ValueRef,
)
from torchlazy.runtime.program.spared_views import without_spare_windows
from torchlazy.runtime.program.symbolic import SizeName
from torchlazy.runtime.toolchains.kernel_cache import open_cache
from torchlazy.runtime.toolchains.toolchain import has_cpp, load_kernels

from .tiny_sources import PRELUDES, cpp_scale


def meta(*shape: int, strides: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(shape, dtype, strides or contiguous_strides(shape))


TURNED = meta(3, 4, strides=(1, 3))


def program(*steps: Step, outputs: tuple[str, ...] = ("out",)) -> Program:
    return Program(
        inputs=(("x", meta(4, 3)),),
        scalars=(("lr", float),),
        kernels=(cpp_scale(),),
        steps=steps,
        outputs=outputs,
        output_metas=(meta(4, 4),) * len(outputs),
    )


def product(left: str, right: str, out: str) -> ExternCall:
    return ExternCall("aten.mm.default", (ValueRef(left), ValueRef(right)), (), (out,), (meta(4, 4),))


def spared(given: Program) -> tuple[Step, ...]:
    read = {*given.outputs}
    for step in given.steps:
        if isinstance(step, ExternCall):
            read |= {value.name for value in step.args if isinstance(value, ValueRef)}
    return without_spare_windows(given, read).steps


def test_memory_is_allocated_as_the_first_window_that_is_read() -> None:
    given = program(
        Allocate("buf", meta(12)),
        Launch(0, ("x", "buf"), ("lr",), (12,)),
        Reinterpret("turned", "buf", TURNED, 0),
        Reinterpret("whole", "buf", meta(4, 3), 0),
        product("x", "turned", "a"),
        product("whole", "turned", "out"),
        Free(("x", "turned")),
        Free(("whole", "buf")),
    )
    assert spared(given) == (
        Allocate("buf", TURNED),
        Launch(0, ("x", "buf"), ("lr",), (12,)),
        Reinterpret("whole", "buf", meta(4, 3), 0),
        product("x", "buf", "a"),
        product("whole", "buf", "out"),
        Free(("x",)),
        Free(("whole", "buf")),
    )


def test_what_is_freed_before_its_window_lives_on_under_its_name() -> None:
    given = program(
        product("x", "y", "a"),
        Reinterpret("window", "a", meta(2, 8), 0),
        Reinterpret("same", "window", meta(2, 8), 0),
        Free(("window",)),
        product("same", "same", "out"),
        Free(("same", "a")),
    )
    assert spared(given)[1:] == (
        Reinterpret("window", "a", meta(2, 8), 0),
        Free(()),
        product("window", "window", "out"),
        Free(("window", "a")),
    )


def test_memory_taken_over_as_it_is_keeps_its_name() -> None:
    given = program(
        product("x", "y", "a"),
        Allocate("b", meta(4, 4), reuse="a"),
        Launch(0, ("x", "b"), ("lr",), (16,)),
        Allocate("c", meta(2, 8), reuse="b"),
        Launch(0, ("x", "c"), ("lr",), (16,)),
        Reinterpret("d", "c", meta(4, 4), 0),
        product("d", "d", "out"),
        Free(("d", "c")),
    )
    assert spared(given)[1:] == (
        Launch(0, ("x", "a"), ("lr",), (16,)),
        Launch(0, ("x", "a"), ("lr",), (16,)),
        product("a", "a", "out"),
        Free(("a",)),
    ), "c is allocated as d, which is as b and a are"


@pytest.mark.parametrize(
    "window",
    [
        Reinterpret("w", "buf", meta(2, 3), 6),
        Reinterpret("w", "buf", meta(2, 3), 0),
        Reinterpret("w", "buf", meta(4, 3, dtype=torch.int32), 0),
        Reinterpret("w", "buf", TensorMeta((SizeName.of("n0", 4), 3), torch.float32, (3, 1)), 0),
        Reinterpret("w", "buf", meta(4, 3), SizeName.of("n0", 0)),
    ],
)
def test_a_window_on_a_part_or_as_something_else_stays(window: Reinterpret) -> None:
    given = program(Allocate("buf", meta(12)), window, product("w", "x", "out"), Free(("w", "buf")))
    assert spared(given) == given.steps


def test_outputs_and_windows_on_inputs_keep_their_names() -> None:
    given = program(
        Reinterpret("same_input", "x", meta(4, 3), 0),
        Allocate("out", meta(4, 4)),
        Reinterpret("seen", "out", meta(4, 4), 0),
        Allocate("buf", meta(4, 4)),
        Reinterpret("other", "buf", meta(4, 4), 0),
        Allocate("taken", meta(4, 3), reuse="x"),
        product("seen", "same_input", "a"),
        outputs=("out", "other"),
    )
    assert spared(given) == given.steps


def test_names_are_exchanged_in_every_kind_of_step() -> None:
    given = program(
        Allocate("buf", meta(4, 3)),
        Reinterpret("w", "buf", meta(4, 3), 0),
        Reinterpret("part", "w", meta(2, 3), 3),
        Launch(0, ("w", "buf"), ("lr",), (12,)),
        ForeachLaunch(0, ((("x", "w"), (12,), ("lr",)),), ("lr",)),
        ExternCall("aten.cat.default", ([ValueRef("w"), ValueRef("lr", scalar=True)],), (("dim", 0),), ("a",), (None,)),
        Allocate("taken", meta(2, 2), reuse="w"),
        product("w", "part", "out"),
    )
    assert spared(given)[1:] == (
        Reinterpret("part", "buf", meta(2, 3), 3),
        Launch(0, ("buf", "buf"), ("lr",), (12,)),
        ForeachLaunch(0, ((("x", "buf"), (12,), ("lr",)),), ("lr",)),
        ExternCall(
            "aten.cat.default", ([ValueRef("buf"), ValueRef("lr", scalar=True)],), (("dim", 0),), ("a",), (None,)
        ),
        Allocate("taken", meta(2, 2), reuse="buf"),
        product("buf", "part", "out"),
    )


@pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")
def test_a_program_computes_the_same_without_them() -> None:
    given = program(
        Allocate("buf", meta(12)),
        Launch(0, ("x", "buf"), ("lr",), (12,)),
        Reinterpret("turned", "buf", TURNED, 0),
        product("x", "turned", "a"),
        Allocate("b", meta(4, 3), reuse="buf"),
        Launch(0, ("x", "b"), ("lr",), (12,)),
        Reinterpret("second", "b", TURNED, 0),
        product("x", "second", "c"),
        ExternCall("aten.add.Tensor", (ValueRef("a"), ValueRef("c")), (("alpha", 3),), ("out",), (meta(4, 4),)),
        Free(("a", "c", "second", "turned", "x", "b")),
    )
    kernels = load_kernels(given.kernels, cache=open_cache(), preludes=PRELUDES)
    executable = load(given, kernels)
    assert "as_strided" not in executable.source and "alpha=3" in executable.source
    x = torch.randn(4, 3)
    (out,) = executable.run([x], [0.5])
    torch.testing.assert_close(out, 4 * (x @ (2 * x + 0.5).T))

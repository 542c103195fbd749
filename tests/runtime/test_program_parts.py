"""Equal parts of a program share one function: what they compute, what they free, and where they raise."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torchlazy.prims.meta import TensorMeta, contiguous_strides
from torchlazy.runtime.executor import Executable, load
from torchlazy.runtime.program import code as program_code
from torchlazy.runtime.program import parts as program_parts
from torchlazy.runtime.program.parts import ProgramPart, find_parts
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
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, open_cache
from torchlazy.runtime.toolchains.toolchain import has_cpp, load_kernels

from .tiny_sources import PRELUDES, cpp_foreach, cpp_gather, cpp_scale

needs_cpp = pytest.mark.skipif(not has_cpp(), reason="no C++ compiler")
LAYERS, UNITS = 6, 6
ALPHA = (("alpha", 0.0),)


@pytest.fixture(autouse=True)
def short_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of programs of any length."""
    monkeypatch.setattr(program_parts, "LEAST_STEPS", 0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return open_cache(tmp_path_factory.mktemp("cache"))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(shape, dtype, contiguous_strides(shape))


def layered(layers: int = LAYERS, odd: int | None = None) -> Program:
    """Layers of `UNITS` units: x @ w, and kernels on it, in its own memory too; each layer's weight is overwritten in
    place at its end. Layer `odd` reads its first weight transposed."""
    steps: list[Step] = []
    x = "x"
    for layer in range(layers):
        for unit in range(UNITS):
            n, w = f"{layer}_{unit}", f"w{layer}"
            if layer == odd and unit == 0:
                steps.append(Reinterpret(f"t{n}", w, TensorMeta((4, 4), torch.float32, (1, 4)), 0))
                w = f"t{n}"
            steps += [
                ExternCall("aten.mm.default", (ValueRef(x), ValueRef(w)), (), (f"m{n}",), (meta(4, 4),)),
                *([] if x == "x" else [Free((x,))]),
                Allocate(f"s{n}", meta(4, 4)),
                Launch(0, (f"m{n}", f"s{n}"), ("lr",), (16,)),
                Allocate(f"g{n}", meta(16), reuse=f"m{n}"),  # only kernels see it
                Launch(1, (f"s{n}", "index", f"g{n}"), (), (4,)),
                Allocate(f"r{n}", meta(4, 4)),
                Launch(0, (f"g{n}", f"r{n}"), ("lr",), (16,)),
                Free((f"g{n}",)),
                ExternCall("aten.add.Tensor", (ValueRef(f"s{n}"), ValueRef(f"r{n}")), ALPHA, (f"a{n}",), (meta(4, 4),)),
                Free((f"s{n}", f"r{n}")),
            ]  # fmt: skip
            x = f"a{n}"
        steps += [Reinterpret(f"new{layer}", f"w{layer}", meta(4, 4), 0), Launch(0, (x, f"new{layer}"), ("lr",), (16,))]
    weights = tuple((f"w{layer}", meta(4, 4)) for layer in range(layers))
    return Program(
        inputs=(("x", meta(4, 4)), ("index", meta(4, dtype=torch.int64)), *weights),
        scalars=(("lr", float),),
        kernels=(cpp_scale(0.25), cpp_gather()),
        steps=tuple(steps),
        outputs=(x, *(f"new{layer}" for layer in range(layers))),
        output_metas=(meta(4, 4),) * (layers + 1),
        donations=tuple((layer + 1, layer + 2) for layer in range(layers)),
    )


def values(program: Program, index: tuple[int, ...] = (3, -4, 1, 1)) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4), torch.tensor(index), *(torch.randn(4, 4) for _ in program.inputs[2:])]


def flat(program: Program, cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> Executable:
    """The program without parts."""
    with monkeypatch.context() as patched:
        patched.setattr(program_code, "find_parts", lambda program: [])
        return loaded(program, cache)


def loaded(program: Program, cache: KernelCache) -> Executable:
    return load(program, load_kernels(program.kernels, cache=cache, preludes=PRELUDES))


def stretches(parts: list[ProgramPart]) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in parts]


def test_layers_are_parts() -> None:
    program = layered()
    parts = find_parts(program)
    assert len({part.key for part in parts}) == 1 and len(parts) >= LAYERS - 1
    assert all(a.stop <= b.start for a, b in pairwise(parts))
    for part in parts:
        made = {step.name for step in program.steps[part.start : part.stop] if isinstance(step, Allocate | Reinterpret)}
        assert made <= part.made and "lr" in part.scalars and "lr" in part.names


def test_a_layer_that_differs_is_no_part() -> None:
    program = layered(9, odd=4)
    assert stretches(find_parts(program))
    names = [step.name if isinstance(step, Reinterpret) else "" for step in program.steps]
    odd = names.index("t4_0")
    assert not any(part.start <= odd < part.stop for part in find_parts(program))


def test_constants_that_are_equal_and_not_the_same_are_no_repetition() -> None:
    """0.0 and -0.0, 1 and True are equal in Python."""
    program = layered()
    for other in (-0.0, 0, False):
        number = 0
        steps = []
        for step in program.steps:
            if isinstance(step, ExternCall) and step.kwargs:
                number += 1
                step = replace(step, kwargs=(("alpha", other),)) if number % 2 == 0 and number > 18 else step
            steps.append(step)
        parts = find_parts(replace(program, steps=tuple(steps)))
        kinds: dict[object, list[str]] = {}
        for part in parts:
            constants = [repr(s.kwargs) for s in steps[part.start : part.stop] if isinstance(s, ExternCall)]
            assert kinds.setdefault(part.key, constants) == constants


@needs_cpp
@pytest.mark.parametrize("odd", [None, 3])
def test_parts_compute_what_the_steps_do(cache: KernelCache, monkeypatch: pytest.MonkeyPatch, odd: int | None) -> None:
    program = layered(9, odd)
    whole, plain = loaded(program, cache), flat(program, cache, monkeypatch)
    assert "def part0(" in whole.source and "def part" not in plain.source
    assert len(whole.source) < len(plain.source) * (0.5 if odd is None else 0.8)
    given = values(program)
    found, wanted = (run.run([tensor.clone() for tensor in given], [0.5]) for run in (whole, plain))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    donated = [tensor.clone() for tensor in given]
    results = whole.run(list(donated), [0.5])
    assert all(result.data_ptr() == weight.data_ptr() for result, weight in zip(results[1:], donated[2:], strict=True))


@needs_cpp
def test_parts_free_as_early_as_the_steps_do(cache: KernelCache) -> None:
    """Memory that one layer frees is gone when the next one runs: at most a few values are alive at once."""
    program = layered(9)
    names = {step.outputs[0] for step in program.steps if isinstance(step, ExternCall)}
    executable = loaded(program, cache)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    space = executable._function.__globals__
    assert space is not None
    for name in [name for name in space if name.startswith("aten_")]:
        operator = space[name]

        def watched(*args: object, operator: object = operator, **kwargs: object) -> torch.Tensor:
            nonlocal most
            result = operator(*args, **kwargs)  # type: ignore[operator]
            alive[:] = [ref for ref in alive if ref() is not None]
            alive.append(weakref.ref(result))
            most = max(most, len(alive))
            return result

        space[name] = watched
    executable.run(values(program), [0.5])
    assert len(names) == 2 * 9 * UNITS and most <= 3


@needs_cpp
def test_an_executable_with_parts_is_no_cycle(cache: KernelCache) -> None:
    executable = loaded(layered(), cache)
    assert "def part0(" in executable.source
    gone = weakref.ref(executable._function)
    del executable
    assert gone() is None


@needs_cpp
@pytest.mark.parametrize("layer", [0, 3, 8])
def test_an_error_in_a_part_tells_which_steps_have_begun(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """Inside and outside of parts, the same step as in the plain function."""
    program = layered(9)
    target = next(
        place for place, step in enumerate(program.steps) if isinstance(step, Launch) and f"g{layer}_2" in step.buffers
    )
    begun = []
    for executable in (loaded(program, cache), flat(program, cache, monkeypatch)):
        calls = 0
        space = executable._function.__globals__
        kernel = space["kernel1"]

        def failing(*args: object, kernel: object = kernel) -> int:
            nonlocal calls
            calls += 1
            return 1 if calls == layer * UNITS + 3 else kernel(*args)  # type: ignore[operator]

        space["kernel1"] = failing
        with pytest.raises(IndexError) as raised:
            executable.run(values(program), [0.5])
        place = executable.where_failed(raised.value)
        assert place is not None
        begun.append(place[0])
    assert begun[0] == begun[1] and begun[0][-1] == program.steps[target]


@needs_cpp
@pytest.mark.parametrize("rows", [3, 40])
def test_tables_of_many_rows(cache: KernelCache, rows: int) -> None:
    """A table of many rows is made column by column; empty rows are left out, windows come by their address."""
    sizes = [(number % 5) * 3 for number in range(rows)]
    program = Program(
        inputs=(("all", meta(1000)), *((f"a{n}", meta(size)) for n, size in enumerate(sizes))),
        scalars=(("lr", float), ("half", float), ("step", int)),
        kernels=(cpp_foreach(),),
        steps=(
            *(Reinterpret(f"b{n}", "all", meta(size), 20 * n) for n, size in enumerate(sizes)),
            ForeachLaunch(
                0,
                tuple(((f"a{n}", f"b{n}"), (size,), ("half" if n % 2 else "lr",)) for n, size in enumerate(sizes)),
                ("step",),
            ),
        ),
        outputs=("all",),
        output_metas=(meta(1000),),
        donations=((0, 0),),
    )
    given = [torch.zeros(1000), *(torch.randn(size) for size in sizes)]
    (out,) = loaded(program, cache).run(list(given), [0.25, 0.5, 7])
    for number, size in enumerate(sizes):
        wanted = given[number + 1] * (0.5 if number % 2 else 0.25) + 7
        torch.testing.assert_close(out[20 * number : 20 * number + size], wanted)


@needs_cpp
def test_outputs_that_are_their_inputs(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that only name inputs anew have no code; a later part gets one tensor under both names."""
    count = 60
    program = Program(
        inputs=tuple((f"p{n}", meta(8)) for n in range(count)),
        scalars=(("lr", float), ("step", int)),
        kernels=(cpp_foreach(),),
        steps=(
            *(Reinterpret(f"q{n}", f"p{n}", meta(8), 0) for n in range(count)),
            *(Allocate(f"t{n}", meta(8)) for n in range(count)),
            ForeachLaunch(0, tuple(((f"p{n}", f"t{n}"), (8,), ("lr",)) for n in range(count)), ("step",)),
            ForeachLaunch(0, tuple(((f"t{n}", f"q{n}"), (8,), ("lr",)) for n in range(count)), ("step",)),
            *(
                step
                for n in range(count)
                for step in (
                    ExternCall("aten.add.Tensor", (ValueRef(f"q{n}"), ValueRef(f"p{n}")), (), (f"o{n}",), (meta(8),)),
                    Free((f"t{n}",)),
                )
            ),
        ),
        outputs=tuple(f"{kind}{n}" for n in range(count) for kind in "qo"),
        output_metas=(meta(8),) * (2 * count),
        donations=tuple((2 * n, n) for n in range(count)),
    )
    executable = loaded(program, cache)
    assert "def part0(" in executable.source
    given = [torch.randn(8) for _ in range(count)]
    inputs = [tensor.clone() for tensor in given]
    results = executable.run(list(inputs), [0.5, 2])
    for n, tensor in enumerate(given):
        wanted = (tensor * 0.5 + 2) * 0.5 + 2
        assert results[2 * n].data_ptr() == inputs[n].data_ptr()
        torch.testing.assert_close(results[2 * n], wanted)
        torch.testing.assert_close(results[2 * n + 1], 2 * wanted)


def test_short_programs_are_written_as_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    program = layered()
    assert find_parts(program)
    monkeypatch.setattr(program_parts, "LEAST_STEPS", len(program.steps) + 1)
    assert not find_parts(program)

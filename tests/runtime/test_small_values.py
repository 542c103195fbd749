"""Small values in one piece of memory: which they are, where they lie, and that programs compute the same."""

from __future__ import annotations

import random

import pytest
import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.executor import load
from torchlazy.runtime.program import small_values
from torchlazy.runtime.program.program import Allocate, ExternCall, Free, Launch, Program, Reinterpret, Step, ValueRef
from torchlazy.runtime.program.small_values import LARGEST, SmallValues, place_small_values
from torchlazy.runtime.program.symbolic import SizeName
from torchlazy.runtime.toolchains.kernel_cache import open_cache
from torchlazy.runtime.toolchains.toolchain import has_cpp, load_kernels

from .tiny_sources import PRELUDES, cpp_scale

LENGTH = 24


def meta(size: int, device: str = "cpu") -> TensorMeta:
    return TensorMeta((size,), torch.float32, (1,), device)


def launch(source: str, target: str) -> Launch:
    return Launch(0, (source, target), ("lr",), (LENGTH,))


def program(steps: list[Step], outputs: tuple[str, ...] = ("out",)) -> Program:
    return Program(
        inputs=(("x", meta(LENGTH)),),
        scalars=(("lr", float),),
        kernels=(cpp_scale(),),
        steps=tuple(steps),
        outputs=outputs,
        output_metas=tuple(meta(LENGTH) for _ in outputs),
    )


def chain(count: int, size: int = LENGTH) -> list[Step]:
    """Values v0, v1, ... each made from the one before, which is freed then; `out` from the last."""
    steps: list[Step] = []
    for number in range(count):
        source = f"v{number - 1}" if number else "x"
        steps += [Allocate(f"v{number}", meta(size)), launch(source, f"v{number}"), Free((source,))]
    return [*steps, Allocate("out", meta(LENGTH)), launch(f"v{count - 1}", "out"), Free((f"v{count - 1}",))]


def placed(steps: list[Step], wants_tensor: set[str] | None = None) -> SmallValues:
    return place_small_values(program(steps), wants_tensor or {"out"})


def test_values_that_are_not_alive_together_share_their_place() -> None:
    found = placed(chain(6))
    assert found.names == {f"v{number}" for number in range(6)}
    size, offsets = found.pieces["cpu"]
    assert offsets == (0, 256, 0, 256, 0, 256) and size == 256 + 4 * LENGTH


def test_what_somebody_gets_as_a_tensor_is_left_alone() -> None:
    steps = chain(6)
    assert placed(steps, {"out", "v2"}).names == {"v0", "v1", "v3", "v4", "v5"}
    view = Reinterpret("view", "v2", meta(4), 0)
    assert "v2" not in placed([*steps[:8], view, *steps[8:]], {"out", "view"}).names
    taken = Allocate("w", meta(LENGTH), reuse="v5")
    assert "v5" not in placed([*steps[:-1], taken], {"out", "w"}).names, "memory that a tensor takes over"


def test_large_values_values_of_moving_sizes_and_few_values_stay_tensors() -> None:
    assert not placed(chain(6, LARGEST // 4 + 1)).names
    assert placed(chain(6, LARGEST // 4)).names
    assert not placed(chain(3)).names, "not worth a piece of memory"
    steps = chain(8)
    steps[0] = Allocate("v0", TensorMeta((SizeName.of("n0", LENGTH),), torch.float32, (1,)))
    assert "v0" not in placed(steps).names and "v1" in placed(steps).names


def test_the_piece_is_small_beside_what_the_program_holds() -> None:
    alive = [Allocate(f"v{number}", meta(LARGEST // 4)) for number in range(40)]
    small = [Allocate(f"s{number}", meta(8)) for number in range(40)]
    end: Step = Launch(0, tuple(step.name for step in (*alive, *small)), ("lr",), (LENGTH,))
    found = placed([*alive, *small, end])
    size, offsets = found.pieces["cpu"]
    assert found.names == {step.name for step in small} and size <= small_values._ALWAYS
    assert len(set(offsets)) == 40


def test_each_device_has_a_piece_of_its_own() -> None:
    steps: list[Step] = []
    for number in range(5):
        for device in ("cpu", "cuda:0"):
            name = f"v{number}{device[:2]}"
            steps += [Allocate(name, meta(8, device)), Launch(0, (name, name), (), (8,)), Free((name,))]
    found = placed(steps)
    assert {device: offsets for device, (_, offsets) in found.pieces.items()} == {"cpu": (0,) * 5, "cuda:0": (0,) * 5}


@pytest.mark.parametrize("seed", range(20))
def test_values_that_are_alive_together_never_overlap(seed: int) -> None:
    choice = random.Random(seed)
    steps: list[Step] = []
    alive: list[str] = []
    for number in range(60):
        steps.append(Allocate(f"v{number}", meta(choice.choice((1, 7, 64, 65, 300)))))
        alive.append(f"v{number}")
        steps.append(Launch(0, tuple(choice.sample(alive, min(2, len(alive)))), (), (1,)))
        if len(alive) > 5 or choice.random() < 0.4:
            gone = alive.pop(choice.randrange(len(alive)))
            steps.append(Launch(0, (gone, gone), (), (1,)))
            if choice.random() < 0.5:  # its memory is taken over
                steps.append(Allocate(f"w{number}", meta(1), reuse=gone))
                steps.append(Launch(0, (f"w{number}",), (), (1,)))
                gone = f"w{number}"
            steps.append(Free((gone,)))
    found = placed(steps)
    names = [step.name for step in steps if isinstance(step, Allocate) and step.reuse is None]
    sizes = {step.name: 4 * step.meta.shape[0] for step in steps if isinstance(step, Allocate)}
    offsets = dict(zip(names, found.pieces["cpu"][1], strict=True))
    roots: dict[str, str] = {name: name for name in names}
    last: dict[str, int] = {}
    for position, step in enumerate(steps):
        if isinstance(step, Allocate) and step.reuse:
            roots[step.name] = roots[step.reuse]
        names_used = step.buffers if isinstance(step, Launch) else (step.name,) if isinstance(step, Allocate) else ()
        last |= {roots[name]: position for name in names_used}
    held: dict[str, tuple[int, int]] = {}
    for position, step in enumerate(steps):
        held = {name: place for name, place in held.items() if last[name] >= position}
        if isinstance(step, Allocate) and step.reuse is None:
            begin, end = offsets[step.name], offsets[step.name] + sizes[step.name]
            assert begin % 256 == 0 and end <= found.pieces["cpu"][0]
            assert all(end <= other[0] or other[1] <= begin for other in held.values())
            held[step.name] = begin, end


@pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")
def test_a_program_computes_the_same_with_them() -> None:
    steps = chain(7)
    # A window on a small value, and one that is taken over.
    steps[-3:] = [
        Reinterpret("window", "v6", meta(LENGTH - 4), 4),
        Allocate("other", meta(LENGTH)),
        launch("v6", "other"),
        Launch(0, ("window", "other"), ("lr",), (LENGTH - 4,)),
        Free(("window",)),
        Allocate("taken", meta(LENGTH), reuse="v6"),
        launch("other", "taken"),
        Free(("other",)),
        Allocate("out", meta(LENGTH)),
        launch("taken", "out"),
        Free(("taken",)),
        ExternCall("aten.add.Tensor", (ValueRef("out"), ValueRef("out")), (), ("sum",), (meta(LENGTH),)),
    ]
    given = program(steps, ("out", "sum"))
    kernels = load_kernels(given.kernels, cache=open_cache(), preludes=PRELUDES)
    executable = load(given, kernels)
    assert executable.source.count("empty_strided") == 2, "the piece and the output"
    x = torch.randn(LENGTH)
    value = x
    for _ in range(7):
        value = 2 * value + 0.25
    other = 2 * value + 0.25
    other[: LENGTH - 4] = 2 * value[4:] + 0.25
    expected = 2 * (2 * other + 0.25) + 0.25
    for _ in range(2):
        out, double = executable.run([x], [0.25])
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(double, 2 * expected)

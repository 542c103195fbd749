"""One program over every kind of Triton launch, checked against torch; a test runs `main` in the interpreter."""

from __future__ import annotations

import tempfile

import torch
from torchlazy.prims.meta import TensorMeta, contiguous_strides
from torchlazy.runtime.executor import Executable, load_program
from torchlazy.runtime.program.program import Allocate, ForeachLaunch, Launch, Program, Reinterpret
from torchlazy.runtime.toolchains.kernel_cache import open_cache

from .tiny_triton import triton_foreach, triton_row_sum, triton_scale


def launches_program(device: str) -> Program:
    """scale, a row sum of an unaligned window, and a foreach of three rows, one of them empty."""

    def meta(*shape: int) -> TensorMeta:
        return TensorMeta(shape, torch.float32, contiguous_strides(shape), device)

    rows = tuple(((f"in{number}", f"out{number}"), (size,), ("lr",)) for number, size in enumerate((1000, 0, 7)))
    return Program(
        inputs=(("x", meta(40, 50)), ("in0", meta(1000)), ("in1", meta(0)), ("in2", meta(7))),
        scalars=(("lr", float), ("step", int)),
        kernels=(triton_scale(), triton_row_sum(), triton_foreach()),
        steps=(
            Allocate("y", meta(40, 50)),
            Launch(0, ("x", "y"), ("lr",), (2000,)),
            Reinterpret("tail", "y", meta(39, 50), 50),
            Allocate("sums", meta(39)),
            Launch(1, ("tail", "sums"), (), (39, 50)),
            *(Allocate(f"out{number}", meta(size)) for number, size in enumerate((1000, 0, 7))),
            ForeachLaunch(2, rows, ("step",)),
        ),
        outputs=("sums", "out0", "out1", "out2"),
        output_metas=(meta(39), meta(1000), meta(0), meta(7)),
    )


def check_launches(executable: Executable, device: str) -> None:
    inputs = [torch.randn(shape, device=device) for shape in ((40, 50), (1000,), (0,), (7,))]
    for lr, step in ((0.5, 3), (0.25, 4)):
        sums, *outs = executable.run(list(inputs), [lr, step])
        torch.testing.assert_close(sums, (inputs[0] * 2 + lr)[1:].sum(1))
        for out, given in zip(outs, inputs[1:], strict=True):
            torch.testing.assert_close(out, given * lr + step)


def main(device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_launches(load_program(launches_program(device), cache=open_cache(f"{folder}/cache")), device)
    print("checked")

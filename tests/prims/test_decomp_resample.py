"""Linear and cubic resampling, grid sampling, gradients of padding: values and strides against ATen eager."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torchlazy.prims.decompose import decompose
from torchlazy.prims.decomps import cpu_kernels

from tests.prims.graphs import Runtime, aten_graph, check, externs

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
NAN = float("nan")


@pytest.fixture(autouse=True)
def rules_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that are left to ATen on the CPU are tested there all the same."""
    monkeypatch.setattr(cpu_kernels, "ENABLED", False)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": 2e-2, "atol": 3e-2} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-5}


SIZES = [  # operand, output, scales
    ((5, 6), (10, 12), (None, None)),
    ((5, 6), (10, 12), (2.0, 2.0)),
    ((5, 6), (7, 4), (None, None)),
    ((5, 6), (12, 15), (2.5, 2.5)),
    ((9, 8), (3, 2), (None, None)),
    ((9, 8), (3, 3), (0.4, 0.4)),
    ((5, 6), (1, 1), (None, None)),
    ((1, 6), (4, 1), (None, None)),
    ((5, 6), (5, 6), (None, None)),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("align_corners", (False, True))
@pytest.mark.parametrize(("size", "output", "scales"), SIZES)
@pytest.mark.parametrize("name", ("upsample_bilinear2d", "upsample_bicubic2d"))
def test_resampling_of_planes(
    name: str, size: Any, output: Any, scales: Any, align_corners: bool, dtype: torch.dtype
) -> None:
    op, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    x = sample(2, 3, *size, dtype=dtype)
    check(op, x, output, align_corners, *scales, **close(dtype))
    check(op, x.to(memory_format=torch.channels_last), output, align_corners, *scales, **close(dtype))
    grad = sample(2, 3, *output, dtype=dtype, seed=1)
    check(backward, grad, output, (2, 3, *size), align_corners, *scales, **close(dtype))
    graph, _, _ = aten_graph(op, x, output, align_corners, *scales)
    assert externs(decompose(graph, strict=True)) == []


@pytest.mark.parametrize("align_corners", (False, True))
def test_resampling_of_lines_and_volumes(align_corners: bool) -> None:
    for size, output in ((7, 12), (9, 4), (5, 1), (1, 5), (3, 40), (40, 3)):
        check(aten.upsample_linear1d.default, sample(2, 3, size), [output], align_corners, **close(torch.float32))
        grad, back = sample(2, 3, output), aten.upsample_linear1d_backward.default
        check(back, grad, [output], [2, 3, size], align_corners, **close(torch.float32))
    x = sample(1, 2, 4, 3, 5)
    for output in ([8, 6, 10], [3, 5, 2]):
        check(aten.upsample_trilinear3d.default, x, output, align_corners, **close(torch.float32))
        grad, back = sample(1, 2, *output), aten.upsample_trilinear3d_backward.default
        check(back, grad, output, list(x.shape), align_corners, **close(torch.float32))


def test_a_scale_that_changes_stays_with_aten() -> None:
    arguments = (sample(1, 1, 4), [6], False, Runtime(1.5))
    graph, _, _ = aten_graph(aten.upsample_linear1d.default, *arguments)
    assert externs(decompose(graph, strict=True)) == ["extern_aten_upsample_linear1d_default"]


@pytest.mark.parametrize("mode", (0, 1, 2))
@pytest.mark.parametrize("padding_mode", (0, 1, 2))
@pytest.mark.parametrize("align_corners", (False, True))
def test_grid_sample2d(mode: int, padding_mode: int, align_corners: bool) -> None:
    for dtype, size in product((torch.float32, torch.float64), ((5, 6), (1, 4))):
        x, grid = sample(2, 3, *size, dtype=dtype), sample(2, 4, 7, 2, dtype=dtype, seed=1) * 1.5
        grid[0, 0, 0] = 0.0
        grid[0, 0, 1] = 1.0
        grid[0, 0, 2] = -1.0
        grid[0, 0, 3] = 30.0
        for each in (x, x.to(memory_format=torch.channels_last)):
            check(aten.grid_sampler_2d.default, each, grid, mode, padding_mode, align_corners, **close(dtype))


@pytest.mark.parametrize("mode", (0, 1))
@pytest.mark.parametrize("padding_mode", (0, 1, 2))
@pytest.mark.parametrize("align_corners", (False, True))
def test_grid_sample3d(mode: int, padding_mode: int, align_corners: bool) -> None:
    x, grid = sample(2, 3, 4, 5, 6), sample(2, 3, 4, 2, 3, seed=1) * 1.3
    check(aten.grid_sampler_3d.default, x, grid, mode, padding_mode, align_corners, **close(torch.float32))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["reflection", "replication"])
def test_gradients_of_padding(name: str, dtype: torch.dtype) -> None:
    one, two, three = (getattr(aten, f"{name}_pad{n}d_backward").default for n in (1, 2, 3))
    forward = [getattr(aten, f"{name}_pad{n}d") for n in (1, 2, 3)]
    x = sample(2, 3, 5, 6, dtype=dtype)
    cases = [
        (one, forward[0], x[0], [2, 3]),
        (one, forward[0], x[0], [0, 5]),
        (two, forward[1], x, [1, 2, 3, 0]),
        (two, forward[1], x[0], [0, 0, 1, 1]),
        (two, forward[1], x, [-1, 2, 0, -2]),
        (two, forward[1], x.to(memory_format=torch.channels_last), [1, 1, 1, 1]),
        (three, forward[2], x, [1, 1, 2, 2, 0, 1]),
        (three, forward[2], x[None], [5, 5, 4, 4, 2, 2]),
    ]
    if name == "replication":
        cases.append((two, forward[1], x, [12, 3, 9, 1]))
    for backward, pad, operand, amounts in cases:
        grad = sample(*pad(operand, amounts).shape, dtype=dtype, seed=2)
        rounded = {"rtol": 2e-2, "atol": 0.2} if dtype.itemsize == 2 else close(dtype)  # eager rounds each addition
        check(backward, grad, operand, amounts, **rounded)

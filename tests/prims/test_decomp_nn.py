"""Dropout, gates, resampling, padding: values, shapes and strides against ATen eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchlazy.prims.decompose import decompose

from tests.prims.graphs import Runtime, aten_graph, check, externs, run_decomposed

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-6}


def test_dropout_outside_training_is_the_identity() -> None:
    check(aten.native_dropout.default, sample(3, 4), 0.5, False)
    graph, _, _ = aten_graph(aten.native_dropout.default, sample(3, 4), 0.5, True)
    assert externs(decompose(graph, strict=True)) == ["extern_aten_native_dropout_default"]
    check(aten.native_dropout_backward.default, sample(3, 4), sample(3, 4) > 0, 2.0)


def test_random_bits() -> None:
    op = torch.ops.torchlazy.random_bits.default
    check(op, [3, 5], 1234567890123, 7, device=torch.device("cpu"))
    graph, inputs, expected = aten_graph(op, [4], Runtime(99), 1, device=torch.device("cpu"))
    assert torch.equal(run_decomposed(graph, inputs)[0], expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_glu(dtype: torch.dtype) -> None:
    x = sample(4, 6, 2, dtype=dtype)
    for dim in (-1, 0, 1):
        check(aten.glu.default, x, dim, **close(dtype))
        check(aten.glu_backward.default, aten.glu(x, dim), x, dim, **close(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_prelu(dtype: torch.dtype) -> None:
    x, weight = sample(4, 6, dtype=dtype), sample(1, 6, dtype=dtype, seed=1).expand(4, 6)
    x[0, 0] = 0.0
    check(aten._prelu_kernel.default, x, weight, **close(dtype))
    check(aten._prelu_kernel_backward.default, sample(4, 6, dtype=dtype, seed=2), x, weight, **close(dtype))


def test_shuffles() -> None:
    x = sample(2, 12, 4, 6)
    check(aten.pixel_shuffle.default, x, 2)
    check(aten.pixel_unshuffle.default, x, 2)
    check(aten.pixel_shuffle.default, sample(4, 3, 3), 2)
    check(aten.channel_shuffle.default, x, 3)


@pytest.mark.parametrize("name", ["upsample_nearest", "_upsample_nearest_exact"])
def test_upsample_nearest(name: str) -> None:
    x = sample(2, 3, 5, 4)
    op, op1, op3 = (getattr(aten, f"{name}{n}d").default for n in (2, 1, 3))
    for size in ([10, 8], [15, 4], [7, 9], [3, 2], [5, 4]):
        check(op, x, size)
    check(op, x, [12, 10], 2.5, 2.5)
    check(op, x.to(memory_format=torch.channels_last), [10, 8])
    check(op1, x[0], [8])
    check(op3, x[None], [6, 10, 5])
    backward = getattr(aten, f"{name}2d_backward").default
    check(backward, sample(2, 3, 10, 12), [10, 12], [2, 3, 5, 4])


@pytest.mark.parametrize("name", ["reflection", "replication"])
def test_padding_from_the_inside(name: str) -> None:
    one, two, three = (getattr(aten, f"{name}_pad{n}d").default for n in (1, 2, 3))
    x = sample(2, 3, 4, 5)
    check(one, x[0], [2, 3])
    check(two, x, [1, 2, 3, 0])
    check(two, x[0], [0, 0, 1, 1])
    check(three, x, [1, 1, 2, 2, 0, 1])
    check(two, x, [-1, 2, 0, -2])

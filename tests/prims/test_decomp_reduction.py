"""Reductions: values, dtypes and shapes against ATen eager."""

from __future__ import annotations

import math

import pytest
import torch
from torchlazy.prims import eager
from torchlazy.prims.decompose import decompose
from torchlazy.prims.passes.graph_passes import run_passes

from tests.prims.graphs import Runtime, aten_graph, check, externs

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.uint8, torch.bool)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_sum_and_prod(dtype: torch.dtype) -> None:
    x = sample(3, 4, 5, dtype=dtype)
    check(aten.sum.default, x)
    check(aten.sum.dim_IntList, x, [-1, 0], True)
    check(aten.sum.dim_IntList, x, [])
    check(aten.sum.dim_IntList, x, None, True)
    check(aten.sum.default, sample(dtype=dtype))
    check(aten.sum.dim_IntList, sample(0, 3, dtype=dtype), [0])
    check(aten.nansum.default, x, [1])
    check(aten.prod.default, sample(4, dtype=dtype))
    check(aten.prod.dim_int, x, -2, True)
    check(aten.prod.dim_int, sample(2, 0, dtype=dtype), 1)


def test_sum_rounds_its_input_to_the_dtype_asked_for() -> None:
    check(aten.sum.default, sample(6) * 3, dtype=torch.int64)
    check(aten.sum.dim_IntList, sample(6, 2), [0], dtype=torch.bfloat16)
    check(aten.mean.default, sample(6, dtype=torch.int64), dtype=torch.float32)
    check(aten.prod.default, sample(6), dtype=torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_mean(dtype: torch.dtype) -> None:
    x = sample(3, 4, 5, dtype=dtype)
    check(aten.mean.default, x)
    check(aten.mean.dim, x, [-1], True)
    check(aten.mean.dim, x, [])
    check(aten.mean.default, sample(dtype=dtype))
    check(aten.mean.default, sample(0, dtype=dtype))


def test_nansum_skips_nan() -> None:
    check(aten.nansum.default, torch.tensor([[1.0, math.nan], [2.0, 3.0]]), [1], True)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_extremes(dtype: torch.dtype) -> None:
    x = sample(3, 4, 5, dtype=dtype)
    for op in (aten.amax.default, aten.amin.default):
        check(op, x)
        check(op, x, [-1, 0], True)
        check(op, sample(dtype=dtype), [0])
    for op in (aten.max.default, aten.min.default):
        check(op, x)
        check(op, sample(dtype=dtype))
    for op in (aten.max.dim, aten.min.dim):
        check(op, x, -2)
        check(op, x, 0, True)
        check(op, sample(dtype=dtype), -1)
    check(aten.max.other, x, sample(5, dtype=dtype, seed=1))
    check(aten.aminmax.default, x)
    check(aten.aminmax.default, x, dim=1, keepdim=True)
    if dtype != torch.bool:
        for op in (aten.argmax.default, aten.argmin.default):
            check(op, x)
            check(op, x, None, True)
            check(op, x, -1, True)
            check(op, sample(dtype=dtype), 0)


def test_extremes_with_nan_take_the_first_nan() -> None:
    x = torch.tensor([[1.0, math.nan, math.nan, 2.0], [3.0, 3.0, -math.inf, math.inf]])
    for op in (aten.max.dim, aten.min.dim):
        check(op, x, 1)
    check(aten.argmax.default, x, 1)
    check(aten.amax.default, x, [1])
    check(aten.aminmax.default, x, dim=1)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_any_and_all(dtype: torch.dtype) -> None:
    x = sample(3, 4, dtype=dtype)
    for name in ("any", "all"):
        packet = getattr(aten, name)
        check(packet.default, x)
        check(packet.dim, x, -1, True)
        check(packet.dims, x, [0, 1])
        check(packet.dims, x, [])
        check(packet.dims, x, None, True)
        check(packet.default, sample(0, dtype=dtype))
    check(aten.count_nonzero.default, x)
    check(aten.count_nonzero.dim_IntList, x, [0, -1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variance(name: str, dtype: torch.dtype) -> None:
    packet = getattr(aten, name)
    x = sample(3, 4, 5, dtype=dtype)
    check(packet.default, x)
    check(packet.default, x, False)
    check(packet.dim, x, [-1], True, True)
    check(packet.correction, x, [0, 2], correction=2, keepdim=True)
    check(packet.correction, x, [1])
    check(packet.correction, x)
    check(packet.correction, x, [0], correction=3)
    check(packet.correction, x, [0], correction=5)
    check(packet.correction, sample(0, dtype=dtype))
    check(packet.correction, sample(dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_variance_on_the_cpu_is_summed_in_doubles(name: str, dtype: torch.dtype) -> None:
    """1e20 squared is no float32, nor is the sum of a thousand squares of 1e18; eager's deviations are finite."""
    packet = getattr(aten, name)
    for scale in (1e18, 1e20, 3e37):
        x = (sample(4, 1000) * scale).to(dtype)
        check(packet.correction, x, [1])
        check(packet.correction, x, [0], correction=0)
        if scale < 1e37:  # of all elements eager sums float32 in float32 for the mean
            check(packet.default, x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", [2, 1, 0, 3, 0.5, -1, math.inf, -math.inf])
def test_norms(order: float, dtype: torch.dtype) -> None:
    x = sample(3, 4, 5, dtype=dtype)
    check(aten.linalg_vector_norm.default, x, order)
    check(aten.linalg_vector_norm.default, x, order, [-1, 0], True)
    check(aten.linalg_vector_norm.default, sample(dtype=dtype), order)
    check(aten.norm.Scalar, x, order)
    check(aten.norm.ScalarOpt_dim, x, order, [1], True)
    check(aten.dist.default, x, sample(4, 5, dtype=dtype, seed=3), order, rtol=2e-2 if dtype.itemsize == 2 else None,
          atol=2e-2 if dtype.itemsize == 2 else None)  # fmt: skip


def test_norm_dtypes_and_empty() -> None:
    half = sample(7, dtype=torch.bfloat16)
    check(aten.linalg_vector_norm.default, half, 2, dtype=torch.float32)
    check(aten.norm.ScalarOpt_dtype, half, None, dtype=torch.float32)
    check(aten.norm.ScalarOpt_dim_dtype, half, None, [0], True, dtype=torch.float64)
    check(aten.linalg_vector_norm.default, sample(2, 0), 2, [1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_logsumexp(dtype: torch.dtype) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}  # ATen rounds each step of a half
    x = sample(3, 4, 5, dtype=dtype) * 4
    check(aten.logsumexp.default, x, [-1], **tolerance)
    check(aten.logsumexp.default, x, [0, 2], True, **tolerance)
    check(aten.logsumexp.default, sample(2, 0, dtype=dtype), [1])
    check(aten.logsumexp.default, torch.tensor([[-math.inf, -math.inf], [math.inf, 1.0]]).to(dtype), [1])


def test_logsumexp_of_integers() -> None:
    check(aten.logsumexp.default, sample(3, 4, dtype=torch.int32), [1])


def test_complex_numbers_and_corrections_that_change_stay_with_aten() -> None:
    complex_numbers = torch.complex(sample(3), sample(3, seed=1))
    for op in (aten.sum.default, aten.mean.default, aten.var.correction, aten.linalg_vector_norm.default):
        graph, _, _ = aten_graph(op, complex_numbers)
        assert len(externs(decompose(graph, strict=True))) == 1
    graph, _, _ = aten_graph(aten.var.correction, sample(3), correction=Runtime(1))
    assert len(externs(decompose(graph, strict=True))) == 1


def test_truth_of_integers_survives_the_graph_passes() -> None:
    x = torch.tensor([[0, 2], [0, 0]], dtype=torch.uint8)
    graph, inputs, expected = aten_graph(aten.any.dims, x, [])  # uint8 -> bool -> uint8 is not the identity
    assert torch.equal(eager.run(run_passes(decompose(graph, strict=True)), inputs)[0], expected)


def test_renorm() -> None:
    x = torch.randn(4, 3, 5) * 3
    for p in (1.0, 2.0, float("inf")):
        for dim in (0, 1, -1):
            check(aten.renorm.default, x, p, dim, 4.0, rtol=1e-5, atol=1e-6)


def test_both_extremes_and_truth_of_all() -> None:
    x = torch.randn(4, 5)
    check(aten._aminmax.default, x)
    check(aten._aminmax.dim, x, 1, True)
    check(aten._is_all_true.default, x > -9)
    check(aten._is_any_true.default, x > 9)

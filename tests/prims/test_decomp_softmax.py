"""Softmax family: values, dtypes and shapes against ATen eager."""

from __future__ import annotations

import math

import pytest
import torch

from tests.prims.graphs import check

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", [aten._softmax.default, aten._log_softmax.default])
def test_forward(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    # ATen's CPU log-softmax of halves rounds the logarithm of the sum before it is subtracted.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
    for x, dim in (
        (sample(3, 4, 5, dtype=dtype), -1),
        (sample(3, 4, 5, dtype=dtype), 1),
        (sample(3, 4, dtype=dtype).t(), 0),
        (sample(dtype=dtype), 0),
        (sample(dtype=dtype), -1),
        (sample(0, 4, dtype=dtype), 1),
        (sample(4, 0, dtype=dtype), 1),
        (torch.tensor([[-math.inf, 1.0], [math.nan, 1.0], [-math.inf, -math.inf]]).to(dtype), 1),
    ):
        check(op, x, dim, False, **tolerance)


@pytest.mark.parametrize("dtype", FLOATS)
def test_backward(dtype: torch.dtype) -> None:
    # ATen's CPU kernels round some inner steps of a half; the formula here does not.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
    x, grad = sample(3, 4, 5, dtype=dtype), sample(3, 4, 5, dtype=dtype, seed=1)
    for dim in (-1, 0, 1):
        check(aten._softmax_backward_data.default, grad, aten._softmax(x, dim, False), dim, dtype, **tolerance)
        check(aten._log_softmax_backward_data.default, grad, aten._log_softmax(x, dim, False), dim, dtype, **tolerance)
    one = sample(dtype=dtype)
    check(aten._softmax_backward_data.default, one, one, 0, dtype, **tolerance)
    check(aten._log_softmax_backward_data.default, one, one, -1, dtype, **tolerance)


@pytest.mark.parametrize("dtype", FLOATS)
def test_safe_softmax_answers_zero_for_a_masked_row(dtype: torch.dtype) -> None:
    x = sample(3, 4, dtype=dtype)
    x[1] = -math.inf
    check(aten._safe_softmax.default, x, -1)
    check(aten._safe_softmax.default, x, 0)
    check(aten._safe_softmax.default, x, -1, torch.float32)

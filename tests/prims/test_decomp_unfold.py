"""Windows as columns and back: values and shapes against ATen eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.prims.graphs import check

aten = torch.ops.aten

WINDOWS = [  # kernel, dilation, padding, stride
    ([2, 3], [1, 1], [0, 0], [1, 1]),
    ([3, 2], [1, 2], [1, 1], [2, 1]),
    ([2, 2], [2, 2], [1, 0], [3, 2]),
    ([1, 1], [1, 1], [0, 0], [2, 2]),
    ([5, 5], [1, 1], [2, 2], [1, 1]),
]


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("window", WINDOWS)
def test_columns_and_back(window: Any, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 2e-2, "atol": 6e-2} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-5}
    for x in (sample(2, 3, 6, 7, dtype=dtype), sample(3, 7, 6, dtype=dtype)):
        check(aten.im2col.default, x, *window)
        columns = aten.im2col(x, *window)
        check(aten.col2im.default, columns, x.shape[-2:], *window, **tolerance)
    check(aten.im2col.default, sample(2, 3, 6, 7, dtype=dtype).to(memory_format=torch.channels_last), *window)


@pytest.mark.parametrize(("size", "step"), [(2, 2), (3, 5), (4, 2), (3, 1), (1, 1), (7, 3)])
def test_gradient_of_unfold(size: int, step: int) -> None:
    for shape, dim in (((9, 4), 0), ((2, 10, 3), 1), ((3, 8), -1)):
        grad = sample(*torch.zeros(shape).unfold(dim, size, step).shape)
        check(aten.unfold_backward.default, grad, list(shape), dim, size, step, rtol=1e-5, atol=1e-6)

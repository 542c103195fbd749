"""Functions of a number and a tensor in this order, and other calls whose fake kernels say another dtype or shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.lazy.compare import check, data

NUMBER_FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: torch.add(2, x), "mul": lambda x: torch.mul(2.5, x), "sub": lambda x: torch.sub(1, x),
    "div": lambda x: torch.div(True, x), "floor_divide": lambda x: torch.floor_divide(7, x),
    "add with alpha": lambda x: torch.add(2, x, alpha=3), "pow": lambda x: torch.pow(2, x),
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.uint8)


@pytest.mark.parametrize("name", NUMBER_FIRST)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_first(name: str, dtype: torch.dtype, tier: str) -> None:
    for shape in ((3, 4), ()):
        check(lambda d: NUMBER_FIRST[name]((data(d, *shape).abs() * 3 + 1).to(dtype)))  # noqa: B023


@pytest.mark.parametrize("dtype", (torch.float32, torch.int32), ids=str)
def test_times_a_power_of_two(dtype: torch.dtype, tier: str) -> None:
    for shapes in (((3,), (3,)), ((), (3,)), ((3,), ()), ((), ())):
        for exponent in (torch.float32, torch.float64):
            check(lambda d: torch.ldexp(data(d, *shapes[0]).to(dtype), (data(d, *shapes[1]) * 2).to(exponent)))  # noqa: B023


@pytest.mark.parametrize("dim", [[], None, [0], [0, 1]])
def test_nansum_over_no_dimensions(dim: list[int] | None, tier: str) -> None:
    for keepdim in (False, True):
        check(lambda d: torch.nansum(data(d, 3, 4), dim, keepdim))  # noqa: B023

"""Rules that end in a library call keep sizes tracked: the third size of such an operator compiles nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchlazy
from torch import Tensor

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "addmm, beta 0": lambda x: torch.addmm(x[0] * 2, x, x.t() @ x, beta=0, alpha=3) + 1,
    "baddbmm, beta 0": lambda x: torch.baddbmm(x[None] * 2, x[None], (x.t() @ x)[None], beta=0) + 1,
    "addbmm": lambda x: torch.addbmm(x * 2, x.expand(3, *x.shape), (x.t() @ x).expand(3, 5, 5)) + 1,
    "bucketize": lambda x: torch.bucketize(x, x[0].sort().values) + 1,
    "affine_grid": lambda x: torch.nn.functional.affine_grid(
        x[:, :1, None] * x.new_ones(1, 2, 3), [x.shape[0], 1, 4, 6], align_corners=False
    ) + 1,
    "conv1d": lambda x: torch.nn.functional.conv1d(x[:, None], x[:1, None, :3]) + 1,
    "index_select": lambda x: x.index_select(0, x[:, 0].argsort()) + 1,
    "scatter at one position": lambda x: x.scatter(1, x.argmax(1, keepdim=True), 7.0) + 1,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("sizes_vary")


@pytest.mark.parametrize("name", CALLS)
def test_the_third_size_compiles_nothing(name: str) -> None:
    call = CALLS[name]
    compiles = []
    for size in (4, 7, 12, 9):
        torch.manual_seed(size)
        x = torch.randn(size, 5)
        torch.testing.assert_close(call(x.to("lazy")).cpu(), call(x))
        compiles.append(torchlazy.metrics()["compiles"])
    assert compiles[1] == compiles[2] == compiles[3] <= 2, torchlazy.metrics()["not_generalised"]
